import type { Connection, Isolation, Result, Row, Wait } from "../seam/database.ts";
import { NotInTransactionError, ShardError, UnsupportedError, UsageError } from "../seam/errors.ts";
import { type Inside, apart } from "../context/inside.ts";
import { interruptible } from "../waiting/interrupt.ts";
import { type LockRequest, type Lockable, canonical, keyNames, wanted } from "../seam/key.ts";
import { checkCall, checkNames, checkSignal } from "../input/options.ts";
import { Turns } from "../waiting/turns.ts";
import { refusal } from "../waiting/refused.ts";
import type {
  AllOptions,
  AllResults,
  Items,
  LockedRows,
  QueryOptions,
  QueryRows,
  RowKeys,
  RowLocker,
  RowOptions,
  TableName,
  TableOptions,
} from "../seam/row-options.ts";
import { type Section, sections } from "../context/section.ts";
import { type CallSite, callSites } from "../context/call-site.ts";
import type { Instance } from "./instance.ts";
import { askedQuickly } from "./holders.ts";
import { present } from "./present.ts";
import { findRights } from "./rights.ts";
import { HeldLocks } from "./scope/held-locks.ts";
import { explain } from "./scope/meanings.ts";
import { checkNested, rollBackTo } from "./scope/savepoint.ts";
import { type NotFree, type Wanted, takeLocks } from "./scope/take-locks.ts";
import type { Work } from "./scope/work.ts";
import { Identifier, type Statement } from "../seam/sql.ts";
import type { TableMode, Where } from "../seam/tables.ts";
import { checkWait } from "../waiting/wait.ts";
import type { Body, LockOptions, NestedOptions, Transaction } from "./types.ts";

export type { LockOptions, NestedOptions, Transaction } from "./types.ts";
export type { Work } from "./scope/work.ts";

const lockNames = new Set(["wait", "signal"]);
/** Our own, an extension's, and the caller. */
const lockFrames = 8;
const nestedNames = new Set(["lock", "wait", "signal", "isolation", "readOnly"]);

/** What a scope needs of the instance it belongs to. */
export interface InstanceContext<Native, C extends Connection> extends Instance<Native, C> {
  readonly current: Inside<Scope<Native, C>>;
  readonly rows: RowLocker<Scope<Native, C>, C>;
  /** Throws if a transaction of the client's own is on another database. */
  home(native: Native, connection: C): Promise<void>;
  /** Takes part in a transaction of the client's own. `turns`: shared by all who name it so. */
  join(native: Native, turns: Turns): Scope<Native, C>;
}

export interface Place<Native, C extends Connection> {
  readonly connection: C;
  readonly native: Native;
  /** Somebody wants the client's own: the transaction must have begun before anything is sent through that. */
  readonly touched?: (() => void) | undefined;
  /** Or what makes it when it is first asked for. */
  readonly signal: AbortSignal | (() => AbortSignal);
  /** Ends what runs in it: the same, but for the loss of the connection, which ends that by itself. */
  readonly stop?: AbortSignal | undefined;
  readonly attempt: number;
  readonly joined: boolean;
  readonly isolation?: Isolation;
  readonly readOnly?: boolean;
  /** Where it was opened. */
  readonly site?: CallSite | undefined;
  readonly section?: Section | undefined;
  /** Of statements, where there may be other scopes of the same transaction. */
  readonly turns?: Turns | undefined;
}

interface Proof<C extends Connection> {
  ask(connection: C): Promise<boolean>;
}

export class Scope<Native, C extends Connection> implements Transaction<Native> {
  readonly #context: InstanceContext<Native, C>;
  readonly #place: Place<Native, C>;
  readonly #parent: Scope<Native, C> | undefined;
  readonly #held: HeldLocks;
  /** Made when it is first needed: a body that only uses its client does not need it. */
  #lazyQueue: Turns | undefined;
  #savepoints = 0;
  #closed: string | undefined;
  #proof: Proof<C> | undefined;

