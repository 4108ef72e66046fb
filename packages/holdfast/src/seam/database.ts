/**
 * The seam. An **engine** knows what a database family does: its SQL, its strategies, its error codes. A
 * **database** is one client library that reaches it: how to get a connection, send, cancel. Shared code sees
 * only these types and asks `capabilities` what holds; it never asks which engine it is on.
 */
import type { Agreements } from "./agreements.ts";
import type { Audits } from "../audit/store.ts";
import type { Capabilities, Probed, Strategy, Support, Unsupported, LockSupport } from "./capabilities.ts";
import type { HiddenRows, Holder } from "./errors.ts";
import type { LockView } from "./inspect.ts";
import type { LockRequest } from "./key.ts";
import type { Leases } from "./leases.ts";
import type { Lexis } from "./redact.ts";
import type { Replay } from "./replay.ts";
import type { Remade, Routine, RoutineState } from "./routine.ts";
import type { Schedules } from "../schedule/store.ts";
import type { Names, Statement } from "./sql.ts";
import type { StockStore } from "../stock/store.ts";
import type { RowStrength, Tables } from "./tables.ts";
import type { QueueStore } from "../queue/store.ts";
import type { Quotas } from "../quota/store.ts";
import type { Protocol } from "./protocol-reader.ts";

export type Isolation = "read uncommitted" | "read committed" | "repeatable read" | "serializable";

export type Row = Record<string, unknown>;

export interface Result {
  readonly rows: readonly Row[];
  /** Rows changed, where the client tells. */
  readonly affected: number;
  /** Of the first row that was inserted: the number that the server gave it, where the client passes it on. */
  readonly insertId?: number;
  /** The server's own word for what it did, where the client passes it on: a COMMIT may come back as ROLLBACK. */
  readonly command?: string;
  /** Whether the session is inside a transaction after this statement, where the protocol says so. */
  readonly inTransaction?: boolean;
}

/** One server session, or the part of one that lies inside a transaction. */
export interface Connection {
  /** Aborts when the connection has died. */
  readonly lost: AbortSignal;
  /**
   * Cancels the running statement on the server. Resolves when the request can no longer reach a later
   * statement. Absent: this client cannot, and says so in its traits.
   */
  cancel?(): Promise<void>;
  /** Calls back once, when the transaction that is open on it has ended. Absent where the client does not tell. */
  settled?(then: () => void): void;
  /** For how long nothing had been sent when it was lost. Absent where the client passes on what the server said before it closed. */
  quietMs?(): number | undefined;
}

export interface SqlConnection extends Connection {
  /** Stands for the server session, if it is known before the first statement: what is prepared on it stays. */
  readonly session?: object;
  /** The server's id of the session, as the protocol told it to the client. */
  readonly pid?: number | undefined;
  /** This end of the socket, as "address port": a server that is told the same has nobody in between. */
  readonly socket?: string | undefined;
  /** Whether a transaction is open on it, where the client knows without asking: false may mean that it is just being begun. */
  isInTransaction?(): boolean;
  /** What our own things are called, if this instance has chosen that. */
  readonly names?: Names;
  /** As the database's: engines look into the errors of their own statements. */
  readonly unwrap?: ((error: unknown) => DriverError | undefined) | undefined;
  /** `theirs`: the caller's own, whose values are read as the client's options say; ours are read as the driver's defaults are. */
  query(statement: Statement, theirs?: boolean): Promise<Result>;
  /** The same, of a statement that comes again and again: its session may keep it. Absent where that cannot be had. */
  prepared?(statement: Statement): Promise<Result>;
  /** One statement past a client that refuses columns whose type it does not know. Absent where it takes what comes. */
  untyped?(text: string): Promise<Result>;
  /** Several statements in one message, hence one round trip; no values. Absent where the client cannot. */
  script?(text: string): Promise<readonly Result[]>;
  /**
   * The same with values. What follows one that has failed is not run, and its promise is rejected with the same error. Absent
   * where the client cannot.
   */
  sequence?(steps: readonly Step[]): readonly Promise<Result>[];
  /** Whether a statement has failed in a way that may have ended the transaction. Absent: the client cannot tell. */
  doubtful?(): boolean;
}

