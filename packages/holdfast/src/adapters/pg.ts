import type { Database, DriverError, Pinned, Purpose, Result, SqlConnection } from "../core/database.ts";
import { NotInTransactionError, UsageError } from "../core/errors.ts";
import { unlessAborted } from "../core/queue.ts";
import { revocable } from "../core/revocable.ts";
import { Single } from "../core/single.ts";
import { sql } from "../core/sql.ts";
import { postgres, render } from "../engines/postgres/index.ts";

/** The part of a `pg` Client that is used here: any version or fork that has it will do. */
export interface PgClient {
  query(text: string, values?: unknown[]): Promise<unknown>;
  on(event: "error" | "end", listener: (error?: Error) => void): unknown;
}

export interface PgPool {
  connect(): Promise<PgClient & { release(error?: Error | boolean): void }>;
  readonly totalCount: number;
}

/** What a Pool checks out, or the Client itself. pg declares `connect` twice, hence the pair. */
export type ClientOf<P> = P extends {
  totalCount: number;
  connect(): Promise<infer C>;
  connect(callback: never): void;
}
  ? C
  : P extends { totalCount: number; connect(): Promise<infer C> }
    ? C
    : P;

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
}

interface Wire {
  connect(portOrPath: number | string, host?: string): void;
  cancel(processID: number, secretKey: number): void;
  once(event: string, listener: () => void): void;
  on(event: string, listener: () => void): void;
  stream?: { destroy(): void };
}

const connections = new WeakMap<PgClient, SqlConnection>();

function connectionOf(client: PgClient, options?: object): SqlConnection {
  const known = connections.get(client);
  if (known) return known;
  const lost = new AbortController();
  // Without a listener an error event of a checked-out client would end the process.
  client.on("error", (error) => lost.abort(error));
  client.on("end", () => lost.abort(new Error("the connection has ended")));
  const connection: SqlConnection = {
    session: client,
    lost: lost.signal,
    unwrap,
    async query(statement) {
      const { text, values } = render(statement);
      return result(
        (await (values.length > 0 ? client.query(text, values) : client.query(text))) as PgResult,
      );
    },
    async script(text) {
      const results = await client.query(text);
      return (Array.isArray(results) ? (results as PgResult[]) : [results as PgResult]).map(result);
    },
    ...(canCancel(client) && { cancel: () => cancel(client, options) }),
  };
  connections.set(client, connection);
  return connection;
}

function result({ rows, rowCount, command }: PgResult): Result {
  return { rows, affected: rowCount ?? 0, command };
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

function isPool(value: unknown): value is PgPool {
  return hasMethods(value, "connect", "query") && "totalCount" in (value as object);
}

function isClient(value: unknown): value is PgClient {
  return hasMethods(value, "query", "on") && !isPool(value);
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

function unwrap(error: unknown): DriverError | undefined {
  if (!(error instanceof Error)) return undefined;
  return lostMessages.test(error.message) ? { lost: true, message: error.message } : undefined;
}

/** A `pg` Pool, or one connected Client (then transactions queue up for it). */
export function fromPg<Client extends PgPool | PgClient>(
  client: Client,
): Database<ClientOf<Client>, SqlConnection> {
  if (!isPool(client) && !isClient(client)) {
    throw new UsageError("fromPg(client): this is neither a Pool nor a Client of the package pg");
  }
  const options = (client as { options?: object }).options;
  const database: Database<PgClient, SqlConnection> = {
    engine: postgres,
    traits: {
      client: "pg",
      cancel: true,
      listen: isPool(client),
      embedded: false,
      single: !isPool(client),
      pinned: true,
    },
    connect: isPool(client) ? (purpose) => checkOut(client, options, purpose) : oneClient(client),
    join(native) {
      if (isClient(native)) return connectionOf(native, options);
      if (isPool(native))
        throw new NotInTransactionError(
          "a Pool runs every statement on another connection; pass the Client that you sent BEGIN on",
        );
      throw new NotInTransactionError("this is no Client of the package pg");
    },
    ...(isPool(client) && {
      listen: (channel, wake, signal) => listen(client as PgPool & Factory, channel, wake, signal),
    }),
    unwrap,
  };
  return database as Database<never, SqlConnection>;
}

/** What a pool makes its clients with. */
interface Factory {
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
async function listen(
  { Client, options }: Factory,
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

async function checkOut(
  pool: PgPool,
  options: object | undefined,
  { signal }: Purpose,
): Promise<Pinned<PgClient, SqlConnection>> {
  const client = await unlessAborted(pool.connect(), signal, (late) => late.release());
  return {
    connection: connectionOf(client, options),
    native: client,
    release: (broken) => client.release(broken === true),
  };
}

function oneClient(client: PgClient): (purpose: Purpose) => Promise<Pinned<PgClient, SqlConnection>> {
  const door = Single.of(client);
  return async (purpose) => {
    const leave = await door.enter(purpose);
    const connection = connectionOf(client);
    const own = revocable(client);
    return {
      connection,
      native: own.proxy,
      async release(broken) {
        own.revoke();
        // There is no other connection to go on with: what this one has begun is undone, and it stays in use.
        if (broken && !connection.lost.aborted) await client.query("ROLLBACK").catch(() => {});
        leave();
      },
    };
  };
}
