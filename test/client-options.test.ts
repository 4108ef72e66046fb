/** Clients can be told to bring rows as arrays, numbers as text, names in another case: what Holdfast itself asks is not touched. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync, type DatabaseSyncOptions } from "node:sqlite";
import Sqlite from "better-sqlite3";
import { createClient } from "@libsql/client";
import {
  type Database,
  type Holdfast,
  type SqlConnection,
  fenced,
  holdfast,
  key,
  once,
  sql,
  versioned,
} from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromKysely } from "holdfast/kysely";
import { fromLibsql } from "holdfast/libsql";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { execute } from "holdfast/testing";
import { Kysely, MysqlDialect } from "kysely";
import * as mariadb from "mariadb";
import mysql2, { type PoolOptions } from "mysql2";
import { Pool, type PoolConfig } from "pg";
import postgres from "postgres";
import { beforeEach, describe, expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";

type Site = { database: Database<unknown, SqlConnection>; close(): unknown };

/** What a literal may be ended by. */
const nasty = [
  "'",
  '"',
  "\\",
  "\\'",
  "'; DROP TABLE item; -- ",
  "a\\",
  "?",
  ":x",
  "\n\t\0\u001a",
  "it's \\ é ?",
];

/** Every kind of call, and that each has found what it looked for. */
async function exercise({ database, close }: Site): Promise<void> {
  const hf = holdfast(database);
  try {
    await hf.migrate();
    await execute(
      { database },
      sql.raw(
        "CREATE TABLE item (id integer NOT NULL PRIMARY KEY, state varchar(100), version integer NOT NULL)",
      ),
    );
    await hf.transaction(async (tx) => {
      for (const [i, text] of nasty.entries())
        if (!text.includes("\0") || keepsNul(database))
          await tx.query(sql`INSERT INTO item (id, state, version) VALUES (${i}, ${text}, 1)`);
      await tx.query(sql`INSERT INTO item (id, state, version) VALUES (100, 'open', 1)`);
    });

    for (const [i, text] of nasty.entries()) {
      // A name that leaves its literal, where there are literals: here it names a lock, an id and a lease.
      const lock = key("nasty", text);
      await hf.transaction({ lock }, async (tx) => {
        await tx.lock(key("more", text));
      });
      const result = { text, list: [`${text} 😀`, i] };
      if (text.includes("\0")) continue;
      expect(await once(hf, ["nasty", text], async () => result)).toMatchObject({
        replayed: false,
        value: result,
      });
      expect(await once(hf, ["nasty", text], async () => 0)).toMatchObject({ replayed: true, value: result });
      const lease = await hf.lease(lock, { wait: "nowait", holder: `me ${text.replaceAll("\0", "")}` });
      expect(lease.fence).toBeGreaterThan(0);
      expect(await hf.lease(lock, { wait: "skip" })).toBe(undefined);
      expect(await hf.leases(lock)).toMatchObject([{ holder: `me ${text}`, fence: lease.fence }]);
      await hf.transaction((tx) => fenced(tx, lease));
      await lease.renew();
      await lease.release();
      // By key and by condition, with the value itself.
      const found = await hf.transaction((tx) =>
        tx.rows<{ id: number | bigint }>("item", { state: text }, { wait: "nowait" }),
      );
      expect(found.map(({ id }) => Number(id))).toEqual([i]);
    }
    const { quotas, stock: stocks, queues } = await hf.capabilities();
    if (quotas === true && stocks === true && queues === true) await patterns(hf);
    const rows = versioned<{ id: number; state: string; version: number }>(hf, "item");
    await rows.update(100, () => ({ state: "it's \\ ?" }));
    const [row] = await hf.transaction((tx) => tx.rows<{ state: string; version: number }>("item", [100]));
    expect([row?.state, Number(row?.version)]).toEqual(["it's \\ ?", 2]);
    await hf.inspect();
  } finally {
    await hf.close();
    await close();
  }
}

/** Names, ids, documents and flags, there and back. */
async function patterns(hf: Holdfast<unknown>): Promise<void> {
  const [of, shop, jobs] = [quota(hf, { name: "nasty", limit: 5 }), stock(hf), queue(hf, "nasty")];
  for (const each of nasty.filter((some) => !some.includes("\0"))) {
    // What begins with a quote is kept as JSON.
    const text = `n${each}`;
    const metadata = { text, list: [`${text} 😀`, null, true] };
    const use = { id: text, metadata, by: text };
    expect(await of.consume(text, 2, use)).toMatchObject({ used: 2, replayed: false });
    expect(await of.consume(text, 2, use)).toMatchObject({ used: 2, replayed: true });
    await of.refund(text, text, { amount: 1 });
    expect(await of.peek(text)).toMatchObject({ used: 1 });
    expect((await of.history(text)).entries.at(-1)).toMatchObject({ id: text, by: text, metadata });
    expect(await of.reconcile(text)).toMatchObject({ ok: true });

    await shop.increase(text, 3, { note: text });
    await shop.reserve([{ sku: text, quantity: 2 }], { id: text });
    // An id that is taken is found whether the client counts rows that were found or those that were changed.
    expect(await shop.reserve([{ sku: text, quantity: 2 }], { id: text })).toMatchObject({ replayed: true });
    await shop.commit(text);
    expect(await shop.level(text)).toMatchObject({ onHand: 1, reserved: 0 });
    expect((await shop.history({ sku: text })).movements.at(-1)).toMatchObject({ note: text });

    const { id } = await jobs.enqueue(metadata, { key: text, group: text, delayMs: 60_000 });
    expect(await jobs.inspect(id)).toMatchObject({ payload: metadata, key: text, group: text });
    expect(await jobs.enqueue(0, { key: text })).toMatchObject({ id, added: false });
    expect(await jobs.discard(id)).toBe(1);
  }
  await jobs.pause();
  await jobs.pause();
  expect(await jobs.counts()).toMatchObject({ paused: true, waiting: 0, delayed: 0 });
}

