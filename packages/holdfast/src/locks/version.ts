/** Optimistic versions: read, decide without a lock, and write only if nobody has written since. */
import { isSupported } from "../seam/capabilities.ts";
import type { Connection, Row } from "../seam/database.ts";
import {
  CommitUnknownError,
  HoldfastError,
  LockTimeoutError,
  RowsMissingError,
  SerializationError,
  StaleVersionError,
  UsageError,
  shownKey,
} from "../seam/errors.ts";
import { OneShotEnded, withConnection } from "../transaction/one-shot.ts";
import { emit } from "../events/events.ts";
import { classify } from "../seam/failure.ts";
import { made } from "../events/made.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { present } from "../transaction/present.ts";
import { retrying, wasRolledBack } from "../transaction/retry.ts";
import { type RowKey, type TableName, tableName } from "../seam/row-options.ts";
import {
  type InstanceContext,
  type Transaction,
  type Work,
  contextOf,
  scopeFor,
  scopeOf,
} from "../transaction/scope.ts";
import type { Identifier } from "../seam/sql.ts";
import type { RowCall, TableShape, Tables } from "../seam/tables.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { isOpaque } from "../seam/thrown.ts";
import { keyValues } from "./rows.ts";
import { type VersionTurn, turnsOf } from "./turns.ts";

export interface VersionedOptions {
  /** The columns that name a row. Default: the primary key. */
  readonly key?: string | readonly string[];
  /** The integer column that counts up with every write. Default "version". */
  readonly version?: string;
  /** How often to read and decide before giving up with `StaleVersionError`. Default 10. */
  readonly attempts?: number;
}

export interface UpdateOptions<Native = unknown> {
  readonly attempts?: number;
  readonly signal?: AbortSignal | undefined;
  /** Takes part in this transaction. Without it: in the one of the same instance whose body calls, if there is one. */
  readonly tx?: Transaction<Native>;
  /** Inside a transaction's body: apart from it. What is written stays also if that is rolled back. */
  readonly separate?: boolean;
}

type Changes<R> = Partial<R> | undefined;

/** Waits of a few milliseconds, longer with every attempt: those who collided must not collide again in step. */
const firstPauseMs = 2;
const longestPauseMs = 100;

/** Besides the wait for a lock. */
const oneShotMs = 10_000;

/** Where statements run: `alone`, each a transaction of its own, or inside of one. */
type Place = Pick<Work<Connection>, "connection" | "capabilities"> & {
  readonly alone: boolean;
  readonly signal?: AbortSignal | undefined;
  /** A write was sent. */
  wrote?: string;
};

const updateNames = new Set(["attempts", "signal", "tx", "separate"]);

/**
 * Rows with a version column. Better than a lock where writers of one row seldom meet, or where what is decided takes
 * long; see docs/versions.md for figures.
 */
export class Versioned<R extends object, Native = unknown> {
  readonly #hf: Transactor<Native>;
  readonly #context: InstanceContext<unknown, Connection>;
  readonly #table: Identifier;
  readonly #version: string;
  readonly #key: readonly string[] | undefined;
  readonly #attempts: number;

