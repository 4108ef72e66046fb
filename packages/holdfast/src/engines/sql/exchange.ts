/** Read, decide, write: with a comparison of versions, or under locks. */
import type { SqlConnection } from "../../core/database.ts";
import type { How } from "../../core/store.ts";
import type { StoreDialect } from "./dialect.ts";

/** What a decision asks for before it can be made, or what it comes to. */
export type Decided<Need, Answer, Writes> =
  { readonly need: Need } | { readonly verdicts: Answer; readonly writes: Writes };

export interface Exchange<View, Need, Answer, Writes> {
  /** What it decides about, for people and for the memory of conflicts: buckets, levels. */
  readonly names: readonly string[];
  /** `locked`: with locks, in one order, as of now. `needs`: what earlier decisions on this view asked for, in their order. */
  read(locked: boolean, needs: readonly Need[]): Promise<View>;
  decide(view: View): Decided<Need, Answer, Writes>;
  /** `guarded`: only if everything is as it was read. False: it is not, or an id is taken; what it has written is undone. */
  write(writes: Writes, guarded: boolean): Promise<boolean>;
}

/** Somebody else was faster. */
class Conflict extends Error {}

/** How long a name that somebody else was faster at is locked first: long enough for a rush, short enough to forget one. */
const hotMs = 1000;
/** Of so many names, then all are forgotten. */
const mostHot = 10_000;
/** A view that is never complete is a fault of the decision. */
const mostNeeds = 10;

export class Exchanges<C extends SqlConnection> {
  readonly #dialect: StoreDialect<C>;
  #hot = new Map<string, number>();

  constructor(dialect: StoreDialect<C>) {
    this.#dialect = dialect;
  }

  async run<View, Need, Answer, Writes>(
    connection: C,
    { waitMs, free }: How,
    exchange: Exchange<View, Need, Answer, Writes>,
  ): Promise<Answer> {
    const dialect = this.#dialect;
    // A snapshot of the caller's may be older than what others have written: it is never compared, it is locked.
    if (!free) return dialect.inside(connection, waitMs, () => this.#locked(exchange));
    if (dialect.optimistic && !this.#isHot(exchange.names)) {
      const { verdicts, writes } = await this.#decided(exchange, false);
      try {
        await dialect.transaction(connection, waitMs, async () => {
          if (!(await exchange.write(writes, true))) throw new Conflict();
        });
        return verdicts;
      } catch (error) {
        if (!this.#lostRace(connection, error)) throw error;
        this.#heat(exchange.names);
      }
    }
    return dialect.transaction(connection, waitMs, () => this.#locked(exchange));
  }

  #lostRace(connection: C, error: unknown): boolean {
    if (error instanceof Conflict) return true;
    const failure = this.#dialect.failure(connection, error);
    return failure === "unique" || failure === "serialization" || failure === "deadlock";
  }

  async #locked<View, Need, Answer, Writes>(exchange: Exchange<View, Need, Answer, Writes>): Promise<Answer> {
    const { verdicts, writes } = await this.#decided(exchange, true);
    if (!(await exchange.write(writes, false)))
      throw new Error(`${exchange.names.join(", ")}: rows that are locked were changed by somebody else`);
    return verdicts;
  }

  async #decided<View, Need, Answer, Writes>(
    exchange: Exchange<View, Need, Answer, Writes>,
    locked: boolean,
  ): Promise<{ readonly verdicts: Answer; readonly writes: Writes }> {
    const needs: Need[] = [];
    for (;;) {
      const decided = exchange.decide(await exchange.read(locked, needs));
      if (!("need" in decided)) return decided;
      if (needs.push(decided.need) > mostNeeds)
        throw new Error(`${exchange.names.join(", ")}: a decision asks for more and more`);
    }
  }

  #isHot(names: readonly string[]): boolean {
    const now = performance.now();
    return names.some((name) => (this.#hot.get(name) ?? 0) > now);
  }

  #heat(names: readonly string[]): void {
    if (this.#hot.size > mostHot) this.#hot = new Map();
    for (const name of names) this.#hot.set(name, performance.now() + hotMs);
  }
}
