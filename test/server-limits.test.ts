/** Limits of time that a server has: each is told by its name and its value, and what it has ended is not run again. */
import { once } from "node:events";
import { type AddressInfo, type Socket, createConnection, createServer } from "node:net";
import { createServer as createTlsServer } from "node:tls";
import { type Database, type Holdfast, holdfast, key } from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { fromKnex } from "holdfast/knex";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { drizzle } from "drizzle-orm/node-postgres";
import knex from "knex";
import { createPool as createMariadbPool } from "mariadb";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

const ends: (() => unknown)[] = [];

afterEach(async () => {
  for (const end of ends.splice(0).toReversed()) await end();
});

/** A transaction whose body says nothing until its session is gone. Resolves to what it failed with, and how often the body ran. */
async function silent(
  hf: Holdfast<unknown>,
  after: (send: () => Promise<unknown>, signal: AbortSignal) => Promise<unknown>,
  send: (client: never) => unknown,
): Promise<{ error: { code?: string; message?: string }; runs: number }> {
  let runs = 0;
  const error = await hf
    .transaction({ lock: key("silent"), deadline: 60_000 }, async (tx) => {
      runs++;
      await send(tx.client as never);
      if (!tx.signal.aborted) await once(tx.signal, "abort");
      await after(async () => send(tx.client as never), tx.signal);
    })
    .catch((thrown: Error) => thrown);
  return { error: error as { code?: string; message?: string }, runs };
}

const afterwards = {
  "sends something": (send: () => Promise<unknown>) => send(),
  "sends nothing": async () => {},
  "throws its signal's reason": async (_send: unknown, signal: AbortSignal) => {
    throw signal.reason;
  },
} as const;

