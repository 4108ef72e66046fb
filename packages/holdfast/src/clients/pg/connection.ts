/** Sessions of the package `pg`, whoever took them out of a pool: the adapter for `pg` itself, or one for an ORM on it. */
import { hash } from "node:crypto";
import type {
  DriverError,
  Opening,
  Pinned,
  Purpose,
  Result,
  Room,
  Seen,
  SqlConnection,
} from "../../seam/database.ts";
import { NoConnectionError } from "../../seam/errors.ts";
import { observeMethod, observeStatements, takenByUs } from "../observe.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { sql } from "../../seam/sql.ts";
import { type View, type ViewOptions, behind, endsTransaction, view } from "../../context/revocable.ts";
import { type PgWire, type QueryOf, Sequence } from "./sequence.ts";
import { render } from "../../engines/postgres/index.ts";
import { type Address, reached } from "../peer.ts";

/** The part of a `pg` Client that is used here: any version or fork that has it will do. */
export interface PgClient {
  query(text: string | PgNamed, values?: unknown[]): Promise<unknown>;
  on(event: "error" | "end", listener: (error?: Error) => void): unknown;
}

interface PgNamed {
  name: string;
  text: string;
  values: unknown[];
}

export type PgPooled = PgClient & { release(error?: Error | boolean): void };

export interface PgPool {
  connect(): Promise<PgPooled>;
  readonly totalCount: number;
}

interface PgResult {
  rows: Record<string, unknown>[];
  rowCount: number | null;
  command: string;
}

/** What a `pg` Client carries besides its documented methods, as far as cancelling needs it. */
interface Innards {
  processID?: number | null;
  secretKey?: number | null;
  connectionParameters?: { host?: string; port?: number; ssl?: unknown };
  host?: string;
  port?: number;
  connection?: unknown;
  /** It sends queries before the last one is answered. */
  pipeline?: boolean;
  /** How it reads values. */
  _types?: unknown;
}

interface Wire {
  connect(portOrPath: number | string, host?: string): void;
  cancel(processID: number, secretKey: number): void;
  once(event: string, listener: () => void): void;
  on(event: string, listener: (message?: { status?: string }) => void): void;
  stream?: { destroy(): void; localAddress?: string; localPort?: number };
}

const connections = new WeakMap<PgClient, SqlConnection>();

interface Settings {
  readonly connectionParameters?: {
    readonly host?: string;
    readonly port?: number;
    readonly database?: string;
  };
}

/** By where the clients of the pool, or this one, connect to. */
export function elsewherePg(own: PgPool | PgClient): (native: PgClient) => object | undefined {
  let known: Settings["connectionParameters"];
  return (native) => {
    const client = behind(native);
    if (!known) {
      const { Client, options } = own as { Client?: new (options?: object) => object; options?: object };
      known = ((Client ? new Client(options) : own) as Settings).connectionParameters;
    }
    const { host, port, database } = (client as Settings).connectionParameters ?? {};
    return known?.host === host && known?.port === port && known?.database === database ? undefined : client;
  };
}

/** `options`: of the pool, to make another client with. */
export function pgConnection(given: PgClient, options?: object): SqlConnection {
  const client = behind(given);
  const known = connections.get(client);
  if (known) return known;
  const lost = new AbortController();
  // Without a listener an error event of a checked-out client would end the process.
  client.on("error", (error) => lost.abort(error));
  client.on("end", () => lost.abort(new Error("the connection has ended")));
  const status = transactionStatus(client);
  const connection: SqlConnection = {
    session: client,
    get pid() {
      return (client as Innards).processID ?? undefined;
    },
    get socket() {
      return socketOf(client);
    },
    ...(status && {
      // Before the first answer it is not known either.
      doubtful: () => status() !== "T" && status() !== "I",
      isInTransaction: () => status() === "T",
      settled: (then) => status.idle(then),
    }),
    lost: lost.signal,
    unwrap: unwrapPg,
    async query(statement) {
      const { text, values } = render(statement);
      return result(
        (await (values.length > 0 ? client.query(text, values) : client.query(text))) as PgResult,
      );
    },
    ...(status && {
      async prepared(statement) {
        const { text, values } = render(statement);
        // In a transaction there is no second try. After an answer the status is known.
        if (status() !== "I" || unprepared.has(options ?? client)) return this.query(statement);
        try {
          return result((await client.query({ name: nameOf(text), text, values })) as PgResult);
        } catch (error) {
          if (!notKept.has(String((error as { code?: unknown }).code))) throw error;
          unprepared.add(options ?? client);
          return this.query(statement);
        }
      },
    }),
    async script(text) {
      const results = await client.query(text);
      return (Array.isArray(results) ? (results as PgResult[]) : [results as PgResult]).map(result);
    },
    ...sequenceOn(client, options ?? client),
    ...(canCancel(client) && { cancel: () => cancel(client, options) }),
  };
  connections.set(client, connection);
  return connection;
}