/** One of several statements in a message. */
export interface Step {
  readonly text: string;
  readonly values: readonly unknown[];
  /** It comes again and again: the session may keep it. */
  readonly kept?: boolean;
  /** Where it tells in texts what is known beforehand, the names of these. */
  readonly columns?: readonly string[];
}

/** A connection that nobody else uses until it is released. */
export interface Pinned<Native, C extends Connection> {
  readonly connection: C;
  /** Read after BEGIN: some clients make their handle only then. */
  readonly native: Native;
  /**
   * The body has ended: from now on nothing can be sent through `native`. Resolves when what was under way has been sent:
   * a client that sends a statement in two steps must not do the second after COMMIT.
   */
  seal?(): void | Promise<void>;
  /**
   * What is sent through `native` from now on waits for this, and is not sent if it fails. Absent: `native` is there only after
   * BEGIN, or cannot wait.
   */
  hold?(until: Promise<unknown>): void;
  /** `broken`: its state is not known any more, so it must not be used again. */
  release(broken?: boolean): void | Promise<void>;
}

/** What a client library can do, whatever server it talks to. */
export interface ClientTraits {
  readonly client: string;
  /** It gives out connections that stay the same session from one transaction to the next. */
  readonly pinned: boolean;
  /** It writes BEGIN and COMMIT itself, so nothing of ours can come before BEGIN on its connection. */
  readonly begins: boolean;
  /** An abort ends the wait on the server, not only in this process. */
  readonly cancel: boolean;
  /** It passes on messages of the server (see `listen`). */
  readonly listen: boolean;
  /** The server is part of this process: nobody else can reach it, or end what we began. */
  readonly embedded: boolean;
  /** One connection for everybody in this process: transactions queue up behind one another. */
  readonly single: boolean;
  /** Its calls return when they are done: one that waits for a transaction of this process keeps that from ending. */
  readonly synchronous?: boolean;
}

/** What a connection is wanted for: a client with one connection for all must know who would wait for whom. */
export interface Purpose {
  /** One transaction, or whatever comes until it is released. */
  readonly use: "transaction" | "session";
  readonly locks: readonly LockRequest[];
  readonly wait: Wait;
  readonly signal?: AbortSignal | undefined;
}

/** A transaction that the client library opens and ends by itself. */
export interface ClientTransaction extends Purpose {
  readonly isolation: Isolation;
  readonly readOnly: boolean;
  /** How long the body may run. */
  readonly deadlineMs: number;
  /** For a client that has a timeout of its own, which must not come before we have given up. */
  readonly timeoutMs: number;
  /** The server's default isolation already is the one wanted, so it may go unsaid: the engine verifies it. */
  readonly isolationIsDefault: boolean;
  /** To be called as soon as there is a connection, before anything is sent: `end` ends its session, whatever it does. */
  taken(end: () => void): void;
}

/** What a client that opens transactions by itself hands to the body of one. */
export interface Lent<Native, C extends Connection> {
  readonly connection: C;
  readonly native: Native;
  /** False: it did not send its BEGIN, so that ours can be in one message with the locks. */
  readonly begun?: boolean;
  /**
   * The same for a client that has yet to send COMMIT: that, and nothing else. Absent where it sees to that by itself.
   */
  seal?(): void | Promise<void>;
}

/** How many connections a client's pool can have, and how many are given out. */
export interface Room {
  /** Undefined: the client does not say. */
  readonly max: number | undefined;
  /** Undefined: the client does not say. */
  readonly out: number | undefined;
}