  constructor(
    context: InstanceContext<Native, C>,
    place: Place<Native, C>,
    held: readonly LockRequest[] = [],
    parent?: Scope<Native, C>,
  ) {
    this.#context = context;
    this.#place = place;
    this.#parent = parent;
    this.#held = new HeldLocks(held, parent && parent.#held);
  }

  /** Statements that must not interleave: a sibling's savepoint inside ours would be rolled back with it. */
  get #queue(): Turns {
    return (this.#lazyQueue ??= this.#place.turns ?? new Turns());
  }

  get client(): Native {
    this.#place.touched?.();
    return this.#place.native;
  }
  get signal(): AbortSignal {
    const { signal } = this.#place;
    return typeof signal === "function" ? signal() : signal;
  }
  get attempt(): number {
    return this.#place.attempt;
  }

  holds(lock: Lockable): boolean {
    return canonical(lock).every((request) => this.#held.has(request));
  }

  /** Those that were taken here, or in savepoints that were released. */
  get taken(): readonly LockRequest[] {
    return this.#held.taken;
  }

  /** From now on the scope answers with an error: its transaction is over, or undone. */
  close(why: string): void {
    this.#closed = why;
  }

  /**
   * The innermost scope that the calling code is in, if it is inside this one: an outer `tx` used within a
   * nested body means the nested transaction, which would otherwise wait for itself.
   */
  here(): Scope<Native, C> {
    const inner = this.#context.current.getStore();
    if (!inner || inner.#closed !== undefined) return this;
    for (let scope: Scope<Native, C> | undefined = inner; scope; scope = scope.#parent)
      if (scope === this) return inner;
    return this;
  }

  /** `ask`: whether something is there that the transaction wrote. */
  proveBy(ask: Proof<C>["ask"]): void {
    this.#proof = { ask };
  }

  /** Whether the transaction was kept, on another connection once it is over. Undefined: nobody can tell. */
  wasKept(connection: C): Promise<boolean> | undefined {
    return this.#proof?.ask(connection);
  }

  /** Whether this is what the client calls the transaction. */
  isCalled(native: unknown): boolean {
    return this.#place.native === native;
  }

  get open(): boolean {
    return this.#closed === undefined;
  }

  #assertOpen(): void {
    if (this.#closed !== undefined) {
      this.#place.section?.saw("late", callSites.here(this.#assertOpen));
      throw new UsageError(
        `This transaction is over (${this.#closed}). Is an \`await\` missing in its body? Work that goes on after it must open its own: \`separate: true\`.`,
        "HF_TRANSACTION_OVER",
      );
    }
  }

  get site(): CallSite | undefined {
    return this.#place.site;
  }

  get section(): Section | undefined {
    return this.#place.section;
  }

  /** Where a call that locks was made, if anybody wants to know. To be asked before its first `await`. */
  locking(): CallSite | undefined {
    const { section, joined } = this.#place;
    if (!section) return undefined;
    // There is no body of ours around it: what follows in the caller's own is inside, until its end.
    if (joined && section.ends) sections.enter(section);
    return section.wantsPlaces ? callSites.here(this.locking, lockFrames) : undefined;
  }

  /** Of the transaction that this is a part of. */
  get root(): Scope<Native, C> {
    return this.#parent?.root ?? this;
  }

  get context(): InstanceContext<Native, C> {
    return this.#context;
  }

  lock(locks: Lockable | readonly Lockable[], options?: LockOptions & { wait?: Wait }): Promise<void>;
  lock(locks: Lockable | readonly Lockable[], options: LockOptions & { wait: "skip" }): Promise<boolean>;
  async lock(locks: Lockable | readonly Lockable[], options: LockOptions = {}): Promise<void | boolean> {
    const site = this.locking();
    const requests = canonical(locks);
    checkNames("tx.lock", options, lockNames);
    checkSignal(options.signal);
    const { wait: patience } = options;
    const scope = this.here();
    if (patience === "skip") {
      const nowait = { requests, wait: "nowait", site, asked: 'wait: "skip"' } as const;
      return (await scope.#lock(nowait, options.signal)) === undefined;
    }
    const wait = patience === undefined ? this.#context.wait : checkWait(patience);
    return scope.#lockOrThrow({ requests, wait, site }, options.signal);
  }

  rows<R extends object = Row, K extends keyof R & string = keyof R & string>(
    table: TableName,
    which: RowKeys<NoInfer<R>> | Where,
    options?: RowOptions<K>,
  ): Promise<LockedRows<Pick<R, K>>>;
  rows<Q extends object>(query: Q, options?: QueryOptions): Promise<QueryRows<Q>>;
  rows(what: TableName | object, which: unknown, options: RowOptions = {}): Promise<never> {
    const { rows } = this.#context;
    const found =
      typeof what === "object" && what !== null && !(what instanceof Identifier)
        ? rows.query(this, what, which ?? {})
        : rows.rows(this, what, which as Where, options);
    return found as Promise<never>;
  }

  async row<R extends object = Row, K extends keyof R & string = keyof R & string>(
    table: TableName,
    key: RowKeys<NoInfer<R>>[number],
    options: RowOptions<K> = {},
  ): Promise<Pick<R, K>> {
    const [row] = await this.#context.rows.rows(this, table, [key], options);
    return row as Pick<R, K>;
  }

  lockAll<const I extends Items>(items: I, options: AllOptions = {}): Promise<AllResults<I>> {
    return this.#context.rows.all(this, items, options) as Promise<AllResults<I>>;
  }

  table(name: TableName, mode: TableMode, options?: TableOptions & { wait?: Wait }): Promise<void>;
  table(name: TableName, mode: TableMode, options: TableOptions & { wait: "skip" }): Promise<boolean>;
  table(name: TableName, mode: TableMode, options: TableOptions = {}): Promise<void | boolean> {
    return this.#context.rows.table(this, name, mode, options);
  }

  /**
   * Runs statements of ours on the transaction's connection, one such call at a time, until the signal aborts. `names`: what
   * they are about, for people; without: tables of the caller's. `proves`: they fail outside of a transaction by themselves.
   */
  async work<T>(
    run: (work: Work<C>) => Promise<T>,
    signal?: AbortSignal,
    names?: readonly string[],
    proves = false,
  ): Promise<T> {
    const scope = this.here();
    scope.#assertOpen();
    return scope.#queue.run(async () => {
      scope.#assertOpen();
      const { connection, native, joined, section, stop = scope.signal } = scope.#place;
      if (joined) await scope.#context.home(native, connection);
      const capabilities = scope.#context.known() ?? (await scope.#context.capabilities(connection));
      const abort = signal ? AbortSignal.any([signal, stop]) : stop;
      const started = performance.now();
      try {
        const work = async () => {
          if (joined && !proves) await scope.#context.database.engine.assertTransaction?.(connection);
          return run({ connection, capabilities, joined, signal: abort, section });
        };
        return await interruptible(connection, abort, () => (section ? sections.leave(work) : work()));
      } catch (error) {
        const context = scope.#context;
        // Of a transaction of the caller's own, nobody else says what became of its connection.
        if (joined && connection.lost.aborted && error === connection.lost.reason)
          throw present(context.database, error, { names: (names ?? []).map(context.show) }, "lost");
        if (abort.aborted && error === abort.reason) throw error;
        if (names) await findRights(context.database, error, (question) => askedQuickly(context, question));
        throw scope.#explain(error, names, performance.now() - started);
      }
    }, signal);
  }

  async tryLock(locks: Lockable | readonly Lockable[]): Promise<boolean> {
    const site = this.locking();
    const requests = canonical(locks);
    const nowait = { requests, wait: "nowait", site, asked: "tx.tryLock" } as const;
    return (await this.here().#lock(nowait)) === undefined;
  }

  async #lockOrThrow(wanted: Wanted, signal?: AbortSignal): Promise<void> {
    const refused = await this.#lock(wanted, signal);
    if (!refused) return;
    const { requests } = wanted;
    const { connection } = this.#place;
    const holders = await this.#context.holders(requests, refused.usable ? connection : undefined);
    throw refusal(refused, { keys: this.#context.names(requests), holders });
  }

  #lock(wanted: Wanted, signal?: AbortSignal): Promise<NotFree | undefined> {
    return this.work(
      (work) => takeLocks(this.#context, this.#held, wanted, work),
      signal,
      keyNames(wanted.requests),
      true,
    );
  }

  #explain(error: unknown, names?: readonly string[], waitedMs = 0): unknown {
    const { attempt, root } = this;
    return explain(this.#context, error, { names, waitedMs, attempt, root });
  }

  async query<R extends Row = Row>(statement: Statement): Promise<R[]> {
    this.#assertOpen();
    const { engine } = this.#context.database;
    if (!engine.query)
      throw new UnsupportedError(`tx.query: ${engine.name} does not speak SQL; use tx.client`);
    const { section, connection } = this.#place;
    const answered = section?.sent(statement, statement.values);
    // Told by now: what a client makes of it is not another one.
    const ask = () => engine.query?.(connection, statement) as Promise<Result>;
    try {
      const result = await (section ? sections.leave(ask) : ask());
      return result.rows as R[];
    } finally {
      answered?.();
    }
  }

  transaction<T>(body: Body<Native, T>): Promise<T>;
  transaction<T>(options: NestedOptions, body: Body<Native, T>): Promise<T>;
  async transaction<T>(first: NestedOptions | Body<Native, T>, second?: Body<Native, T>): Promise<T> {
    const [options, body] = checkCall<NestedOptions, Body<Native, T>>("tx.transaction", first, second);
    checkNames("tx.transaction", options, nestedNames);
    return this.here().nest(options, body);
  }

  /** Runs a body in a savepoint. Never retries: after most failures only the outermost transaction can. */
  async nest<T>(options: NestedOptions, body: Body<Native, T>): Promise<T> {
    const requests = wanted(options);
    const wait = options.wait === undefined ? this.#context.wait : checkWait(options.wait);
    checkNested(options, this.#place);
    this.#assertOpen();
    return this.#queue.run(async () => {
      this.#assertOpen();
      const { engine } = this.#context.database;
      const { connection } = this.#place;
      const own = this.signal;
      const name = `holdfast_${this.#depth()}_${++this.#savepoints}`;
      const signal = options.signal ? AbortSignal.any([own, options.signal]) : own;
      signal.throwIfAborted();
      try {
        // Locks prove it by themselves, and must come first: the question would begin the snapshot of some engines.
        if (this.#place.joined) await this.#context.home(this.#place.native, connection);
        if (this.#place.joined && requests.length === 0) await engine.assertTransaction?.(connection);
        await engine.savepoint(connection, name, "set");
        this.#place.section?.savepoint({ action: "set", name });
      } catch (error) {
        throw this.#explain(error);
      }
      const stop = options.signal ? signal : this.#place.stop;
      const inner = new Scope(this.#context, { ...this.#place, signal, stop, turns: undefined }, [], this);
      try {
        if (requests.length > 0) await inner.lock(requests, { wait });
        const value = await this.#context.current.run(inner, () => body(inner));
        signal.throwIfAborted();
        await engine.savepoint(connection, name, "release");
        this.#place.section?.savepoint({ action: "release", name });
        inner.close("its savepoint was released");
        this.#held.add(inner.taken);
        return value;
      } catch (error) {
        inner.close("its savepoint was rolled back");
        const kept = await rollBackTo(this.#context, connection, name, inner.taken, error);
        this.#held.add(kept);
        const { section } = this.#place;
        if (kept.length === 0) section?.savepoint({ action: "rollback", name });
        section?.savepoint({ action: "release", name });
        throw error;
      }
    }, options.signal);
  }

  #depth(): number {
    return this.#parent ? this.#parent.#depth() + 1 : 0;
  }
}

const homes = new WeakMap<object, InstanceContext<unknown, Connection>>();

/** For what takes an instance as an argument. */
export function remember<Native, C extends Connection>(
  instance: object,
  context: InstanceContext<Native, C>,
): void {
  homes.set(instance, context);
}

/** What has several homes. */
const several = new WeakSet<object>();

export function rememberSeveral(instance: object): void {
  several.add(instance);
}

export function contextOf(instance: unknown, call: string): InstanceContext<unknown, Connection> {
  const context = typeof instance === "object" && instance !== null ? homes.get(instance) : undefined;
  if (!context && several.has(instance as object))
    throw new UsageError(
      `${call}: it belongs in one database, and this is what sharded(…) returns. Pass the instance of one shard: shards.on(key).`,
    );
  if (!context) throw new UsageError(`${call}: this is not what holdfast(…) returns`);
  return context;
}

/** The scope behind a `tx` of `hf.transaction` or `hf.join`, for what takes one as an argument. */
export function scopeOf(tx: unknown, call: string): Scope<unknown, Connection> {
  if (tx instanceof Scope) return tx as Scope<unknown, Connection>;
  throw noTransaction(call);
}

function noTransaction(call: string): UsageError {
  return new UsageError(
    `${call}: this is no transaction. Pass the \`tx\` of hf.transaction(async (tx) => …), or of a transaction that your client has opened.`,
  );
}

/** Of transactions that calls name by the client's own object: of two at once one waits for the other. */
const turnsOf = new WeakMap<object, Turns>();

/** The same, or a transaction of the client's own: that of the body which calls, or one that this instance joins. */
export function scopeNamed(
  home: InstanceContext<unknown, Connection>,
  tx: unknown,
  call: string,
): Scope<unknown, Connection> {
  if (tx instanceof Scope) return tx as Scope<unknown, Connection>;
  if ((typeof tx !== "object" && typeof tx !== "function") || tx === null) throw noTransaction(call);
  const current = home.current.getStore();
  if (current?.isCalled(tx)) return current;
  if (home.guard)
    throw new UsageError(
      `${call}: which of several databases this transaction is in is not to be seen. Pass shards.on(key).join(tx), or call it in the body of shards.transaction(…).`,
    );
  let turns = turnsOf.get(tx);
  if (!turns) turnsOf.set(tx, (turns = new Turns()));
  try {
    return home.join(tx, turns);
  } catch (error) {
    throw error instanceof NotInTransactionError ? error.of(call) : error;
  }
}

/**
 * Where a call of a pattern belongs: in the transaction that is named, or in the one of the same instance whose body calls,
 * unless it is to be apart. Undefined: in none. `options` are undefined if the call takes none.
 */
export function scopeFor(
  context: InstanceContext<unknown, Connection>,
  options: { readonly tx?: unknown; readonly separate?: boolean } | undefined,
  call: string,
): Scope<unknown, Connection> | undefined {
  const { tx, separate = false } = options ?? {};
  if (typeof separate !== "boolean") throw new UsageError(`${call}: separate must be true or false`);
  if (tx === undefined) {
    if (separate) return undefined;
    if (context.elsewhere?.()) throw astray(call);
    const around = context.current.getStore();
    if (around || !options) return around;
    const native = context.wrongConnection.unnamed(call);
    return native === undefined ? undefined : scopeNamed(context, native, call);
  }
  const scope = scopeNamed(context, tx, call);
  if (separate) throw new UsageError(`${call}: either \`tx\` or \`separate\`, not both`);
  if (scope.context !== context && scope.context.guard && context.guard) throw astray(call);
  if (scope.context !== context)
    throw new UsageError(`${call}: \`tx\` is a transaction of another instance of Holdfast`);
  return scope;
}

function astray(call: string): ShardError {
  return new ShardError(
    `${call}: it is inside a transaction of one shard, and what it is about belongs on another: it would be kept also if that is rolled back (if that is meant, say \`separate: true\`).`,
  );
}

/** Runs what goes on in the background outside of whatever transactions it is begun in, which will be over by then. */
export function detached<T>(
  context: Pick<InstanceContext<unknown, Connection>, "current">,
  work: () => T,
): T {
  // Left by its own instance, too: it would keep the transaction's objects for as long as it goes on.
  return apart(() => context.current.leave(work));
}
