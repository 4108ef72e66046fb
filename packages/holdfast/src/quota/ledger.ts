/** The ledger of one quota: read, compared with what is counted, and made short. */
import { randomUUID } from "node:crypto";
import { type Older, olderThan } from "../input/older.ts";
import { checkNames } from "../input/options.ts";
import { type Trust, checkTrust } from "../input/trust.ts";
import { checkRows, checkWhole } from "../input/values.ts";
import type { Connection } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import type { How, Soon } from "../seam/store.ts";
import { quotaBatcherOf } from "./batcher.ts";
import type { Buckets } from "./buckets.ts";
import { readNames, readOptions, textOf } from "./checks.ts";
import { homesOf, isAway } from "./homes.ts";
import type { BucketName, Elsewhere, QuotaEntry, QuotaLists } from "./store.ts";
import type { Grant, HistoryEntry, Pruned, ReadOptions, Reconciliation, Subject } from "./types.ts";

/** Of `reconcile`, which reads a whole ledger: a million entries in a second or two. */
const patienceMs = 120_000;

const historyOptions = new Set(["before", "limit", ...readNames]);
const reconcileOptions = new Set(["repair", "trust"]);
const pruneOptions = new Set(["before", "olderThanMs", "signal"]);

export class Ledger {
  readonly #buckets: Buckets;

  constructor(buckets: Buckets) {
    this.#buckets = buckets;
  }

  async grants(subject: Subject, options: ReadOptions): Promise<readonly Grant[]> {
    checkNames("grants", options, readOptions);
    const bucket = { quota: this.#buckets.terms.name, subject: textOf(subject) };
    const grants = await this.#listed("grants", bucket, options, (lists, connection, how) =>
      lists.grants(connection, bucket, how),
    );
    return grants.map(({ id, amount, spent, priority, until, over, at }) => ({
      id,
      amount,
      spent,
      left: over ? 0 : amount - spent,
      priority,
      expiresAt: until === undefined ? undefined : new Date(until),
      at: at === undefined ? undefined : new Date(at),
    }));
  }

  async history(
    subject: Subject,
    options: { readonly before?: number; readonly limit?: number } & ReadOptions,
  ): Promise<{ readonly entries: readonly HistoryEntry[]; readonly next: number | undefined }> {
    checkNames("history", options, historyOptions);
    const { before, limit = 100 } = options;
    checkRows("history", "limit", limit, 10_000);
    if (before !== undefined) checkWhole("history", "before", before, 0);
    const entries = await this.#entries(subject, before, limit, options);
    return {
      entries: entries.map(shown),
      next: entries.length === limit ? entries.at(-1)?.version : undefined,
    };
  }

  async reconcile(
    subject: Subject,
    options: { readonly repair?: boolean; readonly trust?: Trust },
  ): Promise<Reconciliation> {
    checkNames("reconcile", options, reconcileOptions);
    const trust = checkTrust("reconcile", options.trust);
    const { terms } = this.#buckets;
    if (trust === "levels" && terms.slides)
      throw new UsageError(
        `quota ${terms.name}: a window that slides is what its entries say, so there is nothing but the ledger to trust`,
      );
    const bucket = { quota: terms.name, subject: textOf(subject), limit: await terms.limitOf(subject) };
    const repair = options.repair ? { id: randomUUID(), trust } : undefined;
    const about = { names: [this.#buckets.nameOf(bucket.subject)], id: repair?.id, ms: patienceMs };
    const homes = homesOf(this.#buckets.instances);
    homes.refuseInside("reconcile");
    // What is not there cannot be compared with anything, nor be mended.
    const lost = await homes.lost(bucket);
    if (lost.length > 0) return { ok: false, entries: 0, findings: lost, repaired: false };
    const { findings, entries, repaired } = await this.#buckets.run(
      "reconcile",
      bucket.subject,
      {},
      (batcher) =>
        batcher.alone(
          undefined,
          (connection, definitionOf, how) =>
            batcher.store.upkeep.reconcile(connection, definitionOf(terms), bucket, repair, how),
          about,
        ),
    );
    return { ok: findings.length === 0, entries, findings, repaired };
  }

  async prune(options: Older & { readonly signal?: AbortSignal }): Promise<Pruned> {
    checkNames("prune", options, pruneOptions);
    const { signal } = options;
    const { terms, instances } = this.#buckets;
    const older = olderThan("prune", options);
    const ageMs = Math.max(older.ageMs, terms.countedMs);
    let entries = 0;
    const broken: string[] = [];
    for (const instance of instances.all) {
      const batcher = quotaBatcherOf(instance);
      let { before } = older;
      let from: string | undefined;
      do {
        signal?.throwIfAborted();
        const what = { before, ageMs, from, most: 2000 };
        const done = await batcher.alone(
          undefined,
          (connection, _, how) => batcher.store.upkeep.rollUp(connection, terms.name, what, how),
          { names: [`quota ${terms.name}`] },
        );
        entries += done.gone;
        broken.push(...done.broken);
        ({ before, next: from } = done);
      } while (from !== undefined);
    }
    return { entries, broken };
  }

  async #entries(
    subject: Subject,
    before: number | undefined,
    most: number,
    options: ReadOptions,
  ): Promise<readonly QuotaEntry[]> {
    const bucket = { quota: this.#buckets.terms.name, subject: textOf(subject) };
    return this.#listed("history", bucket, options, (lists, connection, how) =>
      lists.entries(connection, bucket, { below: before, most }, how),
    );
  }

  /** Where nothing is found, it is asked whether it is elsewhere. */
  async #listed<T>(
    call: string,
    bucket: BucketName,
    options: ReadOptions,
    ask: (lists: QuotaLists<Connection>, connection: Connection, how: How) => Soon<readonly T[]>,
  ): Promise<readonly T[]> {
    const { found } = await this.#buckets.run(call, bucket.subject, options, (batcher) =>
      batcher.alone<{ readonly found: readonly T[] } | Elsewhere>(
        options,
        async (connection, _, how) => {
          const { lists, moves } = batcher.store;
          const found = await ask(lists, connection, how);
          const [where] = found.length > 0 ? [] : await moves.find(connection, [bucket], how);
          return isAway(where) ? { elsewhere: true } : { found };
        },
        { names: [this.#buckets.nameOf(bucket.subject)] },
      ),
    );
    return found;
  }
}

function shown(entry: QuotaEntry): HistoryEntry {
  const { delta: _, forgotten: __, details, at, kind, ...rest } = entry;
  return { ...rest, kind: kind as HistoryEntry["kind"], at: new Date(at), ...(details as object) };
}