/** Told before somebody takes a connection; may refuse by throwing. `granted` settles when there is one; `place`: who asks. */
export type Seen = (granted: () => Promise<void>, place?: () => string | undefined) => void;

/**
 * Told when somebody opens a transaction by the client's own means. What it returns runs the body of that: `native` is what the
 * client hands to it. Undefined: it is one of ours.
 */
export interface Opening {
  (): (<R>(native: unknown, body: () => R) => R) | undefined;
  /**
   * Told of one without a body, in the stack of the call that begins it. `above`: the function whose callers count. `isOpen`: whether
   * the transaction goes on, as far as the client knows; asked only when it matters.
   */
  manual(isOpen: () => boolean, above: (...args: never[]) => unknown): void;
}

/** A query of the caller's own, made with the client's builder. */
export interface QueryLock {
  readonly strength: RowStrength;
  readonly wait: "nowait" | "skip" | "bounded";
}

/** A transaction whose body is over when it returns. */
export interface SyncCall {
  readonly locks: readonly LockRequest[];
  /** How long the process may stand still until they are free. */
  readonly wait: Wait;
  readonly readOnly: boolean;
  /** Of the locks, for people. */
  names(): readonly string[];
}

/** What the body of such a transaction has. */
export interface SyncInside<Native> {
  readonly native: Native;
  query(statement: Statement): readonly Row[];
}

/** A client whose calls are over when they return. */
export interface SyncClient<Native> {
  /** What the engine would say of them: nobody can be asked in between. */
  readonly locks: LockSupport;
  /** Runs a body as a transaction. Throws `Refused` if the locks are not free in time. */
  run<T>(call: SyncCall, body: (inside: SyncInside<Native>) => T): T;
}

/** What `fromPg(pool)`, `fromPrisma(client)`… return. It has `connect` or `transaction`, or both. */
export interface Database<Native = unknown, C extends Connection = Connection> {
  readonly engine: Engine<C>;
  readonly traits: ClientTraits;
  /** A connection of one's own: for locks of a session, and, without `transaction`, to write BEGIN and COMMIT on. */
  connect?(purpose: Purpose): Promise<Pinned<Native, C>>;
  /**
   * For clients that write BEGIN and COMMIT themselves (most ORMs). Goes before `connect`. Is only called by way of
   * `runInClient`, which bounds it.
   */
  transaction?(options: ClientTransaction, body: (lent: Lent<Native, C>) => Promise<void>): Promise<unknown>;
  readonly sync?: SyncClient<Native>;
  /** Writes what the client would keep back until COMMIT, as the last part of a body: it can fail, and be cancelled, as one. */
  flush?(native: Native): Promise<void>;
  /**
   * Drops what the client would write, or call, with COMMIT: the body has failed, its work is undone, and its locks alone are
   * committed. Absent where there is nothing.
   */
  forget?(native: Native): void;
  /** The connection inside a transaction that the caller opened and will end. Throws on what cannot be one. */
  join(native: Native): C;
  /**
   * What stands for the session of such a transaction, unless it is known to lead to the same database: then the server is asked.
   * Absent where `join` knows by itself.
   */
  elsewhere?(native: Native): object | undefined;
  /** Ends what the adapter itself has opened; the caller's client stays open. */
  close?(): void | Promise<void>;
  /**
   * Calls `wake` with each message that the server sends on a channel, until the signal aborts. Resolves once it
   * listens; rejects if it cannot, and from then on nothing depends on it. Absent where the client has no such thing.
   */
  listen?(channel: string, wake: (payload: string) => void, signal: AbortSignal): Promise<void>;
  /** The driver's error inside the client library's, with a `code` that the engine knows. */
  unwrap?(error: unknown): DriverError | undefined;
  /** The pool, as it is now. */
  room?(): Room | undefined;
  /**
   * Calls `seen` before anybody takes a connection of this client without Holdfast. Returns what ends that.
   * `inside`: whether the calling code is in a transaction's body, for clients that must remember where a query was made.
   */
  observe?(seen: Seen, inside: () => boolean): () => void;
  /** Tells of transactions that the caller opens by the client's own means. Returns what ends that. */
  openings?(opening: Opening): () => void;
  /** Calls in such a transaction take part in it although they do not name it: its client is one that we have extended. */
  readonly takesPart?: boolean;
  /**
   * Makes a builder's query, of the transaction's own client, one that locks what it selects; the result runs it.
   * Undefined: it is not such a query. Throws if this one cannot be locked.
   */
  locking?(native: Native, query: unknown, lock: QueryLock): (() => PromiseLike<unknown>) | undefined;
}