/** Only a client in JavaScript, which answers one query after the other, takes what is not a query of its own. */
function sequenceOn(client: PgClient, pool: object): Pick<SqlConnection, "sequence"> {
  const { connection: wire, pipeline, _types: types } = client as Innards;
  const { Query } = client.constructor as { Query?: QueryOf };
  const speaks = ["parse", "bind", "describe", "execute", "sync"].every(
    (name) => typeof (wire as Record<string, unknown> | undefined)?.[name] === "function",
  );
  if (!speaks || !(wire as Partial<PgWire>).parsedStatements || pipeline || !Query) return {};
  if (typeof (Query.prototype as { prepare?: unknown }).prepare !== "function") return {};
  return {
    sequence(steps) {
      const keeps = !unprepared.has(pool);
      const named = steps.map((step) => ({
        ...step,
        name: step.kept && keeps && !altered.has(step.text) ? nameOf(step.text) : undefined,
      }));
      const onKept = (error: Error, text: string) => {
        const { code } = error as { code?: unknown };
        // A table of the caller's has got other columns: that says nothing of other statements.
        if (code === "0A000") altered.add(text);
        else if (notKept.has(String(code))) unprepared.add(pool);
      };
      const sequence = new Sequence(named, { Query, types, onKept });
      void (client as { query(submittable: object): unknown }).query(sequence);
      return sequence.answers;
    },
  };
}

/**
 * 26000: it is not there, 42P05: it is there already: somebody lends sessions out, or has thrown prepared statements away.
 * 0A000: its result has other columns now. In none of these cases has it run.
 */
const notKept = new Set(["26000", "42P05", "0A000"]);
/** Pools, by their options, and clients whose sessions do not keep what is prepared. */
const unprepared = new WeakSet<object>();
/** Texts of those whose results have had other columns once. */
const altered = new Set<string>();
/** Of texts that are constants of this library, or of these and a table's name: there are few. */
const preparedNames = new Map<string, string>();

/** By its text, so that what another version has left on a pooled session is not mistaken for it. */
function nameOf(text: string): string {
  let name = preparedNames.get(text);
  if (name === undefined)
    preparedNames.set(text, (name = `holdfast_${hash("sha256", text, "hex").slice(0, 12)}`));
  return name;
}

/** I: in none, T: in a transaction, E: in one that has failed. The server says so after every statement. */
function transactionStatus(
  client: PgClient,
): ((() => string) & { idle(then: () => void): void }) | undefined {
  const { connection } = client as Innards;
  const wire = connection as Partial<Wire> | undefined;
  if (typeof wire?.on !== "function") return undefined;
  let status = "";
  let waiting: (() => void)[] = [];
  (wire as Wire).on("readyForQuery", (message) => {
    status = message?.status ?? status;
    if (status !== "I" || waiting.length === 0) return;
    const told = waiting;
    waiting = [];
    for (const then of told) then();
  });
  // Whoever sent the statement learns of its error before the server says what it means for the transaction.
  (wire as Wire).on("errorMessage", () => (status = "E"));
  return Object.assign(() => status, { idle: (then: () => void) => void waiting.push(then) });
}

function result({ rows, rowCount, command }: PgResult): Result {
  return { rows, affected: rowCount ?? 0, command };
}

/** Of a socket of the system's own there is none. An address of IPv4 may come in the clothes of one of IPv6. */
function socketOf(client: PgClient): string | undefined {
  const { stream } = ((client as Innards).connection ?? {}) as Partial<Wire>;
  const { localAddress, localPort } = stream ?? {};
  return localAddress === undefined || localPort === undefined
    ? undefined
    : `${localAddress.replace(/^::ffff:/, "")} ${localPort}`;
}

function canCancel(client: PgClient): boolean {
  const { connection } = client as Innards;
  return typeof (connection as Partial<Wire> | undefined)?.cancel === "function";
}

/**
 * Asks by the session's protocol key, which also works through a pooler. The server closes the socket after it
 * has passed the request on: from then on it can hit only the statement that is running, not a later one.
 */
async function cancel(client: PgClient, options: object = {}): Promise<void> {
  const { processID, secretKey, connectionParameters } = client as Innards;
  if (typeof processID !== "number" || typeof secretKey !== "number") return;
  const Client = client.constructor as new (config: object) => Innards;
  const other = new Client({ ...connectionParameters, ...options });
  const wire = other.connection as Wire;
  await new Promise<void>((resolve) => {
    const timer = setTimeout(() => wire.stream?.destroy(), 10_000);
    const done = () => {
      clearTimeout(timer);
      resolve();
    };
    const send = () => wire.cancel(processID, secretKey);
    wire.once("connect", send);
    wire.once("sslconnect", send);
    wire.on("error", done);
    wire.once("end", done);
    if (other.host?.startsWith("/")) wire.connect(`${other.host}/.s.PGSQL.${other.port}`);
    else wire.connect(other.port as number, other.host);
  });
}