/** libSQL reads text up to its first NUL, and PostgreSQL has none. */
function keepsNul({ traits, engine }: Site["database"]): boolean {
  return engine.name !== "postgres" && traits.client !== "@libsql/client";
}

async function on(server: "postgres" | "mysql" | "mariadb", open: (url: string) => Site): Promise<void> {
  const database = await createDatabase(server);
  try {
    await exercise(open(database.url));
  } finally {
    await database.drop();
  }
}

const cast = (field: { type: string; string(): string | null }) => ({ cast: field.string() }) as never;

describe.each(["mysql", "mariadb"] as const)("%s", (server) => {
  const mode = { modes: "SET SESSION sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,STRICT_TRANS_TABLES'" };
  const options: Record<string, PoolOptions & { modes?: string }> = {
    none: {},
    NO_BACKSLASH_ESCAPES: mode,
    rowsAsArray: { rowsAsArray: true },
    nestTables: { nestTables: true },
    "nestTables with a separator": { nestTables: "_" },
    typeCast: { typeCast: cast },
    namedPlaceholders: { namedPlaceholders: true },
    "numbers and dates as text": { dateStrings: true, supportBigNumbers: true, bigNumberStrings: true },
    decimalNumbers: { decimalNumbers: true, jsonStrings: true, stringifyObjects: true },
    "several statements, without FOUND_ROWS": { multipleStatements: true, flags: ["-FOUND_ROWS"] },
    latin1: { charset: "latin1_swedish_ci" },
  };
  const why = unavailable(server);
  beforeEach(({ skip }) => skip(why !== undefined, why));

  function pooled(url: string, { modes, ...rest }: PoolOptions & { modes?: string }): mysql2.Pool {
    const pool = mysql2.createPool({ uri: url, connectionLimit: 6, ...rest });
    if (modes) pool.on("connection", (connection: mysql2.Connection) => void connection.query(modes));
    return pool;
  }

  test.each(Object.keys(options))("mysql2: %s", async (name) => {
    await on(server, (url) => {
      const pool = pooled(url, options[name] as PoolOptions);
      return { database: fromMysql2(pool as never), close: () => pool.promise().end() };
    });
  });

  test.each(["none", "NO_BACKSLASH_ESCAPES"])("Kysely: %s", async (name) => {
    await on(server, (url) => {
      const db = new Kysely({
        dialect: new MysqlDialect({ pool: pooled(url, options[name] as PoolOptions) }),
      });
      return { database: fromKysely(db as never), close: () => db.destroy() };
    });
  });

  const others: Record<string, mariadb.PoolConfig> = {
    NO_BACKSLASH_ESCAPES: { initSql: mode.modes },
    rowsAsArray: { rowsAsArray: true, metaAsArray: true },
    nestTables: { nestTables: true },
    typeCast: { typeCast: cast as never },
    namedPlaceholders: { namedPlaceholders: true },
    "numbers and dates as text": { dateStrings: true, supportBigNumbers: true, bigNumberStrings: true },
    numbers: { bigIntAsNumber: true, decimalAsNumber: true, insertIdAsNumber: true },
  };
  test.each(Object.keys(others))("mariadb: %s", async (name) => {
    await on(server, (url) => {
      const { hostname, port, username, password, pathname } = new URL(url);
      const pool = mariadb.createPool({
        host: hostname,
        port: Number(port),
        user: decodeURIComponent(username),
        password: decodeURIComponent(password),
        database: pathname.slice(1),
        connectionLimit: 6,
        allowPublicKeyRetrieval: true,
        ...others[name],
      });
      return { database: fromMariadb(pool as never), close: () => pool.end() };
    });
  });

  test("a snapshot that is older than the lock is found whatever rows look like", async () => {
    const database = await createDatabase(server);
    const pool = mysql2.createPool({ uri: database.url, rowsAsArray: true }).promise();
    const hf = holdfast(fromMysql2(pool));
    try {
      await hf.migrate();
      await hf.transaction({ lock: key("fresh") }, async () => {});
      const own = await pool.getConnection();
      await own.query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ");
      await own.query("START TRANSACTION");
      await own.query("SELECT count(*) FROM holdfast_lock");
      await hf.transaction({ lock: key("fresh") }, async () => {});
      await expect(hf.join(own).lock(key("fresh"))).rejects.toMatchObject({ code: "HF_SERIALIZATION" });
      await own.query("ROLLBACK");
      own.release();
    } finally {
      await hf.close();
      await pool.end();
      await database.drop();
    }
  });

  test("what cannot be worked with is refused by its name", async () => {
    const database = await createDatabase(server);
    const pool = mysql2.createPool({ uri: database.url, queryFormat: (text: string) => text } as PoolOptions);
    await expect(holdfast(fromMysql2(pool as never)).capabilities()).rejects.toThrow(/queryFormat/);
    await pool.promise().end();
    const db = new Kysely({
      dialect: new MysqlDialect({ pool: pooled(database.url, { rowsAsArray: true }) }),
    });
    await expect(holdfast(fromKysely(db as never)).capabilities()).rejects.toThrow(/rowsAsArray/);
    await db.destroy();
    await database.drop();
  });
});