/** What engines classify: a server's error code, or the word that the connection is gone. */
export interface DriverError {
  readonly code?: string | number | undefined;
  readonly message?: string;
  readonly lost?: boolean;
  /** Where a client tells it in words of its own; engines know the driver's. */
  readonly violated?: Violated | undefined;
}

/** Which rule of which table an error is about, as far as it says so. */
export interface Violated {
  readonly constraint?: string | undefined;
  readonly table?: string | undefined;
  readonly columns?: readonly string[] | undefined;
}

export type Failure =
  | "deadlock"
  | "serialization"
  | "lock-timeout"
  | "unique"
  | "foreign-key"
  | "check"
  | "canceled"
  | "deadline"
  | "aborted"
  | "not-in-transaction"
  | "read-only"
  | "schema-missing"
  | "denied"
  | "full"
  | "storage"
  | "too-many-connections"
  | "lost"
  | "unavailable"
  | "map-changed";

/** How long a lock may be waited for: milliseconds, or not at all. */
export type Wait = number | "nowait";

export interface Open {
  /** The client has sent BEGIN already. */
  readonly begun: boolean;
  /** The locks must be locks of the session, taken before BEGIN and given back after the end. */
  readonly lockFirst: boolean;
  readonly isolation: Isolation;
  readonly readOnly: boolean;
  readonly deadlineMs: number;
  readonly locks: readonly LockRequest[];
  readonly wait: Wait;
  /** Readable names of the locks, to be shown on the server; empty where they are not to be seen there. */
  readonly names: readonly string[];
  readonly capabilities: Capabilities;
  /** For engines whose waits happen in this process. */
  readonly signal?: AbortSignal | undefined;
  /** The same for all attempts at one transaction, for what an engine has learned in the one before. */
  readonly run?: object;
}

export interface LockCall {
  readonly locks: readonly LockRequest[];
  readonly wait: Wait;
  readonly names: readonly string[];
  /** The transaction belongs to the caller: it may turn out not to exist, and its isolation is not known. */
  readonly joined: boolean;
  readonly capabilities: Capabilities;
  readonly signal?: AbortSignal | undefined;
}

/**
 * `busy`: taken, and we were not to wait. `timeout`: the wait was over. `file`: it was over, and what was waited for is
 * the database itself, which has one writer at a time; whether the lock is taken is not known.
 */
export type Reason = "busy" | "timeout" | "file";

/**
 * Not granted: nothing that this call took counts as held (row locks that cannot be given back before the end may
 * linger); `usable`: the transaction can go on.
 */
export type LockGrant =
  | { readonly granted: true }
  | {
      readonly granted: false;
      readonly reason: Reason;
      readonly usable: boolean;
      readonly cause?: unknown;
    };

/** A begun transaction: what the engine needs to end it, and to find out later what became of it. */
export interface Begun {
  /** Names the transaction to the server after its connection is gone; undefined if nothing can have been written. */
  readonly identity?: string | undefined;
  /** Locks of the session, taken before BEGIN, to be given back after the end. */
  readonly sessionLocks?: readonly LockRequest[];
  /** The server's own number of the transaction, by which others see it. */
  readonly number?: string | undefined;
  /** Other nodes commit it: one may have done so although COMMIT was answered with an error. */
  readonly spread?: boolean;
}

