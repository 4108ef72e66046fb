/** Movements and what is on hand, compared and made to agree; and tables of the caller's, taken over and guarded. */
import { checkNames } from "../input/options.ts";
import { checkTrust } from "../input/trust.ts";
import { optionalText } from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import { type StockBatcher, longMs, ownTablesOf } from "./batcher.ts";
import { aboutOf } from "./checks.ts";
import { type Finding, explain } from "./domain.ts";
import { ownId } from "./ids.ts";
import type { Places } from "./places.ts";
import type { Facts } from "./store.ts";
import type { ReconcileOptions, Reconciliation } from "./types.ts";

const reconcileNames = new Set(["sku", "location", "repair", "trust", "by", "note"]);

export class Upkeep {
  readonly #places: Places;

  constructor(places: Places) {
    this.#places = places;
  }

  async reconcile(options: ReconcileOptions): Promise<Reconciliation> {
    checkNames("reconcile", options, reconcileNames);
    const { sku, location, repair = false, by } = options;
    const trust = checkTrust("reconcile", options.trust);
    for (const [name, value] of Object.entries({ sku, location, by, note: options.note }))
      optionalText("reconcile", name, value);
    const findings: Finding[] = [];
    let [levels, movements] = [0, 0];
    for (const batcher of this.#places.those(sku))
      for await (const each of factsOf(batcher, sku, location)) {
        const wrong = explain(each);
        levels++;
        movements += each.movements;
        findings.push(...wrong);
        if (!repair || wrong.length === 0) continue;
        const note = options.note ?? wrong.map(({ text }) => text).join("; ");
        const mending = { id: ownId(), trust, about: { ...aboutOf({}, "MANUAL"), by, note } };
        await batcher.alone(
          undefined,
          (connection, store, book, how) => store.upkeep.repair(connection, book, each, mending, how),
          longMs,
        );
      }
    return {
      ok: findings.length === 0,
      levels,
      movements,
      findings,
      repaired: repair && findings.length > 0,
    };
  }

  async adopt(): Promise<number> {
    if (!this.#places.book.table) throw new UsageError("adopt: there is no table of yours, see `levels`");
    const counts = await Promise.all(
      this.#places.everywhere.map((batcher) =>
        batcher.alone(
          undefined,
          (connection, store, book, how) => ownTablesOf(store).adopt(connection, book, how),
          longMs,
        ),
      ),
    );
    return counts.reduce((a, b) => a + b, 0);
  }

  guardSql(): readonly string[] {
    const { book } = this.#places;
    if (!book.table) throw new UsageError("guardSql: there is no table of yours, see `levels`");
    const [batcher] = this.#places.everywhere as readonly [StockBatcher];
    return ownTablesOf(batcher.store).guard(book);
  }
}

async function* factsOf(
  batcher: StockBatcher,
  sku: string | undefined,
  location: string | undefined,
): AsyncGenerator<Facts> {
  const most = 500;
  for (let after: Facts | undefined; ;) {
    const facts = await batcher.alone(
      undefined,
      (connection, store, book, how) =>
        store.upkeep.facts(connection, book, { sku, location, after, most }, how),
      longMs,
    );
    yield* facts;
    after = facts.at(-1);
    if (facts.length < most) return;
  }
}