export function isPgPool(value: unknown): value is PgPool {
  return hasMethods(value, "connect", "query") && "totalCount" in (value as object);
}

export function isPgClient(value: unknown): value is PgClient {
  return hasMethods(value, "query", "on") && !isPgPool(value);
}

function hasMethods(value: unknown, ...names: string[]): boolean {
  return (
    typeof value === "object" &&
    value !== null &&
    names.every((name) => typeof (value as Record<string, unknown>)[name] === "function")
  );
}

/** pg reports a dead connection by message only. */
const lostMessages =
  /^Connection terminated|connection error and is not queryable|^Client was closed|server closed the connection/;

export function unwrapPg(error: unknown): DriverError | undefined {
  if (!(error instanceof Error)) return undefined;
  return lostMessages.test(error.message) ? { lost: true, message: error.message } : undefined;
}

/** What a pool makes its clients with. */
export interface PgFactory {
  readonly Client: new (options: object) => PgClient & Listener;
  readonly options: object;
}

interface Listener {
  connect(): Promise<unknown>;
  end(): Promise<void>;
  unref?(): void;
  on(event: "notification", listener: (message: { channel: string; payload?: string }) => void): unknown;
}

/**
 * On a client of its own, made as the pool makes its own: one taken out of the pool would be missing there, perhaps
 * to renew a lease, and `pool.end()` would wait for it.
 */
export async function listenPg(
  { Client, options }: PgFactory,
  channel: string,
  wake: (payload: string) => void,
  signal: AbortSignal,
): Promise<void> {
  signal.throwIfAborted();
  const client = new Client(options);
  const end = () => void client.end().catch(() => {});
  client.on("error", () => {});
  client.on("notification", (message) => {
    if (message.channel === channel) wake(message.payload ?? "");
  });
  signal.addEventListener("abort", end, { once: true });
  try {
    await client.connect();
    // Whoever waits keeps the process; the one who tells them need not.
    client.unref?.();
    await client.query(render(sql`LISTEN ${sql.id(channel)}`).text);
    signal.throwIfAborted();
  } catch (error) {
    end();
    throw error;
  }
}

/** What a body may send through a client once it has ended: nothing but the end that an ORM writes. */
export const pgView: ViewOptions = {
  senders: ["query"],
  ends: (_, [first]) => endsTransaction(first),
  later: queryLater,
};

interface Submittable {
  handleError(error: unknown, wire: unknown): void;
}

/** `client.query` returns a promise, or the query itself if it was given one, or nothing if it is to call back. */
function queryLater(until: Promise<unknown>, args: readonly unknown[], send: () => unknown): unknown {
  const [first] = args;
  const submitted = typeof (first as { submit?: unknown } | null)?.submit === "function";
  const callback = args.findLast((arg) => typeof arg === "function") as
    ((error: unknown) => void) | undefined;
  const sent = until.then(send);
  if (!submitted && !callback) return sent;
  const fail = (error: unknown) =>
    callback ? callback(error) : (first as Submittable).handleError(error, undefined);
  // Out of the promise, which would swallow what they throw.
  sent.catch((error: unknown) => process.nextTick(fail, error));
  return submitted ? first : undefined;
}

const heard = new WeakSet<object>();

/**
 * From the moment at which a pool gives a client out nobody listens to it, and an error that comes in the same breath as
 * the connection itself, before whoever waited for it has run, would end the process.
 */
export function listenToClients(pool: PgPool): void {
  if (heard.has(pool)) return;
  heard.add(pool);
  const { options, on } = pool as { options?: object; on?: (event: string, told: unknown) => unknown };
  on?.call(pool, "acquire", (client: PgClient) => void pgConnection(client, options));
}

/** The same for who makes clients by itself, and listens to them a moment after they have connected. */
export function heardFromBirth(Client: PgFactory["Client"]): PgFactory["Client"] {
  return class extends Client {
    constructor(options: object) {
      super(options);
      this.on("error", () => {});
    }
  };
}