/** A transaction whose connection is gone. */
export interface LostTransaction<C extends Connection> {
  readonly connection: C;
  /** Undefined: BEGIN was not answered. */
  readonly begun: Begun | undefined;
  readonly capabilities: Capabilities | undefined;
}

/** A limit of time that the server has, by the name of its setting. */
export interface ServerLimit {
  readonly setting: string;
  /** As the server writes it: "1s", "30 s". */
  readonly value: string;
}

/** What was ended, perhaps by a limit of the server's. */
export interface EndedByServer {
  /** What was thrown, and what the connection was lost with, as engines know them; the first that says why is right. */
  readonly errors: readonly DriverError[];
  /** For so long nothing had been sent in the transaction when its connection was lost. Undefined: that is not known, or it was not. */
  readonly quietMs: number | undefined;
}

/** A transaction that begins with the first statement in it. */
export interface Later<C extends Connection> {
  /** Begins it with what is first sent through it. */
  readonly connection: C;
  /** Begins it now, unless it has begun. Rejects with what that has failed with, also if it is asked again. */
  begin(): Promise<Begun>;
  /** The same of what was begun; undefined: nothing was. From now on nothing is begun any more. */
  end(): Promise<Begun> | undefined;
}

/**
 * What became of a transaction. "ended": it is over, but only what it wrote can tell how. "unknown": it may even go on.
 */
export type Outcome = "committed" | "aborted" | "in progress" | "ended" | "unknown";

/** Tables, and what is in them. Once released it is never edited: a change is another migration. */
export interface Migration {
  readonly id: number;
  readonly name: string;
  readonly statements: readonly Statement[];
}

