/** Settings, servers and schemas that nobody expects: each is served, or refused by its name. */
import { execFile } from "node:child_process";
import { randomBytes } from "node:crypto";
import { DatabaseSync } from "node:sqlite";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { DuckDBInstance } from "@duckdb/node-api";
import { type Holdfast, holdfast, key, once } from "holdfast";
import { fromDuckdb } from "holdfast/duckdb";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { createPool as createMariadbPool } from "mariadb";
import mysql from "mysql2/promise";
import { Client, Pool } from "pg";
import postgres from "postgres";
import { afterEach, describe, expect, test } from "vitest";
import { bundled } from "./harness/bundled.ts";
import { command } from "./harness/command.ts";
import { createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { useAll, useLocks } from "./harness/every-call.ts";
import { mariadbPackage, startMariadb } from "./harness/mariadb.ts";

const ends: (() => unknown)[] = [];

afterEach(async () => {
  for (const end of ends.splice(0).toReversed()) await end();
});

async function database(server: "postgres" | "mariadb" | "mysql"): Promise<string> {
  const { url, drop } = await createDatabase(server);
  ends.push(drop);
  return url;
}

function poolOf(connectionString: string): Pool {
  const pool = new Pool({ connectionString });
  ends.push(() => pool.end());
  return pool;
}

describe("node --frozen-intrinsics", () => {
  const worker = fileURLToPath(new URL("./workers/frozen.ts", import.meta.url));

  test.each([
    ["node:sqlite", undefined],
    ["pg", "postgres"],
    ["postgres.js", "postgres"],
    ["mysql2", "mariadb"],
    ["mysql2", "mysql"],
  ] as const)("%s (%s)", async (client, server) => {
    if (server && unavailable(server) !== undefined) return;
    const url = server ? await database(server) : ":memory:";
    const { stdout } = await promisify(execFile)(process.execPath, [
      "--frozen-intrinsics",
      ...bundled,
      worker,
      client,
      url,
    ]);
    expect(JSON.parse(stdout)).toEqual({
      lock: 1,
      taken: server ? "HF_LOCK_NOT_AVAILABLE" : expect.any(String),
      lease: true,
      once: 2,
      quota: "HF_QUOTA_EXCEEDED",
      stock: 1,
      queue: 7,
    });
  });
});

describe("somebody else's tables have our names", () => {
  const taken = (part: string | RegExp) => ({
    code: "HF_SCHEMA_TAKEN",
    message: expect.stringMatching(part) as string,
  });

  test.each([
    [
      "a table of another shape",
      "CREATE TABLE holdfast.migration (version text)",
      /holdfast\.migration .* "?version|holdfast\.migration/,
    ],
    [
      "the record of another tool",
      "CREATE TABLE holdfast.migration (id int, name text); INSERT INTO holdfast.migration VALUES (1, 'boats')",
      /its row 1 is called "boats"/,
    ],
    [
      "tables that we would make",
      "CREATE TABLE holdfast.lease (boat text)",
      /holds holdfast\.lease, which Holdfast has not made/,
    ],
  ])("PostgreSQL: %s", async (_, text, says) => {
    const url = await database("postgres");
    const pool = poolOf(url);
    await pool.query("DROP SCHEMA IF EXISTS holdfast CASCADE; CREATE SCHEMA holdfast");
    await pool.query(text);
    const hf = holdfast(fromPg(pool));
    await expect(hf.migrate()).rejects.toMatchObject(taken(says));
    const told = await command(["migrate", "--yes", "--url", url]);
    expect(told.code).toBe(2);
    expect(told.err).toMatch(says);
    expect(told.err).toContain("--schema");
    expect(told.err).not.toContain("run holdfast migrate");
    // As it says.
    expect((await command(["migrate", "--yes", "--schema", "mine", "--url", url])).code).toBe(0);
    const elsewhere = holdfast(fromPg(pool), { schema: "mine" });
    expect(await elsewhere.transaction({ lock: key("a") }, async () => 1)).toBe(1);
  });

  test("PostgreSQL: a schema of another role", async () => {
    const url = await database("postgres");
    const pool = poolOf(url);
    const role = `stranger_${randomBytes(6).toString("hex")}`;
    await pool.query(`CREATE ROLE ${role} LOGIN PASSWORD 'pw'`);
    ends.push(async () => {
      const admin = new Client({ connectionString: serverUrl("postgres") });
      await admin.connect();
      await admin.query(`DROP ROLE ${role}`);
      await admin.end();
    });
    await pool.query("DROP SCHEMA IF EXISTS holdfast CASCADE; CREATE SCHEMA holdfast");
    const address = new URL(url);
    [address.username, address.password] = [role, "pw"];
    const says = new RegExp(
      `The schema holdfast belongs to the role \\w+, and ${role} may not make tables in it .*GRANT USAGE, CREATE ON SCHEMA holdfast TO ${role}`,
    );
    await expect(holdfast(fromPg(poolOf(address.href))).migrate()).rejects.toMatchObject(taken(says));
    const told = await command(["migrate", "--yes", "--url", address.href]);
    expect(told.code).toBe(2);
    expect(told.err).toMatch(says);
  });

  const record = "CREATE TABLE holdfast_migration (version varchar(20))";

  test("SQLite", async () => {
    const db = new DatabaseSync(":memory:");
    db.exec(record);
    await expect(holdfast(fromNodeSqlite(db)).migrate()).rejects.toMatchObject(taken("holdfast_migration"));
    db.exec("DROP TABLE holdfast_migration; CREATE TABLE holdfast_migration (id int, name text)");
    db.exec("INSERT INTO holdfast_migration VALUES (1, 'boats')");
    await expect(holdfast(fromNodeSqlite(db)).migrations()).rejects.toMatchObject(taken('called "boats"'));
  });

  test("DuckDB", async () => {
    const instance = await DuckDBInstance.create(":memory:");
    ends.push(() => instance.closeSync());
    const connection = await instance.connect();
    await connection.run(record);
    await expect(holdfast(fromDuckdb(instance)).migrate()).rejects.toMatchObject(taken("holdfast_migration"));
    connection.closeSync();
  });

  test.each(["mariadb", "mysql"] as const)("%s", async (server) => {
    if (unavailable(server) !== undefined) return;
    const pool = mysql.createPool(await database(server));
    ends.push(() => pool.end());
    await pool.query("DROP TABLE IF EXISTS holdfast_migration");
    await pool.query(record);
    await expect(holdfast(fromMysql2(pool)).migrate()).rejects.toMatchObject(taken("holdfast_migration"));
  });
});

describe("settings of a session of PostgreSQL", () => {
  const open = async (set: string): Promise<Record<string, Holdfast<unknown>>> => {
    const url = await database("postgres");
    const [name = "", value = ""] = set.split(" = ");
    const pool = new Pool({ connectionString: url, options: `-c ${name}=${value}` });
    const client = postgres(url, { connection: { [name]: value } });
    ends.push(
      () => pool.end(),
      () => client.end(),
    );
    return { pg: holdfast(fromPg(pool)), postgres: holdfast(fromPostgres(client)) };
  };

  test.each([
    ["array_nulls is off", "array_nulls = off"],
    ["extra_float_digits is -15", "extra_float_digits = -15"],
  ])("refused by name: %s", async (says, set) => {
    const refused = { code: "HF_UNSUPPORTED", message: expect.stringContaining(says) as string };
    for (const hf of Object.values(await open(set))) {
      await expect(hf.transaction({ lock: key("a") }, async () => 1)).rejects.toMatchObject(refused);
      await expect(hf.lease(key("a"))).rejects.toMatchObject(refused);
      await expect(queue<number>(hf, "mail").enqueue(1)).rejects.toMatchObject(refused);
      expect(await hf.capabilities().catch((error: unknown) => error)).toMatchObject(refused);
    }
  });

  test("the doctor names them", async () => {
    const url = `${await database("postgres")}?options=${encodeURIComponent("-c array_nulls=off -c extra_float_digits=-1")}`;
    const { out } = await command(["doctor", "--json", "--only", "session-settings", "--url", url]);
    const { findings } = JSON.parse(out) as { findings: { what: string }[] };
    expect(findings.map(({ what }) => what)).toEqual(["array_nulls is off", "extra_float_digits is -1"]);
  });

  test.each(["plpgsql.extra_errors = all", "extra_float_digits = 0"])("served: %s", async (set) => {
    for (const [client, hf] of Object.entries(await open(set))) {
      await hf.migrate();
      await useLocks(hf, []);
      await useAll(hf, client);
    }
  });
});

test.each(["mariadb", "mysql"] as const)("tables of %s whose engine has no transactions", async (server) => {
  if (unavailable(server) !== undefined) return;
  const pool = mysql.createPool(await database(server));
  ends.push(() => pool.end());
  await holdfast(fromMysql2(pool)).migrate();
  await pool.query("CREATE TABLE plain (id int PRIMARY KEY) ENGINE = MyISAM");
  const refused = (table: string) => ({
    code: "HF_UNSUPPORTED",
    message: expect.stringContaining(`${table} is stored by MyISAM`) as string,
  });
  const hf = holdfast(fromMysql2(pool));
  await expect(hf.transaction((tx) => tx.rows("plain", [1]))).rejects.toMatchObject(refused("plain"));
  expect(await hf.tryLock(key("a"), async () => 1)).toEqual({ acquired: true, value: 1 });
  await pool.query("ALTER TABLE holdfast_lock ENGINE = MyISAM");
  const other = holdfast(fromMysql2(pool));
  await expect(other.transaction({ lock: key("a") }, async () => 1)).rejects.toMatchObject(
    refused("holdfast_lock"),
  );
  // Of another instance's, with names of its own.
  expect(await holdfast(fromMysql2(pool), { schema: "apart" }).migrate()).not.toEqual([]);
});

describe.each(["mariadb", "mysql"] as const)("settings of a session of %s", (server) => {
  const open = async (set: string): Promise<Record<string, Holdfast<unknown>>> => {
    const url = await database(server);
    const address = new URL(url);
    const pool = mysql.createPool(url);
    pool.on("connection", (connection) => void (connection as unknown as mysql.Connection).query(set));
    const connector = createMariadbPool({
      host: address.hostname,
      port: Number(address.port),
      user: decodeURIComponent(address.username),
      password: decodeURIComponent(address.password),
      database: address.pathname.slice(1),
      initSql: set,
      allowPublicKeyRetrieval: true,
    });
    ends.push(
      () => pool.end(),
      () => connector.end(),
    );
    return {
      mysql2: holdfast(fromMysql2(pool)),
      mariadb: holdfast(fromMariadb(connector)),
    };
  };

  test.each([
    ["sql_select_limit is 1", "SET SESSION sql_select_limit = 1"],
    ["sql_select_limit is 0", "SET SESSION sql_select_limit = 0"],
    ["group_concat_max_len is 4", "SET SESSION group_concat_max_len = 4"],
    ["character_set_results is binary", "SET SESSION character_set_results = binary"],
    ["max_join_size is 1", "SET SESSION max_join_size = 1, SESSION sql_big_selects = 0"],
    ["timestamp is set", "SET SESSION timestamp = 1000"],
    ["sql_mode has ORACLE", "SET SESSION sql_mode = 'ORACLE'"],
    ["sql_mode has EMPTY_STRING_IS_NULL", "SET SESSION sql_mode = 'EMPTY_STRING_IS_NULL'"],
    ["sql_mode has SIMULTANEOUS_ASSIGNMENT", "SET SESSION sql_mode = 'SIMULTANEOUS_ASSIGNMENT'"],
  ])("refused by name: %s", async (says, set) => {
    if (unavailable(server) !== undefined || (server === "mysql" && /sql_mode/.test(set))) return;
    const refused = { code: "HF_UNSUPPORTED", message: expect.stringContaining(says) as string };
    for (const hf of Object.values(await open(set))) {
      await expect(hf.migrate()).rejects.toMatchObject(refused);
      await expect(hf.migrations()).rejects.toMatchObject(refused);
      await expect(hf.transaction({ lock: key("a") }, async () => 1)).rejects.toMatchObject(refused);
    }
  });

  test.each([
    "SET SESSION sql_mode = 'TRADITIONAL'",
    "SET SESSION autocommit = 0",
    "SET SESSION completion_type = 'CHAIN'",
    "SET SESSION completion_type = 'RELEASE'",
    "SET SESSION sql_safe_updates = 1",
    "SET SESSION transaction_read_only = 1",
    "SET SESSION sql_auto_is_null = 1, SESSION time_zone = '-11:30', SESSION lc_time_names = 'de_DE', NAMES latin1",
  ])("served: %s", async (set) => {
    if (unavailable(server) !== undefined) return;
    const text = server === "mariadb" ? set.replace("transaction_read_only", "tx_read_only") : set;
    for (const [client, hf] of Object.entries(await open(text))) {
      const name = `${client} ${set}`;
      await hf.migrate();
      expect(await hf.migrate()).toEqual([]);
      // Twice: what the first one leaves behind on a session, the second one finds.
      for (const n of [1, 2]) {
        expect(await hf.transaction(async (tx) => tx.attempt)).toBe(1);
        expect(await hf.transaction({ lock: [key("a"), key(`b${n}`)] }, async (tx) => tx.attempt)).toBe(1);
        expect(await hf.tryLock(key("a"), async () => n)).toEqual({ acquired: true, value: n });
        // Whose row is not there yet.
        expect(await hf.tryLock(key("new", name, n), async () => n)).toEqual({ acquired: true, value: n });
        await (await hf.hold(key("new too", name, n), { wait: "nowait" })).release();
        const held = await hf.hold(key("a"));
        expect(await hf.outside(() => hf.tryLock(key("a"), async () => n))).toEqual({ acquired: false });
        await held.release();
        expect(await once(hf, name, async () => "done")).toMatchObject({ value: "done" });
        const lease = await hf.lease(key("a"), { wait: "nowait" });
        await lease.renew();
        expect(await hf.lease(key("a"), { wait: "skip" })).toBeUndefined();
        await lease.release();
        await stock(hf).increase(name, 2);
        await hf.transaction(() => stock(hf).decrease(name, 1));
        expect(await stock(hf).levels({ skus: [name] })).toMatchObject([{ available: n }]);
        await quota(hf, { name: "uploads", limit: 5 }).consume(name, 1);
        expect(await quota(hf, { name: "uploads", limit: 5 }).peek(name)).toMatchObject({ used: n });
        const hourly = schedule(hf, name, { every: "1 hour" }, async () => {});
        expect(await hourly.runNow()).toMatchObject({ ran: true });
        expect(await hourly.runs()).toHaveLength(n);
      }
    }
  });

  test("served: quotes, padding, signs, and short lists", async () => {
    if (unavailable(server) !== undefined) return;
    const modes =
      "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,NO_UNSIGNED_SUBTRACTION,PAD_CHAR_TO_FULL_LENGTH,HIGH_NOT_PRECEDENCE,IGNORE_SPACE,REAL_AS_FLOAT,ERROR_FOR_DIVISION_BY_ZERO,STRICT_ALL_TABLES";
    const set = `SET SESSION sql_mode = '${modes}', SESSION group_concat_max_len = 1024`;
    for (const [client, hf] of Object.entries(await open(set))) {
      await hf.migrate();
      expect(await hf.migrate()).toEqual([]);
      const names = ["it's", 'say "x"', "C:\\", "a|b"].map((name) => `${name} ${client}`);
      await hf.transaction({ lock: names.map((name) => key("odd", name)) }, async (tx) => {
        await tx.lock(key("odd", "more"));
      });
      const lease = await hf.lease(key("odd", "C:\\"));
      expect((await hf.leases(key("odd", "C:\\"))).map(({ fence }) => fence)).toEqual([lease.fence]);
      await lease.release();
      const shelf = stock(hf);
      for (const name of names) await shelf.increase(name, 2);
      await shelf.apply(names.map((sku) => ({ sku, quantity: -1 })));
      expect((await shelf.levels({ skus: names })).map(({ available }) => available)).toEqual([1, 1, 1, 1]);
    }
  });
});

test("the doctor names the settings, also where migrate is refused, and so does the library", async ({
  skip,
}) => {
  skip(unavailable("mariadb") !== undefined || !mariadbPackage.installed(), "no MariaDB");
  const { url, stop } = await startMariadb([
    "--sql-mode=ORACLE,PAD_CHAR_TO_FULL_LENGTH,NO_UNSIGNED_SUBTRACTION",
    "--group-concat-max-len=4",
    "--log-bin=changes",
    "--binlog-format=STATEMENT",
    "--idle-transaction-timeout=2",
    "--wait-timeout=4",
  ]);
  ends.push(stop);
  const admin = await mysql.createConnection(url);
  await admin.query("CREATE DATABASE odd");
  await admin.query(
    "SET GLOBAL sql_select_limit = 1, GLOBAL sql_safe_updates = 1, GLOBAL tx_read_only = 1, GLOBAL max_join_size = 1",
  );
  await admin.end();
  const here = url.replace(/\/mysql$/, "/odd");
  const { out, err } = await command([
    "doctor",
    "--json",
    "--only",
    "session-settings",
    "short-timeouts",
    "--url",
    here,
  ]);
  expect(err).toBe("");
  const { findings } = JSON.parse(out) as { findings: { what: string }[] };
  expect(findings.map(({ what }) => what).toSorted()).toEqual([
    "binlog_format is STATEMENT",
    "group_concat_max_len is 4",
    "idle_transaction_timeout is 2 s",
    "max_join_size is 1",
    "sql_mode has NO_UNSIGNED_SUBTRACTION",
    "sql_mode has ORACLE",
    "sql_mode has PAD_CHAR_TO_FULL_LENGTH",
    // A part of ORACLE.
    "sql_mode has SIMULTANEOUS_ASSIGNMENT",
    "sql_safe_updates is ON",
    "sql_select_limit is 1",
    "tx_read_only is ON",
    "wait_timeout is 4 s",
  ]);
  const migrate = await command(["migrate", "--yes", "--url", here]);
  expect(migrate.code).toBe(2);
  expect(migrate.err).toMatch(/sql_mode has ORACLE in this session/);
  // All but the one that not every user may change.
  const pool = mysql.createPool(here);
  const plain =
    "SET SESSION sql_mode = '', SESSION sql_select_limit = 18446744073709551615, SESSION group_concat_max_len = 1024, SESSION sql_big_selects = 1";
  pool.on("connection", (connection) => void (connection as unknown as mysql.Connection).query(plain));
  ends.push(() => pool.end());
  const hf = holdfast(fromMysql2(pool));
  await hf.migrate();
  const refused = {
    code: "HF_UNSUPPORTED",
    message: expect.stringContaining("binlog_format is STATEMENT") as string,
  };
  await expect(hf.transaction({ lock: key("a") }, async () => 1)).rejects.toMatchObject(refused);
  await expect(stock(hf).increase("cap", 1)).rejects.toMatchObject(refused);
  await expect(hf.lease(key("a"))).rejects.toMatchObject(refused);
});

describe("messages stay short, however much was asked for", () => {
  const many = Array.from({ length: 50_000 }, (_, i) => key("bulk", i));

  test("50,000 locks on SQLite", async () => {
    const db = new DatabaseSync(":memory:");
    const hf = holdfast(fromNodeSqlite(db));
    db.exec("BEGIN IMMEDIATE");
    const error = await hf.transaction({ lock: many, wait: 10 }, async () => {}).catch((e: Error) => e);
    db.exec("ROLLBACK");
    expect((error as Error).message.length).toBeLessThan(1000);
  });

  test.each(["nowait", 10] as const)("50,000 locks on PostgreSQL, wait %s", async (wait) => {
    const pool = poolOf(await database("postgres"));
    const hf = holdfast(fromPg(pool));
    const error = await hf.transaction({ lock: many[0]! }, () =>
      hf.outside(() =>
        hf.transaction({ lock: many.slice(0, 5000), wait }, async () => {}).catch((e: Error) => e),
      ),
    );
    expect((error as Error).message).toMatch(/(?:bulk:\d+, ){4}bulk:\d+ and 4995 more/);
    expect((error as Error).message.length).toBeLessThan(1000);
  });

  test("an order of 3,000 lines, none of which is there", async () => {
    const hf = holdfast(fromNodeSqlite(new DatabaseSync(":memory:")));
    await hf.migrate();
    const lines = Array.from({ length: 3000 }, (_, i) => ({ sku: `sku-${i}`, quantity: -1 }));
    const error = (await stock(hf)
      .apply(lines)
      .catch((e: Error) => e)) as Error;
    expect(error.message).toMatch(/ and 2995 more/);
    expect(error.message.length).toBeLessThan(1000);
  });
});

describe("a server of another kind answers at the address", () => {
  test.each(["mariadb", "mysql"] as const)("pg, postgres.js and the command at a %s", async (server) => {
    if (unavailable(server) !== undefined) return;
    const { port } = new URL(await database(server));
    const login = { host: "127.0.0.1", port: Number(port), user: "a", password: "hunter2", database: "c" };
    const pool = new Pool(login);
    const sql = postgres(login);
    ends.push(
      () => pool.end(),
      () => sql.end(),
    );
    const says = `${server === "mysql" ? "MySQL" : "MariaDB"} answers at 127.0.0.1:${port}, and this client speaks the protocol of PostgreSQL`;
    for (const hf of [holdfast(fromPg(pool)), holdfast(fromPostgres(sql))] as Holdfast<unknown>[])
      await expect(hf.transaction({ lock: key("a") }, async () => {})).rejects.toMatchObject({
        code: "HF_UNSUPPORTED",
        message: expect.stringContaining(says) as string,
      });
    const told = await command(["locks", "--url", `postgres://a:hunter2@127.0.0.1:${port}/c`]);
    expect(told.code).toBe(2);
    expect(told.err).toContain(says);
    expect(told.err).not.toContain("hunter2");
  });

  test("mysql2, mariadb and the command at a PostgreSQL", async () => {
    const { port } = new URL(await database("postgres"));
    const login = { host: "127.0.0.1", port: Number(port), user: "a", password: "hunter2", database: "c" };
    const pool = mysql.createPool(login);
    const connector = createMariadbPool({ ...login, acquireTimeout: 3000 });
    ends.push(
      () => pool.end(),
      () => connector.end(),
    );
    const says = `PostgreSQL answers at 127.0.0.1:${port}, and this client speaks the protocol of MySQL`;
    const enter = (hf: Holdfast<never>) => hf.transaction({ lock: key("a") }, async () => {});
    await expect(enter(holdfast(fromMysql2(pool)) as unknown as Holdfast<never>)).rejects.toMatchObject({
      code: "HF_UNSUPPORTED",
      message: expect.stringContaining(says) as string,
    });
    await expect(enter(holdfast(fromMariadb(connector)) as unknown as Holdfast<never>)).rejects.toMatchObject(
      {
        code: "HF_NO_CONNECTION",
        message: expect.stringContaining("Is it a PostgreSQL") as string,
      },
    );
    const told = await command(["locks", "--url", `mysql://a:hunter2@127.0.0.1:${port}/c`]);
    expect(told.code).toBe(2);
    expect(told.err).toContain(says);
    expect(told.err).not.toContain("ETIMEDOUT");
    expect(told.err).not.toContain("hunter2");
  });
});
