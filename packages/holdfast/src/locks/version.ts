/** Optimistic versions: read, decide without a lock, and write only if nobody has written since. */
import type { Connection, Row } from "../seam/database.ts";
import { RowsMissingError, UsageError } from "../seam/errors.ts";
import { made } from "../events/made.ts";
import { checkNames } from "../input/options.ts";
import { type RowKey, type TableName, tableName } from "../seam/row-options.ts";
import {
  type InstanceContext,
  type Transaction,
  contextOf,
  scopeNamed,
  scopeOf,
} from "../transaction/scope.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { checkAttempts, nameOf, untilFresh } from "./version/fresh.ts";
import { type Place, inPlace } from "./version/place.ts";
import { VersionedRows } from "./version/rows.ts";
import type { Changes, UpdateOptions, VersionedOptions } from "./version/types.ts";

export type { UpdateOptions, VersionedOptions } from "./version/types.ts";

/**
 * Rows with a version column. Better than a lock where writers of one row seldom meet, or where what is decided takes
 * long; see docs/versions.md for figures.
 */
export class Versioned<R extends object, Native = unknown> {
  readonly #hf: Transactor<Native>;
  readonly #context: InstanceContext<unknown, Connection>;
  readonly #rows: VersionedRows<R>;
  readonly #attempts: number;

  constructor(hf: Transactor<Native>, table: TableName, options: VersionedOptions) {
    checkNames("versioned", options, new Set(["key", "version", "attempts"]));
    this.#hf = hf;
    this.#context = contextOf(hf, "versioned");
    this.#rows = new VersionedRows(
      this.#context,
      tableName(table, "versioned"),
      options.version ?? "version",
      options.key === undefined ? undefined : [options.key].flat(),
    );
    this.#attempts = checkAttempts(options.attempts ?? 10);
    made("versioned", this.#rows.name);
  }

  /** The row as it is now, without a lock; undefined if there is none. */
  async read(
    id: RowKey<R>,
    options: { tx?: Transaction<Native> | Native; separate?: boolean } = {},
  ): Promise<R | undefined> {
    checkNames("read", options, new Set(["tx", "separate"]));
    return (await this.#work(options, (work) => this.#rows.read(work, [id])))[0] as R | undefined;
  }

  /**
   * Reads the row, asks `change` what to set, and writes if the version is still the one that was read; else again,
   * from the start. `change` may run several times and must have no effects of its own; returning nothing writes
   * nothing.
   */
  async update(
    id: RowKey<R>,
    change: (row: R) => Changes<R> | Promise<Changes<R>>,
    options: UpdateOptions<Native> = {},
  ): Promise<R> {
    return this.#untilFresh(options, [id], this.#attempts, async (attempt) => {
      const [row] = await this.#work(options, (work) => this.#rows.read(work, [id]));
      if (!row) throw new RowsMissingError(this.#rows.name, [id]);
      const changes = await change(row as R);
      if (isNothing(changes)) return row as R;
      return this.#work(options, async (work) => {
        const written = await this.#rows.write(work, id, row, changes);
        return (written ?? (await this.#rows.stale(work, id, row, attempt))) as R;
      });
    });
  }