export interface Engine<C extends Connection = Connection> {
  readonly name: string;
  /**
   * The same with its tables, functions and channels in this schema, or with this prefix. Undefined: they are there anyway.
   * Throws if that cannot be their name. Absent where it cannot be chosen.
   */
  named?(schema: string): NamedEngine<C> | undefined;
  /**
   * Connections whose statements check, on the server, that the map of several databases is still the one of this number; undefined:
   * it is not known yet. `stale`: told when one was refused. Absent where the server keeps no number.
   */
  checking?(epoch: () => number | undefined, stale: () => void): Pick<NamedEngine<C>, "on">;
  /** Asks the server once what it is and can do; refuses servers below the minimum, and a strategy it does not have. */
  probe(connection: C, traits: ClientTraits, wish?: Strategy): Promise<Probed>;
  /**
   * Throws `ReplicaError` if something between gives an answer a second time: an experiment, on a connection that is in no transaction. Absent
   * where nothing stands between.
   */
  verifyReads?(connection: C, capabilities: Pick<Capabilities, "details">): Promise<void>;
  /** BEGIN, deadline and locks, in as few round trips as the client allows. Not granted: the caller rolls back. */
  begin(connection: C, open: Open): Promise<LockGrant & { begun?: Begun }>;
  /**
   * The same for a transaction without locks that nobody can tell from one that is begun with its first statement, in one
   * message with that. Undefined: not on this connection, or not this one. `open` is asked when it is begun.
   */
  beginLater?(connection: C, capabilities: Capabilities, open: () => Open): Later<C> | undefined;
  /**
   * Which database this is, and of which server: the same by whatever road. Undefined: that cannot be known. Asked inside a transaction,
   * which goes on whatever the answer is, and begins no snapshot where locks would not.
   */
  whereabouts?(connection: C): Promise<string | undefined>;
  /** Resolves to whether the connection is fit for others. A COMMIT that became a ROLLBACK throws. */
  end(connection: C, how: "commit" | "rollback", begun: Begun): Promise<boolean>;
  /** Before a client's own COMMIT, which may not tell: throws if the transaction is no longer what was begun. */
  settle?(connection: C, begun: Begun): Promise<void>;
  /**
   * Whether the transaction that was begun is known to be over although nobody has called `end`: its body has sent COMMIT or ROLLBACK by
   * itself. Asks nothing, so it is not always known.
   */
  isEnded?(connection: C): boolean;
  savepoint(connection: C, name: string, action: "set" | "release" | "rollback"): Promise<void>;
  /** Locks of rows that were taken after a savepoint stay when it is rolled back to. */
  readonly keepsUndoneLocks?: boolean;
  /**
   * Throws if no transaction is open on a connection of which the caller says so: what is written there would be kept at once.
   * Absent where locks, which all that is written needs, prove it by themselves.
   */
  assertTransaction?(connection: C): Promise<void>;
  /** Locks inside a transaction, until its end. */
  lock(connection: C, call: LockCall): Promise<LockGrant>;
  /**
   * Whether locks of transactions keep others out, and let what was committed be seen, whatever the server calls itself: an
   * experiment with two connections. Throws `UnsupportedError` if not. Absent where it would need a table.
   */
  verifyLocks?(a: C, b: C): Promise<void>;
  /**
   * Opens a transaction and ends it: an experiment with a connection that may be lost by it. Returns the reason if something between
   * refuses transactions, or seems to: it may have closed the connection without a word. Absent where nothing stands between.
   */
  verifyTransactions?(connection: C, capabilities: Capabilities): Promise<Unsupported | undefined>;
  /**
   * Undoes what came after the savepoint, or after the beginning, except these locks, which were taken there. For engines
   * that exclude at COMMIT only: what was decided under the locks is true if they can be committed. Throws if somebody else
   * had them meanwhile.
   */
  keepLocks?(
    connection: C,
    locks: readonly LockRequest[],
    names: readonly string[],
    savepoint?: string,
  ): Promise<void>;
  /** Locks of a pinned session, until given back. */
  readonly session?: SessionLocks<C>;
  /** Rows and tables of the caller's; the capabilities say why where this is missing. */
  readonly tables?: Tables<C>;
  readonly leases?: Leases<C>;
  readonly replay?: Replay<C>;
  /**
   * Runs work on a connection that is in no transaction, with the settings of its session that statements rest on as they must be, and
   * puts them back. Absent where statements rest on none.
   */
  withSettings?<T>(connection: C, capabilities: Capabilities, work: () => Promise<T>): Promise<T>;
  /**
   * Runs a call of a pattern that is a transaction by itself at READ COMMITTED, whatever sessions begin with. Absent where stores do so
   * anyway.
   */
  apart?<T>(connection: C, capabilities: Capabilities, call: () => Promise<T>): Promise<T>;
  /** What it keeps for each pattern, or why it does not: the capabilities say the same. */
  readonly quotas: Support<Quotas<C>>;
  readonly stock: Support<StockStore<C>>;
  readonly queues: Support<QueueStore<C>>;
  readonly schedules: Support<Schedules<C>>;
  readonly audit: Support<Audits<C>>;
  /** Absent where there is nothing that processes could disagree on: one way to keep locks, and no shards with patterns. */
  readonly agreements?: Agreements<C>;
  /** What became of a transaction whose connection died during COMMIT. */
  outcome?(connection: C, identity: string): Promise<Outcome>;
  /**
   * Whether `holdfast kill` says, at this moment, that it ended the transaction. Asked on another connection, as soon as the loss is
   * noticed. False if there is nothing that the transaction could be known by.
   */
  wasKilled?(connection: C, lost: LostTransaction<C>): Promise<boolean>;
  /** Which limit of the server's ended a transaction, or a statement. Asked on another connection. Undefined: none of them did. */
  limit?(connection: C, ended: EndedByServer): Promise<ServerLimit | undefined>;
  holders?(
    connection: C,
    locks: readonly LockRequest[],
    capabilities: Capabilities,
  ): Promise<readonly Holder[]>;
  /** What is held and waited for, from the cheapest source that tells the truth. */
  inspect?(connection: C, capabilities: Capabilities): Promise<readonly LockView[]>;
  /** A statement for `tx.query`; engines without SQL leave it out. */
  query?(connection: C, statement: Statement): Promise<Result>;
  /** How it reads statements, so that they can be shown without their values. Absent: they are not shown. */
  readonly lexis?: Lexis;
  classify(error: DriverError): Failure | undefined;
  /** Why no other try would end otherwise, and what to do: something stands in between that cannot do what is needed. */
  hopeless?(error: DriverError): string | undefined;
  /** Of an error of a statement that was a transaction by itself: whether another node may have committed it before that. */
  mayBeKept?(error: DriverError, capabilities: Capabilities): boolean;
  /** Of an error of one of our own statements: which of our tables hides rows, if that is what it says. */
  hidden?(error: DriverError): HiddenRows | undefined;
  /**
   * Of an error about a lock: whether it came after a wait, and not of a statement that was not to wait. Undefined: it
   * does not say.
   */
  waited?(error: object, flavour?: string): boolean | undefined;
  /** What an error of this engine's drivers says of the rule that was broken. */
  violated?(error: object): Violated;
  readonly migrations: Migrations<C>;
  /** For tests that hold statements back; absent where it is not understood. */
  readonly protocol?: Protocol<C>;
}