  constructor(hf: Transactor<Native>, table: TableName, options: VersionedOptions) {
    checkNames("versioned", options, new Set(["key", "version", "attempts"]));
    this.#hf = hf;
    this.#context = contextOf(hf, "versioned");
    this.#table = tableName(table, "versioned");
    this.#version = options.version ?? "version";
    this.#key = options.key === undefined ? undefined : [options.key].flat();
    this.#attempts = checkAttempts(options.attempts ?? 10);
    made("versioned", this.#name);
  }

  /** The row as it is now, without a lock; undefined if there is none. */
  async read(
    id: RowKey<R>,
    options: { tx?: Transaction<Native>; separate?: boolean } = {},
  ): Promise<R | undefined> {
    checkNames("read", options, new Set(["tx", "separate"]));
    return (await this.#work(options, (work) => this.#read(work, [id])))[0] as R | undefined;
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
      const [row] = await this.#work(options, (work) => this.#read(work, [id]));
      if (!row) throw new RowsMissingError(this.#name, [id]);
      const changes = await change(row as R);
      if (isNothing(changes)) return row as R;
      return this.#work(options, async (work) => {
        const written = await this.#write(work, id, row, changes);
        return (written ?? (await this.#stale(work, id, row, attempt))) as R;
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
      const rows = await this.#work(options, (work) => this.#read(work, ids));
      const missing = ids.filter((_, i) => rows[i] === undefined);
      if (missing.length > 0) throw new RowsMissingError(this.#name, missing);
      const changes = await change(rows as R[]);
      if (!Array.isArray(changes) || changes.length !== ids.length)
        throw new UsageError(
          `updateAll: its function must return a list with one entry per row (${ids.length})`,
        );
      return this.#within(options, async (tx) => {
        const now = await this.#lock(tx, ids);
        return scopeOf(tx, "updateAll").work(async (within) => {
          const work = { ...within, alone: false };
          for (const [i, id] of ids.entries())
            if (!this.#same(rows[i], now[i])) await this.#stale(work, id, rows[i] as Row, attempt);
          const written: R[] = [];
          for (const [i, id] of ids.entries()) {
            const row = rows[i] as Row;
            const change = this.#toWrite(work, changes[i]);
            const next = change === undefined ? row : await this.#write(work, id, row, change);
            written.push((next ?? (await this.#stale(work, id, row, attempt))) as R);
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
      const [row] = await this.#work(options, (w) => this.#read(w, [id]));
      if (!row) throw new RowsMissingError(this.#name, [id]);
      const found = await work(row as R, options.signal ?? never);
      return this.#within(options, async (tx) => {
        const [now] = await this.#lock(tx, [id]);
        const scope = scopeOf(tx, "updateAfter");
        if (!this.#same(row, now))
          await scope.work((w) => this.#stale({ ...w, alone: false }, id, row, attempt));
        const changes = await write(now as R, found, tx);
        return scope.work(async (within) => {
          const w = { ...within, alone: false };
          const change = this.#toWrite(w, changes);
          if (change === undefined) return now as R;
          return ((await this.#write(w, id, row, change)) ?? (await this.#stale(w, id, row, attempt))) as R;
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

  get #name(): string {
    return this.#table.path.join(".");
  }

  /**
   * Runs `attempt` until it does not throw `StaleVersionError`, or has been run often enough. Callers of this process that
   * have met at a row stand in line for it: from then on only other processes can spoil an attempt.
   */
  async #untilFresh<T>(
    options: UpdateOptions<Native>,
    ids: readonly RowKey<R>[],
    attempts: number,
    attempt: (attempt: number) => Promise<T>,
  ): Promise<T> {
    checkNames("update", options, updateNames);
    checkSignal(options.signal);
    const most = options.attempts === undefined ? attempts : checkAttempts(options.attempts);
    const stale = (count: number) =>
      emit("holdfast:version:stale", () => ({ table: this.#name, attempt: count }));
    const lines = this.#lines(options, ids);
    const met = lines?.some((line) => turnsOf(this.#context).has(line)) ?? false;
    let turn: VersionTurn | undefined;
    const run = async (count: number) => {
      if (lines && !turn && (met || count > 1)) turn = await this.#turn(lines, options);
      return turn ? turn.run(() => attempt(count)) : attempt(count);
    };
    try {
      return await retrying(({ attempt: count }) => run(count), {
        why: (error) => this.#meaning(error, options),
        on: new Set(["stale", "conflict"]),
        attempts: most,
        // Who is about to stand in line waits there.
        pauseMs: (count) =>
          lines && !turn ? 0 : Math.random() * Math.min(longestPauseMs, firstPauseMs * 2 ** count),
        signal: options.signal,
        again: ({ attempt: count }) => stale(count),
        async failed(error, { why, attempts: count }) {
          if (why !== undefined) stale(count);
          if (why === "conflict") throw SerializationError.after(count, error);
        },
      });
    } finally {
      turn?.leave();
    }
  }

  /** "stale", and "gone": the row has another version. "conflict": undone for the sake of others, which means the same. */
  #meaning(error: unknown, options: UpdateOptions<Native>): "stale" | "gone" | "conflict" | undefined {
    if (isOpaque(error)) return undefined;
    if (error instanceof StaleVersionError) return error.found === undefined ? "gone" : "stale";
    return this.#conflicts(error, options) ? "conflict" : undefined;
  }

  /**
   * The names of the rows' lines. Undefined where nobody is to stand in one: in a transaction, which holds what somebody in
   * line may wait for, and in somebody's turn.
   */
  #lines(options: UpdateOptions<Native>, ids: readonly RowKey<R>[]): readonly string[] | undefined {
    if (ids.length === 0 || turnsOf(this.#context).inside || scopeFor(this.#context, options, "versioned"))
      return undefined;
    // In one order, so that two callers with several rows do not wait for each other.
    return ids.map((id) => `${this.#name} ${nameOf(id)}`).toSorted();
  }

  /** Whoever has waited for as long as for a lock goes on without: what it writes is compared in any case. */
  async #turn(lines: readonly string[], { signal }: UpdateOptions<Native>): Promise<VersionTurn | undefined> {
    const turns = turnsOf(this.#context);
    const until = performance.now() + this.#waitMs;
    const taken: VersionTurn[] = [];
    const leave = () => {
      for (const turn of taken) turn.leave();
    };
    try {
      for (const line of lines) {
        const turn = await turns.take(line, Math.max(1, until - performance.now()), signal);
        if (!turn) break;
        taken.push(turn);
      }
    } catch (error) {
      leave();
      throw error;
    }
    const [first] = taken;
    if (first && taken.length === lines.length) return { run: (work) => first.run(work), leave };
    leave();
    return undefined;
  }

  /** Whether the server has undone a write that was a transaction of its own. Others are run again as a whole. */
  #conflicts(error: unknown, options: UpdateOptions<Native>): boolean {
    const failure = error instanceof HoldfastError ? undefined : classify(this.#context.database, error);
    if (failure === undefined || !wasRolledBack.includes(failure)) return false;
    return scopeFor(this.#context, options, "versioned") === undefined;
  }

  /** In the transaction that was given, or that the calling code is in; else by itself, on any connection. */
  async #work<T>(
    options: Pick<UpdateOptions<Native>, "tx" | "separate" | "signal">,
    run: (work: Place) => Promise<T>,
  ): Promise<T> {
    const { signal } = options;
    const scope = scopeFor(this.#context, options, "versioned");
    if (scope) return scope.work((work) => run({ ...work, alone: false }), signal);
    return this.#context.started.during("versioned", () => this.#apart(run, signal));
  }

  async #apart<T>(run: (work: Place) => Promise<T>, signal: AbortSignal | undefined): Promise<T> {
    let place: Place | undefined;
    const started = performance.now();
    try {
      return await withConnection(
        this.#context,
        async (connection) => {
          const capabilities = await this.#context.capabilities(connection);
          const here: Place = (place = { connection, capabilities, alone: true, signal });
          return run(here);
        },
        this.#waitMs + oneShotMs,
        // What is kept is told to be, also to who does not want it any more.
        { signal },
      );
    } catch (error) {
      if (signal?.aborted && (error instanceof OneShotEnded || !place?.wrote)) throw signal.reason;
      // Nobody answered for too long, or the client's own COMMIT was lost.
      const failure = error instanceof HoldfastError ? undefined : classify(this.#context.database, error);
      if (place?.wrote && failure === "lost") throw new CommitUnknownError(place.wrote, error);
      // What others have undone is known by that.
      if (failure !== undefined && wasRolledBack.includes(failure)) throw error;
      const waitedMs = performance.now() - started;
      throw present(this.#context.database, error, { names: [this.#name], waitedMs, theirs: true });
    }
  }

  /** Others may have the row locked for as long as any lock is waited for. */
  get #waitMs(): number {
    const { wait } = this.#context;
    return wait === "nowait" ? 1 : wait;
  }

  #within<T>(options: UpdateOptions<Native>, body: (tx: Transaction<Native>) => Promise<T>): Promise<T> {
    // A savepoint: what one row's stale version undoes must not be half of the caller's transaction.
    if (options.tx !== undefined) return options.tx.transaction(body);
    const { signal, separate = false } = options;
    return this.#hf.transaction({ ...(signal && { signal }), separate }, body);
  }

  async #lock(tx: Transaction<Native>, ids: readonly RowKey<R>[]): Promise<Row[]> {
    const { rowLocks } = this.#context.known() ?? (await this.#context.capabilities());
    // Without row locks the writes, which compare the versions again, are enough: of two that meet one fails.
    if (!isSupported(rowLocks)) {
      const rows = await scopeOf(tx, "versioned").work((work) => this.#read({ ...work, alone: false }, ids));
      const missing = ids.filter((_, i) => rows[i] === undefined);
      if (missing.length > 0) throw new RowsMissingError(this.#name, missing);
      return rows as Row[];
    }
    const weaker = rowLocks.includes("no key update");
    return tx.rows<Row>(this.#table, ids, {
      for: weaker ? "no key update" : "update",
      ...(this.#key && { key: this.#key }),
    });
  }

  async #shape(
    place: Place,
    columns: readonly string[] = [],
    fresh = false,
  ): Promise<{ shape: TableShape; key: readonly string[] }> {
    const { connection, capabilities } = place;
    const shape = await this.#context.rows.describe(
      { connection, capabilities },
      this.#table,
      "versioned",
      (c) => c.versions,
      fresh,
    );
    // It may have got the column since the catalog was asked.
    if (!fresh && [this.#version, ...columns].some((name) => !shape.columns.has(name)))
      return this.#shape(place, columns, true);
    const key = this.#key ?? shape.key;
    if (key.length === 0)
      throw new UsageError(
        `versioned: ${shape.name} has no primary key; name the columns that do: { key: […] }`,
      );
    if (!shape.columns.has(this.#version))
      throw new UsageError(
        `versioned: ${shape.name} has no column ${this.#version}. Add one (integer NOT NULL DEFAULT 0), or name yours: { version: "…" }.`,
      );
    return { shape, key };
  }

  get #tables(): Tables<Connection> {
    return this.#context.database.engine.tables as Tables<Connection>;
  }

  async #read(work: Place, ids: readonly RowKey<R>[]): Promise<readonly (Row | undefined)[]> {
    if (!Array.isArray(ids)) throw new UsageError("versioned: the keys must be a list");
    const { shape, key } = await this.#shape(work);
    if (ids.length === 0) return [];
    const call: RowCall = {
      table: this.#table,
      shape,
      key,
      which: { keys: ids.map((id) => keyValues("versioned", shape.name, key, id)) },
      strength: undefined,
      wait: "nowait",
      columns: undefined,
      orderBy: [],
      limit: undefined,
      joined: false,
      capabilities: work.capabilities,
    };
    const found = await this.#tables.select(work.connection, call);
    return found.granted ? found.rows : [];
  }

  async #write(work: Place, id: RowKey<R>, row: Row, changes: object): Promise<Row | undefined> {
    if (this.#version in changes)
      throw new UsageError(`versioned: ${this.#version} counts up by itself; leave it out of the changes`);
    const given = Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== undefined));
    const { shape, key } = await this.#shape(work, Object.keys(given));
    const expected = row[this.#version];
    if (expected === undefined)
      throw new UsageError(
        `versioned: the client does not return ${this.#version} under that name, but ${Object.keys(row).join(", ")}. Does it rename columns? Then name yours with a single word, in lower case.`,
      );
    if (expected === null)
      throw new UsageError(
        `versioned: ${this.#version} of ${shape.name} ${shownKey(id)} is NULL, which equals nothing: make the column NOT NULL DEFAULT 0`,
      );
    const what = `it wrote ${shape.name} ${shownKey(id)} by itself`;
    work.signal?.throwIfAborted();
    work.wrote = what;
    const found = await this.#tables
      .write(work.connection, {
        table: this.#table,
        shape,
        key,
        id: keyValues("versioned", shape.name, key, id),
        version: this.#version,
        expected,
        changes: given,
        waitMs: this.#waitMs,
        alone: work.alone,
      })
      .catch((error: unknown) => {
        // Sent, and the answer lost: nobody can tell whether a version that is there now was ours.
        const lost = work.connection.lost.aborted || classify(this.#context.database, error) === "lost";
        throw work.alone && lost ? new CommitUnknownError(what, error) : error;
      });
    if (found.granted) return found.rows[0];
    const blocked = {
      keys: [this.#context.show(`${shape.name}[${shownKey(id)}]`)],
      holders: [],
      waitedMs: this.#waitMs,
    };
    throw new LockTimeoutError(blocked, found.cause, work.alone || found.usable);
  }

  #same(one: Row | undefined, other: Row | undefined): boolean {
    return String(one?.[this.#version]) === String(other?.[this.#version]);
  }

  async #stale(work: Place, id: RowKey<R>, row: Row, attempt: number): Promise<never> {
    const [now] = await this.#read(work, [id]);
    throw new StaleVersionError(this.#name, id, row[this.#version], now?.[this.#version], attempt);
  }
}

/** The same for the same key; two ways to write one key may have two. */
function nameOf(id: unknown): string {
  return JSON.stringify(id, (_, value: unknown) => (typeof value === "bigint" ? String(value) : value));
}

function isNothing(changes: unknown): changes is undefined | null {
  if (changes === undefined || changes === null) return true;
  if (typeof changes !== "object" || Array.isArray(changes))
    throw new UsageError("versioned: the function must return an object of the columns to set, or nothing");
  return Object.keys(changes).length === 0;
}

function checkAttempts(value: unknown): number {
  if (Number.isSafeInteger(value) && (value as number) >= 1) return value as number;
  throw new UsageError(`attempts must be a whole number of at least 1, not ${String(value)}`);
}

/** `const accounts = versioned<Account>(hf, "account")`: rows that are written only if nobody else has written since. */
export function versioned<R extends object = Record<string, unknown>, Native = unknown>(
  hf: Transactor<Native>,
  table: TableName,
  options: VersionedOptions = {},
): Versioned<R, Native> {
  return new Versioned(hf, table, options);
}