describe("postgres", () => {
  const why = unavailable("postgres");
  beforeEach(({ skip }) => skip(why !== undefined, why));
  const wrapped = { getTypeParser: () => (text: unknown) => text };
  const options: Record<string, PoolConfig> = {
    none: {},
    "everything as text": { types: wrapped },
    "standard_conforming_strings off": {
      options: "-c standard_conforming_strings=off -c backslash_quote=on",
    },
    "another style of dates and numbers": {
      options:
        "-c datestyle=SQL,DMY -c intervalstyle=sql_standard -c bytea_output=escape -c extra_float_digits=0 -c timezone=Asia/Kathmandu",
    },
  };

  /** And what is kept on PostgreSQL alone. */
  async function patterns({ database, close }: Site): Promise<void> {
    const hf = holdfast(database);
    try {
      const uploads = quota(hf, { name: "uploads", limit: 3, per: "1 day" });
      expect(await uploads.consume("it's", 2, { id: "a\\" })).toMatchObject({ granted: true });
      expect(await uploads.tryConsume("it's", 2)).toMatchObject({ granted: false });
    } finally {
      await hf.close();
      await close();
    }
  }

  test.each(Object.keys(options))("pg: %s", async (name) => {
    const database = await createDatabase("postgres");
    const open = () => {
      const pool = new Pool({ connectionString: database.url, ...options[name] });
      return { database: fromPg(pool), close: () => pool.end() } as unknown as Site;
    };
    await exercise(open());
    await patterns(open());
    await database.drop();
  });

  const others: Record<string, postgres.Options<never>> = {
    camel: { transform: postgres.camel },
    "camel, also undefined": { transform: { ...postgres.camel, undefined: null } },
    bigint: { types: { bigint: postgres.BigInt } as never },
    "without prepared statements": { prepare: false, fetch_types: false },
  };
  test.each(Object.keys(others))("postgres.js: %s", async (name) => {
    const database = await createDatabase("postgres");
    const open = () => {
      const client = postgres(database.url, { max: 6, onnotice: () => {}, ...others[name] } as never);
      return { database: fromPostgres(client as never), close: () => client.end() } as unknown as Site;
    };
    await exercise(open());
    await patterns(open());
    await database.drop();
  });

  test("postgres.js: names and rows that cannot be read are refused", async () => {
    const database = await createDatabase("postgres");
    for (const transform of [postgres.pascal, { row: { from: (row: object) => ({ row }) } }]) {
      const client = postgres(database.url, { transform: transform });
      await expect(holdfast(fromPostgres(client)).capabilities()).rejects.toMatchObject({
        code: "HF_UNSUPPORTED",
      });
      await client.end();
    }
    await database.drop();
  });
});

describe("SQLite", () => {
  async function file(open: (path: string) => Site): Promise<void> {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-options-"));
    await exercise(open(join(folder, "test.db")));
    await rm(folder, { recursive: true, force: true });
  }

  test.each([{}, { returnArrays: true }, { readBigInts: true }] as DatabaseSyncOptions[])(
    "node:sqlite: %o",
    (options) =>
      file((path) => ({
        database: fromNodeSqlite(() => new DatabaseSync(path, options)),
        close: () => {},
      })),
  );

  test.each([false, true])("better-sqlite3: whole numbers as bigint: %o", (safe) =>
    file((path) => ({
      database: fromBetterSqlite3(() => new Sqlite(path).defaultSafeIntegers(safe)),
      close: () => {},
    })),
  );

  test.each(["number", "bigint", "string"] as const)("libsql: intMode %s", (intMode) =>
    file((path) => {
      const client = createClient({ url: `file:${path}`, intMode });
      return { database: fromLibsql(client), close: () => client.close() };
    }),
  );
});