/** An engine whose things are somewhere else, and how its connections are told of that. */
export interface NamedEngine<C extends Connection> {
  readonly engine: Engine<C>;
  on(connection: C): C;
}

export interface SessionLocks<C extends Connection> {
  take(connection: C, call: LockCall): Promise<LockGrant>;
  /** False: the server says that this session did not hold them all. */
  give(connection: C, locks: readonly LockRequest[]): Promise<boolean>;
  /** Gives back whatever of these is held, after a call that failed half-way. */
  clear(connection: C, locks: readonly LockRequest[]): Promise<void>;
  /** Whether two connections really are two sessions, found by experiment; throws `UnsupportedError` if not. */
  verify(a: C, b: C): Promise<void>;
  /** Cheap proof that the session is alive. */
  ping(connection: C): Promise<void>;
}

export interface Migrations<C extends Connection> {
  readonly all: readonly Migration[];
  /** Text of a statement, to be printed for other migration tools. */
  print(statement: Statement): string;
  /** What is printed before and after all of them. */
  readonly frame?: readonly [before: Statement, after: Statement];
  /** Writes down that one was applied, unless that is written already: no values, so that it can be printed. */
  record(migration: Migration): Statement;
  /** Those that were applied, also by a newer version that has more of them. */
  applied(connection: C): Promise<readonly Pick<Migration, "id" | "name">[]>;
  /** Applies what is missing, one process at a time; `begun`: inside a transaction that the client opened. */
  apply(connection: C, begun: boolean): Promise<readonly (Migration | Remade)[]>;
  /** Absent where an engine has none. */
  readonly routines?: Routines<C>;
  /** Absent where the database has no roles. */
  readonly rights?: Rights<C>;
}

/** What a role needs to use every pattern and lock. It cannot migrate with that. */
export interface Rights<C extends Connection> {
  /** GRANT statements, each without its end. Throws if no role can have that name. */
  grants(role: string): readonly string[];
  /** What the role of this connection lacks, for people. The connection is in no transaction. */
  lacking(connection: C): Promise<readonly string[]>;
}

/** What comes after the tables, and may be made again at any time. A changed signature, or meaning, is another name. */
export interface Routines<C extends Connection> {
  readonly all: readonly Routine[];
  /** Makes it, whatever is there, and writes that down: no values, so that it can be printed. */
  make(routine: Routine): readonly Statement[];
  /** Of each of them, and of those that a newer version has made. */
  states(connection: C): Promise<ReadonlyMap<string, RoutineState>>;
}
