/** Sessions of the package `postgres` (postgres.js), for its own adapter and for those of ORMs on it. */
import type { DriverError, Pinned, Purpose, Result, Room, SqlConnection } from "../../seam/database.ts";
import { ConnectionLostError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { graceMs, within } from "../../waiting/interrupt.ts";
import { Quiet } from "../../waiting/quiet.ts";
import { type Answered, sectionHere } from "../../context/section.ts";
import { over } from "../../context/revocable.ts";
import { render } from "../../engines/postgres/index.ts";
import { type Address, wrongServer } from "../peer.ts";

type PostgresResult = Record<string, unknown>[] & { count?: number | null; command?: string };

/** The part of a postgres.js `Sql` (or of its transaction kind) that is used here. */
export interface PostgresSql {
  (strings: TemplateStringsArray, ...values: never[]): PromiseLike<unknown>;
  unsafe(text: string, values?: never[], options?: object): unknown;
}

export interface PostgresPool extends PostgresSql {
  begin: (...args: never[]) => unknown;
  end: (...args: never[]) => unknown;
}

interface Unanswered {
  /** It is, or will be, sent. What is a part of another query is not. */
  readonly executed: boolean;
  reject(error: unknown): unknown;
}

/** What a query of postgres.js 3 carries besides its documented methods. */
interface Query extends Promise<PostgresResult | PostgresResult[]>, Unanswered {
  handler: (query: Query) => void;
  /** Its `cancel()` calls this and forgets the promise, which tells when the request has been dealt with. */
  canceller: Canceller | null;
  /** The connection's process id and secret, once it is on one. */
  state: { pid: number; secret: number } | null;
  /** Set, it is not sent. */
  cancelled: unknown;
  strings: string[];
  args: unknown[];
  options: QueryOptions;
}

type Canceller = (query: { state: Query["state"]; active: boolean } | Query) => Promise<unknown>;

/** The object itself is filled anew when the connection is opened again. */
function copyOf({ state }: Query): Query["state"] {
  return state ? { pid: state.pid, secret: state.secret } : null;
}

/** The connection behind a query, as the library's own `begin` gets it. */
interface Backend {
  execute(query: Query): unknown;
  /** Kept for one user while this is set. Without `release`, it is given back when the server says "idle". */
  reserved: { release?: boolean } | null;
  /** Called when it is closed, once. */
  onclose?: ((error: unknown) => void) | null;
}

type Unsafe = (text: string, values: unknown[], options: QueryOptions) => Query;
interface QueryOptions {
  simple?: boolean;
  prepare?: boolean;
  onexecute?: (backend: Backend) => unknown;
}

/** As much of a query of postgres.js as is asked for here. */
interface Asked {
  readonly strings?: readonly string[];
}

type Then = (this: Asked, done?: (rows: unknown) => unknown, failed?: (error: unknown) => unknown) => unknown;

const minded = new WeakSet<object>();

/**
 * As soon as postgres.js 3.4 has connected, it asks for the types of arrays. Nobody waits for the answer, so a session that is
 * ended just then would end the process, by a rejection that is handled nowhere. Without an answer it goes on as with
 * no types; that the connection is lost is told by whoever's statement it was opened for.
 */
function mindTypes(sql: PostgresPool): void {
  if (minded.has(sql)) return;
  minded.add(sql);
  // Not sent: that takes somebody who waits for it.
  const { prototype } = (sql.unsafe("SELECT 1") as object).constructor as { prototype: { then: Then } };
  if (minded.has(prototype) || !Object.hasOwn(prototype, "then")) return;
  minded.add(prototype);
  const { then } = prototype;
  // oxlint-disable-next-line unicorn/no-thenable -- it is one.
  prototype.then = function (done, failed) {
    const types = done && this.strings?.[0]?.includes("select b.oid, b.typarray") === true;
    return then.call(this, done, types ? () => done([]) : failed);
  };
}

/**
 * postgres.js 3.4 gathers what is shorter than this, and writes it at the end of the turn. If the connection is closed before,
 * it does not forget that something is to be written: what the next one begins with is added to it and never sent, and
 * that connection is none for as long as the process lives. Longer statements are written at once; a space costs nothing.
 */
const writtenAtOnce = 1024;

/** The first of several hosts: those that it is tried with. */
function addressOf(sql: PostgresPool): Address | undefined {
  const { host, port } = ((sql as { options?: unknown }).options ?? {}) as {
    host?: readonly string[];
    port?: readonly number[];
  };
  const [at, by] = [host?.[0], port?.[0]];
  return at === undefined || by === undefined || at.startsWith("/") ? undefined : { host: at, port: by };
}

/**
 * A connection taken out of the pool by its first statement.
 *
 * `sql.begin` takes one out and binds a handle to it, but spends a round trip on a bare BEGIN; `sql.reserve`, in
 * 3.4, never returns where it has to open a connection again that was open before, and loses it to the pool. So
 * `begin` it is, with our first statement in the place of its own.
 */
export class PostgresPin {
  readonly lost: AbortSignal;
  /** The library's own handle, bound to the connection. */
  bound: PostgresSql | undefined;
  readonly #sql: PostgresPool;
  readonly #lost = new AbortController();
  #backend: Backend | undefined;
  /** The library's mark that the connection is kept for us. A new one when it is kept for the next. */
  #mine: Backend["reserved"] = null;
  #running: Query | undefined;
  #state: Query["state"] = null;
  canceller: Canceller | null = null;
  /** Queries that were made and not answered, ours and the caller's. */
  readonly unanswered = new Set<Unanswered>();
  /** Not inside BEGIN … COMMIT from its first statement on: it must be given back by hand. */
  #sticky: boolean;
  /** Given back: whatever ran on it now would run in somebody else's place. */
  #over = false;
  /** Nobody waits for its first statement any more. */
  #abandoned = false;
  /** What the server says before it ends a session, postgres.js 3.4 keeps to itself, unless a statement is under way. */
  readonly quiet: Quiet;

  constructor(sql: PostgresPool, use: Purpose["use"]) {
    mindTypes(sql);
    this.#sql = sql;
    this.#sticky = use === "session";
    this.lost = this.#lost.signal;
    this.quiet = new Quiet(this.lost);
    this.lost.addEventListener("abort", () => setImmediate(() => this.#forsake()), { once: true });
  }

  /** postgres.js 3.4 forgets what was sent between the error of a socket and its end: nobody would ever answer that. */
  #forsake(): void {
    for (const query of this.unanswered) if (query.executed) query.reject(this.lost.reason);
  }

  async send(text: string, values: unknown[], simple: boolean): Promise<PostgresResult | PostgresResult[]> {
    // Each connection of the pool may have kept one.
    for (let left = roomOfPostgres(this.#sql)?.max ?? 10; ; left--)
      try {
        return await this.#send(text, values, simple);
      } catch (error) {
        if (!(error instanceof Stale) || this.#backend || this.#abandoned || left <= 0)
          throw this.#backend ? error : await wrongServer(error, "PostgreSQL", addressOf(this.#sql));
        this.canceller = null;
      }
  }

  async #send(text: string, values: unknown[], simple: boolean): Promise<PostgresResult | PostgresResult[]> {
    this.lost.throwIfAborted();
    if (!this.#backend && text === "ROLLBACK") return [];
    if (this.over) throw new UsageError("This connection has been given back", "HF_TRANSACTION_OVER");
    const padded = text.padEnd(writtenAtOnce);
    const query = this.#backend ? this.#next(padded, values, simple) : this.#first(padded, values, simple);
    this.#running = query;
    this.unanswered.add(query);
    this.canceller ??= query.canceller;
    this.quiet.begins();
    try {
      return await query;
    } catch (error) {
      if (isLost(error)) this.#lost.abort(error);
      throw isStale(error, padded) ? new Stale(error) : error;
    } finally {
      this.quiet.ends();
      this.#running = undefined;
      this.unanswered.delete(query);
      this.#state ??= copyOf(query);
      if (!this.#backend && query.state) await this.#evict(query);
      // The library gives the connection back by itself when the server says that no transaction is open on it, and
      // the next in line has it before we are told.
      if (this.#backend && this.#backend.reserved !== this.#mine) this.#over = true;
    }
  }

  #first(text: string, values: unknown[], simple: boolean): Query {
    const sql = this.#sql as unknown as {
      unsafe: Unsafe;
      begin(body: (bound: PostgresSql) => Promise<never>): Promise<unknown>;
    };
    const { unsafe } = sql;
    if (!text.startsWith("BEGIN")) this.#sticky = true;
    let query: Query | undefined;
    let begun: Promise<unknown>;
    // Only for as long as `begin` runs before its first `await`, so nobody else can see it.
    sql.unsafe = (_begin, _values, { onexecute }) => {
      query = unsafe(text, values, {
        simple,
        prepare: false,
        onexecute: (backend) => this.#pinned(backend, onexecute),
      });
      return query;
    };
    try {
      begun = sql.begin((bound) => {
        this.bound = bound;
        queueMicrotask(() => this.#watchEnd());
        // Never settled: the library would send a COMMIT of its own. We end the transaction ourselves.
        return new Promise(() => {});
      });
    } finally {
      sql.unsafe = unsafe;
    }
    // Rejects with the query, or when the connection is closed at any time later.
    begun.catch((error: unknown) => {
      if (isLost(error)) this.#lost.abort(error);
    });
    if (!query)
      throw new UnsupportedError(
        "This version of the package postgres begins transactions in a way that Holdfast does not know; use version 3.4",
      );
    return query;
  }

  /**
   * With the loss the library takes its mark away, as it does after a COMMIT of the caller's own. So the loss must be known before
   * anybody's code can run, and the promise of `begin` tells of it later than that.
   */
  #watchEnd(): void {
    const backend = this.#backend;
    const told = backend?.onclose;
    if (!backend || typeof told !== "function") return;
    backend.onclose = (error) => {
      this.#lost.abort(error);
      told(error);
    };
  }

  #pinned(backend: Backend, onexecute: QueryOptions["onexecute"]): unknown {
    // What it returns matters: "ready" would let the pool send others' statements after ours.
    const ready = onexecute?.(backend);
    this.#backend = backend;
    this.#mine = backend.reserved;
    if (this.#sticky && this.#mine && !this.#abandoned) this.#mine.release = true;
    return ready;
  }

  /**
   * postgres.js 3.4 does not say which connection it was if the statement filled the pipeline of one: a transaction
   * is open now where others' statements go. Only the end of that session undoes it.
   */
  async #evict({ state }: Query): Promise<void> {
    this.#lost.abort(new Error("its statement went to a connection that others use"));
    await (this.#sql.unsafe as unknown as Unsafe)("SELECT pg_terminate_backend($1)", [state?.pid], {
      prepare: false,
    }).catch(() => {});
  }

  /** In line with the caller's own statements; without a handle, after the first one has failed, there are none. */
  #next(text: string, values: unknown[], simple: boolean): Query {
    if (this.bound) return (this.bound.unsafe as unknown as Unsafe)(text, values, { simple, prepare: false });
    const query = (this.#sql.unsafe as unknown as Unsafe)(text, values, { simple, prepare: false });
    query.handler = (q) => this.#backend?.execute(q);
    return query;
  }

  /** The body has ended: what it was given sends nothing more. */
  sealed = false;

  get over(): boolean {
    // A COMMIT of the caller's own gives the connection back too, and the next in line may have it already.
    return this.#over || (this.#backend !== undefined && this.#backend.reserved !== this.#mine);
  }

  async acquire(signal?: AbortSignal): Promise<void> {
    signal?.throwIfAborted();
    const onAbort = () => void this.cancel().catch(() => {});
    signal?.addEventListener("abort", onAbort, { once: true });
    try {
      await this.send("SELECT 1 AS one", [], true);
      signal?.throwIfAborted();
    } catch (error) {
      await this.release();
      throw signal?.aborted ? signal.reason : error;
    } finally {
      signal?.removeEventListener("abort", onAbort);
    }
  }

  /** Whatever runs on the connection, ours or the caller's own; or our place in the line for one. */
  async cancel(): Promise<void> {
    const { canceller } = this;
    if (this.#over || !canceller) return;
    if (this.#state) await cancelled(this.#sql, canceller, { state: this.#state, active: true });
    else if (this.#running) {
      const query = this.#running;
      await cancelled(this.#sql, canceller, query);
      if (!query.state) this.#abandon(query);
    }
  }

  /**
   * It was taken out of the line; or a connection is being opened for it. Of the latter postgres.js 3.4 forgets when it is
   * open: nobody ever gets it, and `sql.end()` waits for it for ever. So something is sent on it that does no harm, after which
   * it is everybody's.
   */
  #abandon(query: Query): void {
    this.#abandoned = true;
    query.cancelled = null;
    query.strings = ["SELECT 1 AS one"];
    query.args = [];
    query.options.simple = true;
  }

  async release(broken = false): Promise<void> {
    if (this.lost.aborted || this.#over) return;
    if (!this.#backend) {
      // Still in line for a connection, perhaps: nobody would give back the one that it got.
      await this.cancel().catch(() => {});
      this.#over = true;
      return;
    }
    // There is no public way to throw a connection away: the server is asked to end the session.
    const last = broken ? "SELECT pg_terminate_backend(pg_backend_pid())" : "SELECT 1 AS one";
    if (!broken && this.#mine) this.#mine.release = false;
    // A dead socket answers nothing: the loss, which follows soon, is an answer too.
    const gone = new Promise<void>((resolve) =>
      this.lost.addEventListener("abort", () => resolve(), { once: true }),
    );
    const answered = this.send(last, [], true).catch(() => {});
    this.#over = true;
    await within(graceMs, Promise.race([answered, gone])).catch(() => {});
  }
}

interface Socket {
  removeAllListeners(...events: string[]): unknown;
  once(event: "close", then: () => void): unknown;
}

/**
 * Resolves when the server has closed the socket of the request; from then on it cannot hit a later statement. Over TLS
 * postgres.js 3.4 never tells: when it begins to encrypt, it drops every listener of the socket, and with them the one for that
 * end. So it is given a socket on which that listener comes back.
 */
async function cancelled(
  sql: PostgresSql,
  canceller: Canceller,
  query: Parameters<Canceller>[0],
): Promise<void> {
  const { options } = sql as {
    options?: { ssl?: unknown; socket?: ((all: unknown) => unknown) | undefined };
  };
  if (!options?.ssl) return void (await canceller(query));
  const net = await import("node:net");
  const closed = Promise.withResolvers<void>();
  const { socket: theirs } = options;
  options.socket = async (all) => {
    const socket = (theirs ? await theirs(all) : new net.Socket()) as Socket;
    const { removeAllListeners } = socket;
    socket.removeAllListeners = (...events) => {
      removeAllListeners.apply(socket, events);
      return socket.once("close", closed.resolve);
    };
    return socket;
  };
  let answered: Promise<unknown>;
  try {
    // The socket is asked for before this returns, so nobody else gets one like it.
    answered = canceller(query);
  } finally {
    options.socket = theirs;
  }
  await Promise.race([answered, closed.promise]);
}

/** It does not say how many are given out. */
export function roomOfPostgres(sql: PostgresPool): Room | undefined {
  const { max } = (sql as { options?: { max?: unknown } }).options ?? {};
  return typeof max === "number" ? { max, out: undefined } : undefined;
}

function connectionOf(
  send: PostgresPin["send"],
  lost: AbortSignal,
  cancel: () => Promise<void>,
): SqlConnection {
  return {
    lost,
    unwrap: unwrapPostgres,
    cancel,
    async query(statement) {
      const { text, values } = render(statement);
      return result((await send(text, values, values.length === 0)) as PostgresResult);
    },
    async script(text) {
      const results = await send(text, [], true);
      return (Array.isArray(results[0]) ? (results as PostgresResult[]) : [results as PostgresResult]).map(
        result,
      );
    },
  };
}

/** Those that rename single words too are refused by the first question. */
const renamed = /^[a-z].*[A-Z-]/;

/** `transform: postgres.camel` and its like rename columns of our statements too. They are found by both names; the caller's own as ever. */
function nameAgain(rows: PostgresResult): void {
  const [first] = rows;
  const others = first ? Object.keys(first).filter((name) => renamed.test(name)) : [];
  for (const name of others) {
    const written = name.replaceAll("-", "_").replaceAll(/[A-Z]/g, "_$&").toLowerCase();
    for (const row of rows)
      if (!(written in row)) Object.defineProperty(row, written, { value: row[name], enumerable: false });
  }
}

function result(answer: PostgresResult): Result {
  // postgres.js 3.4 counts the rows that came before a connection was closed with those of the next one's first answer, and
  // leaves as many empty places before these.
  const rows = answer.length === 0 || 0 in answer ? answer : answer.filter(() => true);
  nameAgain(rows);
  return {
    rows,
    affected: answer.count ?? 0,
    ...(answer.command !== undefined && { command: answer.command }),
  };
}

/**
 * postgres.js 3.4 keeps the error that ended a connection, and gives it to the first statement after it has connected again,
 * still with the statement that it was about. Whatever it says of that one, ours was not sent.
 */
class Stale extends Error {
  readonly code = "CONNECTION_CLOSED";
  constructor(cause: unknown) {
    super("its connection had been ended before", { cause });
  }
}

function isStale(error: unknown, text: string): boolean {
  const { query } = (error ?? {}) as { query?: unknown };
  return typeof query === "string" && query !== text;
}

const lostCodes = new Set(["CONNECTION_CLOSED", "CONNECTION_DESTROYED", "CONNECT_TIMEOUT"]);

export function unwrapPostgres(error: unknown): DriverError | undefined {
  const code = (error as { code?: unknown } | null)?.code;
  return typeof code === "string" && lostCodes.has(code) ? { lost: true, code } : undefined;
}

/** Of an error of a statement of ours, where a socket's code can only be our own socket's. */
function isLost(error: unknown): boolean {
  const code = String((error as { code?: unknown } | null)?.code);
  return lostCodes.has(code) || code === "ECONNRESET" || code === "EPIPE";
}

/** It runs when it is waited for: then its own functions are called with the answer. */
function tracked({ unanswered }: PostgresPin, query: unknown, answered: Answered | undefined): unknown {
  const own = query as Partial<Unanswered> & { resolve?: unknown };
  if (typeof own?.resolve !== "function" || typeof own.reject !== "function") return query;
  unanswered.add(own as Unanswered);
  for (const name of ["resolve", "reject"] as const) {
    const original = own[name] as (value: unknown) => unknown;
    own[name] = (value: unknown) => {
      unanswered.delete(own as Unanswered);
      answered?.();
      return original(value);
    };
  }
  return query;
}

/** The caller's own handle, which stops working with the connection: it would quietly run statements on another one. */
function guarded(pin: PostgresPin): PostgresSql {
  const { bound } = pin;
  if (!bound) throw new UsageError("The transaction has not begun");
  const refuse = () => {
    // It was given back as soon as it was lost, and that is what there is to tell.
    if (pin.lost.aborted && !pin.sealed) throw new ConnectionLostError(1, pin.lost.reason);
    if (pin.sealed || pin.over) throw over();
  };
  const sent = (statement: unknown, values: unknown): Answered => {
    const answered = sectionHere()?.sent(statement, Array.isArray(values) ? values : []);
    pin.quiet.begins();
    return () => {
      pin.quiet.ends();
      answered?.();
    };
  };
  return new Proxy(bound, {
    apply(target, self, args: unknown[]) {
      refuse();
      // Else it is a part of a statement: a name, or a list of values.
      const isStatement = Array.isArray(args[0]) && "raw" in args[0];
      const answered = isStatement ? sent(args[0], args.slice(1)) : undefined;
      const query: unknown = Reflect.apply(target as unknown as (...a: unknown[]) => unknown, self, args);
      return tracked(pin, query, answered);
    },
    get(target, name) {
      const value: unknown = Reflect.get(target, name);
      if (name !== "unsafe" && name !== "file") return value;
      return (...args: unknown[]) => {
        refuse();
        const answered = name === "unsafe" ? sent(args[0], args[1]) : undefined;
        return tracked(pin, (value as (...a: unknown[]) => unknown)(...args), answered);
      };
    },
  });
}

/** postgres.js listens on one connection of its own, which it makes for the first channel and then keeps. */
export interface PostgresListening {
  listen: {
    (channel: string, wake: (payload: string) => void): Promise<{ unlisten(): Promise<unknown> }>;
    sql?: { end(options: { timeout: number }): Promise<unknown> } | undefined;
    channels?: Record<string, unknown>;
  };
}

export async function listenPostgres(
  { listen: open }: PostgresListening,
  channel: string,
  wake: (payload: string) => void,
  signal: AbortSignal,
): Promise<void> {
  signal.throwIfAborted();
  const listening = open(channel, wake);
  const close = async () => {
    await listening.then(({ unlisten }) => unlisten()).catch(() => delete open.channels?.[channel]);
    // It would keep the process. A channel of the caller's own keeps it too, and stays.
    if (!open.sql || Object.keys(open.channels ?? {}).length > 0) return;
    const connection = open.sql;
    open.sql = undefined;
    await connection.end({ timeout: 0 });
  };
  signal.addEventListener("abort", () => void close().catch(() => {}), { once: true });
  await listening;
}

export function pinnedPostgres(pin: PostgresPin): Pinned<PostgresSql, SqlConnection> {
  const connection = connectionOf(
    (...args) => pin.send(...args),
    pin.lost,
    () => pin.cancel(),
  );
  return {
    connection: { ...connection, quietMs: pin.quiet.ms },
    get native() {
      return guarded(pin);
    },
    seal: () => void (pin.sealed = true),
    release: (broken) => pin.release(broken),
  };
}

/** `pool`: the one that its transaction was begun on. */
export function joinedPostgres(sql: PostgresSql, pool: PostgresSql): SqlConnection {
  const lost = new AbortController();
  let running: Query | undefined;
  const send: PostgresPin["send"] = async (text, values, simple) => {
    running = (sql.unsafe as unknown as Unsafe)(text, values, { simple, prepare: false });
    try {
      return await running;
    } catch (error) {
      if (isLost(error)) lost.abort(error);
      throw error;
    } finally {
      running = undefined;
    }
  };
  return connectionOf(send, lost.signal, async () => {
    if (running?.canceller) await cancelled(pool, running.canceller, running);
  });
}