  /**
   * The same for several rows, all or nothing: `change` gets them in the order of `ids` and returns what to set on
   * each. The rows are locked in the order of their keys while their versions are compared and they are written.
   */
  async updateAll(
    ids: readonly RowKey<R>[],
    change: (rows: R[]) => readonly Changes<R>[] | Promise<readonly Changes<R>[]>,
    options: UpdateOptions<Native> = {},
  ): Promise<R[]> {
    if (new Set(ids.map(nameOf)).size < ids.length)
      throw new UsageError("updateAll: a row is named twice, and would be written twice");
    return this.#untilFresh(options, ids, this.#attempts, async (attempt) => {
      const rows = await this.#work(options, (work) => this.#rows.read(work, ids));
      const missing = ids.filter((_, i) => rows[i] === undefined);
      if (missing.length > 0) throw new RowsMissingError(this.#rows.name, missing);
      const changes = await change(rows as R[]);
      if (!Array.isArray(changes) || changes.length !== ids.length)
        throw new UsageError(
          `updateAll: its function must return a list with one entry per row (${ids.length})`,
        );
      return this.#within(options, async (tx) => {
        const now = await this.#rows.lock(tx, ids);
        return scopeOf(tx, "updateAll").work(async (within) => {
          const work = { ...within, alone: false };
          for (const [i, id] of ids.entries())
            if (!this.#rows.same(rows[i], now[i])) await this.#rows.stale(work, id, rows[i] as Row, attempt);
          const written: R[] = [];
          for (const [i, id] of ids.entries()) {
            const row = rows[i] as Row;
            const change = this.#toWrite(work, changes[i]);
            const next = change === undefined ? row : await this.#rows.write(work, id, row, change);
            written.push((next ?? (await this.#rows.stale(work, id, row, attempt))) as R);
          }
          return written;
        });
      });
    });
  }

  /**
   * Slow work first: reads the row, does `work` (a call to another service, say) without any lock or transaction, then
   * locks the row, compares its version, and asks `write` what to set; `write` gets the transaction, for whatever else
   * is to be written together. If the row has changed meanwhile, all of it starts again, up to 3 attempts by default.
   */
  async updateAfter<T>(
    id: RowKey<R>,
    work: (row: R, signal: AbortSignal) => Promise<T>,
    write: (row: R, found: T, tx: Transaction<Native>) => Changes<R> | Promise<Changes<R>>,
    options: Omit<UpdateOptions<Native>, "tx"> = {},
  ): Promise<R> {
    if ("tx" in options || this.#context.current.getStore()?.open)
      throw new UsageError(
        "updateAfter: slow work inside of a transaction would hold its locks; it opens its own",
      );
    const never = new AbortController().signal;
    // Slow work is not waited for in line: who comes second may be done first.
    return this.#untilFresh(options, [], Math.min(3, this.#attempts), async (attempt) => {
      const [row] = await this.#work(options, (w) => this.#rows.read(w, [id]));
      if (!row) throw new RowsMissingError(this.#rows.name, [id]);
      const found = await work(row as R, options.signal ?? never);
      return this.#within(options, async (tx) => {
        const [now] = await this.#rows.lock(tx, [id]);
        const scope = scopeOf(tx, "updateAfter");
        if (!this.#rows.same(row, now))
          await scope.work((w) => this.#rows.stale({ ...w, alone: false }, id, row, attempt));
        const changes = await write(now as R, found, tx);
        return scope.work(async (within) => {
          const w = { ...within, alone: false };
          const change = this.#toWrite(w, changes);
          if (change === undefined) return now as R;
          return ((await this.#rows.write(w, id, row, change)) ??
            (await this.#rows.stale(w, id, row, attempt))) as R;
        });
      });
    });
  }

  /**
   * What is decided by several rows rests on those too that stay as they are. Where they cannot be locked, and only what was
   * written is compared at COMMIT, their versions count up all the same.
   */
  #toWrite({ capabilities }: Place, changes: unknown): object | undefined {
    if (!isNothing(changes)) return changes;
    return capabilities.exclusion === "at commit" ? {} : undefined;
  }

  #untilFresh<T>(
    options: UpdateOptions<Native>,
    ids: readonly RowKey<R>[],
    attempts: number,
    attempt: (attempt: number) => Promise<T>,
  ): Promise<T> {
    const update = { table: this.#rows.name, ids, options, attempts };
    return untilFresh(this.#context, update, attempt);
  }

  #work<T>(
    options: Pick<UpdateOptions<Native>, "tx" | "separate" | "signal">,
    run: (work: Place) => Promise<T>,
  ): Promise<T> {
    return inPlace(this.#context, this.#rows.name, options, run);
  }

  #within<T>(options: UpdateOptions<Native>, body: (tx: Transaction<Native>) => Promise<T>): Promise<T> {
    // A savepoint: what one row's stale version undoes must not be half of the caller's transaction.
    if (options.tx !== undefined) {
      const scope = scopeNamed(this.#context, options.tx, "versioned") as Transaction<unknown>;
      return (scope as Transaction<Native>).transaction(body);
    }
    const { signal, separate = false } = options;
    return this.#hf.transaction({ ...(signal && { signal }), separate }, body);
  }
}

function isNothing(changes: unknown): changes is undefined | null {
  if (changes === undefined || changes === null) return true;
  if (typeof changes !== "object" || Array.isArray(changes))
    throw new UsageError("versioned: the function must return an object of the columns to set, or nothing");
  return Object.keys(changes).length === 0;
}

/** `const accounts = versioned<Account>(hf, "account")`: rows that are written only if nobody else has written since. */
export function versioned<R extends object = Record<string, unknown>, Native = unknown>(
  hf: Transactor<Native>,
  table: TableName,
  options: VersionedOptions = {},
): Versioned<R, Native> {
  return new Versioned(hf, table, options);
}