describe("postgres", () => {
  const why = unavailable("postgres");
  let database: TestDatabase;

  beforeAll(async () => {
    if (why === undefined) database = await createDatabase("postgres");
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(() => database?.drop());

  const open: Readonly<Record<string, (setting: string, ms: number) => Database>> = {
    pg: (setting, ms) => fromPg(poolOf(setting, ms)),
    drizzle: (setting, ms) => fromDrizzle(drizzle(poolOf(setting, ms))),
    "postgres.js": (setting, ms) => {
      const sql = postgres(database.url, { max: 3, connection: { [setting]: ms } });
      ends.push(() => sql.end({ timeout: 1 }));
      return fromPostgres(sql) as Database;
    },
  };
  const poolOf = (setting: string, ms: number) => {
    const pool = new Pool({ connectionString: database.url, max: 3, options: `-c ${setting}=${ms}` });
    pool.on("error", () => {});
    ends.push(() => pool.end());
    return pool;
  };
  const send: Readonly<Record<string, (client: never) => unknown>> = {
    pg: (client: { query(text: string): unknown }) => client.query("SELECT 1"),
    drizzle: (client: { execute(text: string): unknown }) => client.execute("SELECT 1"),
    "postgres.js": (client: { unsafe(text: string): unknown }) => client.unsafe("SELECT 1"),
  };

  test.each(
    Object.keys(open).flatMap((client) =>
      Object.keys(afterwards).map((then) => [client, then as keyof typeof afterwards] as const),
    ),
  )("idle_in_transaction_session_timeout: %s, a body that %s", async (client, then) => {
    const hf = holdfast(open[client]!("idle_in_transaction_session_timeout", 400));
    const { error, runs } = await silent(hf, afterwards[then], send[client]!);
    expect(error).toMatchObject({
      code: "HF_DEADLINE",
      message: expect.stringContaining("idle_in_transaction_session_timeout is 400ms") as string,
    });
    expect(runs).toBe(1);
  });

  test("transaction_timeout", async ({ skip }) => {
    const hf = holdfast(open["pg"]!("transaction_timeout", 400));
    const { details } = await hf.capabilities();
    skip(details?.["transactionTimeout"] !== true, "this server is older than 17");
    const { error, runs } = await silent(hf, afterwards["sends something"], send["pg"]!);
    expect(error).toMatchObject({
      code: "HF_DEADLINE",
      message: expect.stringContaining("transaction_timeout is 400ms") as string,
    });
    expect(runs).toBe(1);
  });

  test("a session that somebody ended is still no limit: the body runs again", async () => {
    const hf = holdfast(open["postgres.js"]!("idle_in_transaction_session_timeout", 60_000));
    const other = poolOf("lock_timeout", 0);
    const runs = await hf.transaction(async (tx) => {
      if (tx.attempt > 1) return tx.attempt;
      const [row] = (await (tx.client as never as (
        text: TemplateStringsArray,
      ) => Promise<{ pid: number }[]>)`SELECT pg_backend_pid() AS pid`) as { pid: number }[];
      await other.query("SELECT pg_terminate_backend($1)", [row?.pid]);
      if (!tx.signal.aborted) await once(tx.signal, "abort");
      throw tx.signal.reason;
    });
    expect(runs).toBe(2);
  });

  test("postgres.js over TLS: the session of an aborted wait is used again", async () => {
    const proxy = await startTls(Number(new URL(database.url).port));
    ends.push(proxy.close);
    const address = new URL(database.url);
    address.port = String(proxy.port);
    const sql = postgres(address.href, { max: 1, ssl: proxy.ssl as object });
    const other = poolOf("lock_timeout", 0);
    const [hf, holder] = [holdfast(fromPostgres(sql)), holdfast(fromPg(other))];
    ends.push(() => sql.end({ timeout: 1 }));
    const pid = async () => String((await sql`SELECT pg_backend_pid() AS pid`)[0]?.["pid"]);
    const before = await pid();
    await holder.transaction({ lock: key("tls") }, async () => {
      const abort = new AbortController();
      const waiting = hf.transaction(
        { lock: key("tls"), wait: 60_000, signal: abort.signal },
        async () => {},
      );
      const outcome = waiting.catch((error: unknown) => error);
      await eventually(async () => {
        const { rows } = await other.query("SELECT 1 FROM pg_locks WHERE NOT granted AND pid = $1", [before]);
        return rows.length > 0;
      });
      abort.abort(new Error("enough"));
      expect(await outcome).toMatchObject({ message: "enough" });
    });
    // Whoever does not hear of the end of the cancel request throws the session away.
    expect(await pid()).toBe(before);
  });
});

/** Encrypts what goes to a server that need not be able to, by a key that both sides know: no certificates. */
async function startTls(port: number): Promise<{ port: number; ssl: unknown; close(): void }> {
  const psk = Buffer.alloc(16, 7);
  const terms = { ciphers: "PSK-AES128-GCM-SHA256", maxVersion: "TLSv1.2" } as const;
  const sockets = new Set<Socket>();
  const secure = createTlsServer({ pskCallback: () => psk, ...terms }, (client) => {
    const upstream = createConnection(port, "127.0.0.1");
    for (const each of [client, upstream]) each.on("error", () => {});
    upstream.on("close", () => client.destroy());
    client.on("close", () => upstream.destroy());
    client.pipe(upstream).pipe(client);
  });
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    // The question whether it can.
    socket.once("data", () => {
      secure.emit("connection", socket);
      socket.write("S");
    });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    port: (server.address() as AddressInfo).port,
    ssl: { ...terms, pskCallback: () => ({ psk, identity: "test" }), checkServerIdentity: () => undefined },
    close() {
      server.close();
      for (const socket of sockets) socket.destroy();
    },
  };
}

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    await holdfast(open["mysql2"]!("SET @a = 1")).migrate();
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(() => database?.drop());

  const open: Readonly<Record<string, (set: string) => Database>> = {
    mysql2: (set) => {
      const pool = createPool({ uri: database.url, connectionLimit: 3 });
      pool.pool.on("connection", (connection) => void connection.query(set));
      ends.push(() => pool.end());
      return fromMysql2(pool);
    },
    mariadb: (set) => {
      const { hostname: host, port, username, password, pathname } = new URL(database.url);
      const pool = createMariadbPool({
        host,
        port: Number(port),
        user: decodeURIComponent(username),
        password: decodeURIComponent(password),
        database: pathname.slice(1),
        connectionLimit: 3,
        initSql: set,
        allowPublicKeyRetrieval: true,
      });
      ends.push(() => pool.end());
      return fromMariadb(pool);
    },
    Knex: (set) => {
      const db = knex({
        client: "mysql2",
        connection: database.url,
        pool: {
          min: 0,
          max: 3,
          afterCreate: (
            connection: { query(text: string, done: (error: unknown) => void): void },
            done: (error: unknown, connection: unknown) => void,
          ) => connection.query(set, (error) => done(error, connection)),
        },
      });
      ends.push(() => db.destroy());
      return fromKnex(db) as Database;
    },
  };
  const send: Readonly<Record<string, (client: never) => unknown>> = {
    mysql2: (client: { query(text: string): unknown }) => client.query("SELECT * FROM holdfast_migration"),
    mariadb: (client: { query(text: string): unknown }) => client.query("SELECT * FROM holdfast_migration"),
    Knex: (client: { raw(text: string): unknown }) => client.raw("SELECT * FROM holdfast_migration"),
  };

  const cells: readonly (readonly [client: string, setting: string])[] =
    server === "mariadb"
      ? (["mysql2", "mariadb", "Knex"] as const).flatMap((client) => [
          [client, "idle_transaction_timeout"] as const,
          [client, "idle_write_transaction_timeout"] as const,
        ])
      : [["Knex", "wait_timeout"] as const];
  test.each(cells)("%s: %s", async (client, setting) => {
    const hf = holdfast(open[client]!(`SET SESSION ${setting} = 1`));
    const { error, runs } = await silent(hf, afterwards["sends something"], send[client]!);
    expect(error).toMatchObject({
      code: "HF_DEADLINE",
      message: expect.stringContaining(`${setting} is 1 s`) as string,
    });
    expect(runs).toBe(1);
  });
});