/** As pg's own defaults have it, where the pool's options say nothing. */
function addressOf(pool: PgPool): Address | undefined {
  const { host, port, connectionString } = ((pool as { options?: unknown }).options ?? {}) as {
    host?: string;
    port?: number;
    connectionString?: string;
  };
  const url =
    connectionString !== undefined && URL.canParse(connectionString) ? new URL(connectionString) : undefined;
  const { PGHOST, PGPORT } = globalThis.process?.env ?? {};
  const at = url?.hostname || host || PGHOST || "localhost";
  // A socket of the file system.
  return at.startsWith("/") ? undefined : { host: at, port: Number(url?.port || port || PGPORT || 5432) };
}

export async function checkOutPg(
  pool: PgPool,
  options: object | undefined,
  { signal }: Purpose,
): Promise<Pinned<PgClient, SqlConnection>> {
  listenToClients(pool);
  let asking: ReturnType<PgPool["connect"]>;
  try {
    asking = pool.connect();
  } catch (error) {
    throw severalHosts(pool, error) ?? error;
  }
  const connecting = unlessAborted(asking, signal, (late) => late.release());
  const client = await reached(pool, connecting, "PostgreSQL", () => addressOf(pool));
  const seen: View<PgClient> = view(client, pgView);
  const give = takenByUs(client);
  return {
    connection: pgConnection(client, options),
    native: seen.proxy,
    seal() {
      seen.seal();
      return seen.sent();
    },
    hold: seen.hold,
    release(broken) {
      seen.revoke();
      give();
      client.release(broken === true);
    },
  };
}

/** libpq takes several hosts in one URL. Of such a one pg says that it is invalid, and nothing else. */
function severalHosts(pool: PgPool, error: unknown): NoConnectionError | undefined {
  const { options } = pool as { options?: { connectionString?: unknown } };
  const hosts = /^[^:]*:\/\/(?:[^/?]*@)?([^/?]*)/.exec(String(options?.connectionString))?.[1];
  if ((error as { code?: unknown }).code !== "ERR_INVALID_URL" || !hosts?.includes(",")) return undefined;
  return new NoConnectionError(
    undefined,
    error,
    "No connection could be had: the pool's URL names several hosts, and the package pg takes one. Name the primary, or what leads to it " +
      "(a virtual address, HAProxy, the endpoint of your provider).",
    false,
  );
}

/** Whatever it is doing: who waits for an answer is told. */
export function endPg(given: PgClient): void {
  const { connection } = behind(given) as Innards;
  (connection as Partial<Wire> | undefined)?.stream?.destroy();
}

export function roomOfPg(pool: PgPool): Room | undefined {
  const { options, idleCount } = pool as { options?: { max?: unknown }; idleCount?: unknown };
  if (typeof options?.max !== "number" || typeof idleCount !== "number") return undefined;
  return { max: options.max, out: pool.totalCount - idleCount };
}

/** `pool.query` takes its connection by `pool.connect` too, with a callback. */
export function observePg(pool: PgPool, seen: Seen, place?: () => string | undefined): () => void {
  return observeMethod(pool, "connect", seen, place && { place });
}

/** Transactions that are begun by a statement on a client of this pool. */
export function observePgStatements(pool: PgPool, opening: Opening): () => void {
  const { options } = pool as { options?: object };
  return observeStatements(pool, opening, (client) => {
    const connection = () => pgConnection(client as PgClient, options);
    return {
      connection: client,
      senders: ["query"],
      isInTransaction: () => {
        const { isInTransaction, doubtful } = connection();
        return !isInTransaction || isInTransaction() || doubtful?.() === true;
      },
    };
  });
}

const plainBegin = /^\s*(?:BEGIN|START TRANSACTION)\s*;?\s*$/i;

/**
 * Answers the next statement on this client itself, if it is a plain BEGIN: the engine's own first message holds it,
 * together with the locks, and a round trip is saved.
 */
export function withholdBegin(client: PgClient): { readonly withheld: boolean; end(): void } {
  const target = behind(client) as { query: (...args: unknown[]) => unknown };
  const before = Object.getOwnPropertyDescriptor(target, "query");
  const send = target.query;
  let withheld = false;
  let over = false;
  const end = () => {
    if (over) return;
    over = true;
    if (before) Object.defineProperty(target, "query", before);
    else delete (target as { query?: unknown }).query;
  };
  target.query = (...args) => {
    end();
    const [first] = args;
    const text = typeof first === "string" ? first : (first as { text?: unknown } | undefined)?.text;
    if (typeof text !== "string" || !plainBegin.test(text)) return send.apply(target, args);
    withheld = true;
    const answer = { command: "BEGIN", rowCount: null, oid: null, rows: [], fields: [] };
    const callback = args.findLast((arg) => typeof arg === "function") as
      ((error: null, result: object) => void) | undefined;
    if (!callback) return Promise.resolve(answer);
    queueMicrotask(() => callback(null, answer));
    return undefined;
  };
  return {
    get withheld() {
      return withheld;
    },
    end,
  };
}
