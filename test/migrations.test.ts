/**
 * Databases that an older version has migrated. `schema/<version>` keeps what that version printed, and the calls that
 * its processes made: they run on while a newer one migrates.
 */
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { DatabaseSync } from "node:sqlite";
import { fileURLToPath } from "node:url";
import { DuckDBInstance } from "@duckdb/node-api";
import { type Holdfast, fenced, holdfast, key } from "holdfast";
import { fromDuckdb } from "holdfast/duckdb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { type Pool as MysqlPool, type RowDataPacket, createPool } from "mysql2/promise";
import { Pool } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { statements } from "./harness/mysql-text.ts";
import { eventually } from "./harness/wait.ts";

const folder = fileURLToPath(new URL("schema/", import.meta.url));
const versions = readdirSync(folder).toSorted();

const kept = (version: string, file: string) => readFileSync(`${folder}${version}/${file}`, "utf8");

/** `-- holdfast 3: leases` and what follows it, without routines. */
function tablesOf(sql: string): Map<string, string> {
  const parts = sql.split(/^(?=-- holdfast )/m).filter((part) => /^-- holdfast \d+: /.test(part));
  return new Map(
    parts.map((part) => {
      const [title = "", ...lines] = part.trimEnd().split("\n");
      const text = `${lines.join("\n")}\n`
        .replaceAll(/^CREATE OR REPLACE FUNCTION [^]*?\$function\$;\n/gm, "")
        .replaceAll(/^CREATE OR REPLACE VIEW [^;]*;\n/gm, "")
        .replaceAll(/^DELIMITER \/\/\n[^]*?^DELIMITER ;\n/gm, "");
      return [title, text];
    }),
  );
}

describe.each(versions)("what %s has released", (version) => {
  const pool = new Pool();
  const mysqlPool = createPool({});
  let duckdb: DuckDBInstance;
  const instances = new Map<string, () => Holdfast<never>>([
    ["postgres", () => holdfast(fromPg(pool)) as unknown as Holdfast<never>],
    ["mysql", () => holdfast(fromMysql2(mysqlPool)) as unknown as Holdfast<never>],
    ["sqlite", () => holdfast(fromNodeSqlite(() => new DatabaseSync(":memory:"))) as Holdfast<never>],
    ["duckdb", () => holdfast(fromDuckdb(duckdb)) as unknown as Holdfast<never>],
  ]);

  beforeAll(async () => {
    duckdb = await DuckDBInstance.create(":memory:");
  });

  afterAll(async () => {
    await pool.end();
    await mysqlPool.end();
    duckdb.closeSync();
  });

  test.each([...instances.keys()].filter((name) => existsSync(`${folder}${version}/${name}.sql`)))(
    "is not edited: a change of %s tables is another migration",
    (name) => {
      const released = tablesOf(kept(version, `${name}.sql`));
      const today = tablesOf(instances.get(name)?.().migrationSql({ only: "tables" }) ?? "");
      expect(released.size).toBeGreaterThan(2);
      for (const [title, text] of released) expect([title, today.get(title)]).toEqual([title, text]);
    },
  );

  test("tables come by numbers, routines do not", () => {
    for (const [engine, instance] of instances) {
      const tables = instance().migrationSql({ only: "tables" });
      expect(tables).not.toMatch(/CREATE (OR REPLACE )?(FUNCTION|PROCEDURE|TRIGGER)/);
      // PostgreSQL writes down which text a view was made of; elsewhere they have numbers, as tables do.
      if (engine === "postgres") expect(tables).not.toMatch(/\bVIEW\b/);
      else expect(tables.match(/\bVIEW\b/g)).toHaveLength(2);
    }
  });
});

const missingPostgres = unavailable("postgres");

describe.each(versions)("PostgreSQL migrated by %s", (version) => {
  let old: TestDatabase;
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<unknown>;

  beforeEach(async ({ skip }) => {
    skip(missingPostgres !== undefined, missingPostgres);
    [old, database] = await Promise.all([createDatabase("postgres"), createDatabase("postgres")]);
    pool = new Pool({ connectionString: database.url, max: 6 });
    hf = holdfast(fromPg(pool));
    await pool.query(kept(version, "postgres.sql"));
  });

  afterEach(async () => {
    if (missingPostgres !== undefined) return;
    await hf.close();
    await pool.end();
    await Promise.all([old.drop(), database.drop()]);
  });

  interface Signature {
    readonly name: string;
    readonly takes: string;
    readonly returns: string;
  }

  const signatures = async () =>
    (
      await pool.query<Signature>(`SELECT p.proname AS name, pg_get_function_arguments(p.oid) AS takes,
  pg_get_function_result(p.oid) AS returns FROM pg_proc p WHERE p.pronamespace = 'holdfast'::regnamespace
UNION ALL SELECT c.relname, '', (SELECT string_agg(a.attname || ' ' || a.atttypid::regtype, ',' ORDER BY a.attnum)
  FROM pg_attribute a WHERE a.attrelid = c.oid) FROM pg_class c
  WHERE c.relnamespace = 'holdfast'::regnamespace AND c.relkind = 'v' ORDER BY 1`)
    ).rows;

  test("functions that have changed since are replaced, and those that are gone come back", async () => {
    // An older text of it: whoever comes is late, for ever.
    await pool.query(`CREATE OR REPLACE FUNCTION holdfast.quota_late(rule jsonb, moment timestamptz) RETURNS boolean
      LANGUAGE sql IMMUTABLE AS 'SELECT true'`);
    await pool.query("DROP FUNCTION holdfast.queue_pause");
    const before = await hf.migrations();
    expect(before).toContainEqual({ kind: "routine", name: "holdfast.quota_late", state: "outdated" });
    expect(before).toContainEqual({ kind: "routine", name: "holdfast.queue_pause", state: "missing" });
    const done = await hf.migrate();
    expect(done).toContainEqual({ kind: "routine", name: "holdfast.quota_late", was: "outdated" });
    expect(done).toContainEqual({ kind: "routine", name: "holdfast.queue_pause", was: "missing" });
    expect(new Set((await hf.migrations()).map(({ state }) => state))).toEqual(new Set(["applied"]));
    expect(await hf.migrate()).toEqual([]);

    const daily = quota(hf, { name: "daily", limit: 2, per: "1 day" });
    const answers = await Promise.all([1, 2, 3, 4].map(() => daily.tryConsume("ada")));
    expect(answers.filter(({ granted }) => granted)).toHaveLength(2);
    await queue(hf, "emails").pause();
  });

  test("one whose record is that of another text is made again", async () => {
    await hf.migrate();
    await pool.query("UPDATE holdfast.routine SET checksum = 'of before' WHERE name = 'holdfast.quota_late'");
    expect(await hf.migrate()).toEqual([{ kind: "routine", name: "holdfast.quota_late", was: "outdated" }]);
  });

  test("no name has another signature: a changed one is another name", async () => {
    const before = await signatures();
    expect(before.length).toBeGreaterThan(40);
    await hf.migrate();
    const after = await signatures();
    const names = after.map(({ name }) => name);
    expect(names.filter((name, i) => names.indexOf(name) !== i)).toEqual([]);
    expect(after.filter(({ name }) => before.some((each) => each.name === name))).toEqual(before);
  });

  test("a change of routines has another revision than what was released", async () => {
    const revision = async () =>
      (await pool.query("SELECT max(revision) AS newest FROM holdfast.routine")).rows[0].newest as number;
    const table = await pool.query("SELECT to_regclass('holdfast.routine') IS NOT NULL AS there");
    const released = table.rows[0].there ? await revision() : 0;
    const remade = (await hf.migrate()).filter(({ kind }) => kind === "routine");
    if (remade.length > 0) expect(await revision()).toBeGreaterThan(released);
  });

  test("what a newer version has made is left alone", async () => {
    await hf.migrate();
    await pool.query(`CREATE OR REPLACE FUNCTION holdfast.quota_late(rule jsonb, moment timestamptz) RETURNS boolean
      LANGUAGE sql IMMUTABLE AS 'SELECT NULL::boolean'`);
    await pool.query(
      "UPDATE holdfast.routine SET checksum = 'of tomorrow', revision = 1000 WHERE name = 'holdfast.quota_late'",
    );
    await pool.query(
      "CREATE FUNCTION holdfast.of_tomorrow() RETURNS int LANGUAGE sql AS 'SELECT 1'; INSERT INTO holdfast.routine VALUES ('holdfast.of_tomorrow', '1', 1000)",
    );
    expect(await hf.migrate()).toEqual([]);
    const odd = (await hf.migrations()).filter(({ state }) => state !== "applied");
    expect(odd.map(({ name, state }) => `${name} ${state}`).toSorted()).toEqual([
      "holdfast.of_tomorrow unknown",
      "holdfast.quota_late unknown",
    ]);
    const { rows } = await pool.query("SELECT prosrc FROM pg_proc WHERE proname = 'quota_late'");
    expect(rows).toEqual([{ prosrc: "SELECT NULL::boolean" }]);
  });

  interface Call {
    readonly text: string;
    readonly values: readonly unknown[];
  }

  const calls = JSON.parse(kept(version, "postgres-calls.json")) as Call[];

  /** Times and what holds them are not the same twice. */
  function steady(value: unknown): unknown {
    if (value instanceof Date) return "a time";
    if (Array.isArray(value)) return value.map(steady);
    if (typeof value === "object" && value !== null)
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, steady(each)]));
    if (typeof value !== "number" && typeof value !== "string") return value;
    return String(value)
      .replaceAll(/[0-9a-f]{8}-[0-9a-f-]{27}(\/\d+)?/g, "an id")
      .replaceAll(/\d{12,}(\.\d+)?/g, "a time");
  }

  async function replay(on: Pool): Promise<unknown[]> {
    const client = await on.connect();
    try {
      const answers: unknown[] = [];
      for (const { text, values } of calls)
        answers.push(steady((await client.query(text, [...values])).rows));
      return answers;
    } finally {
      client.release();
    }
  }

  test("its processes go on as before while a newer one has migrated", async () => {
    const before = new Pool({ connectionString: old.url, max: 1 });
    try {
      await before.query(kept(version, "postgres.sql"));
      const expected = await replay(before);
      expect(expected.length).toBeGreaterThan(30);
      await hf.migrate();
      const answers = await replay(pool);
      for (const [i, answer] of answers.entries())
        expect({ call: calls[i]?.text, answer }).toEqual({ call: calls[i]?.text, answer: expected[i] });
    } finally {
      await before.end();
    }
  });

  test("calls that are made while it is migrated find one text or the other", async () => {
    const call = calls.find(({ text }) => text.includes("holdfast.quota_use("));
    let over = false;
    const calling = [1, 2, 3].map(async (who) => {
      const values = [...(call?.values ?? [])];
      values[values.indexOf("ada")] = `caller ${who}`;
      for (let n = 0; !over || n < 20; n++) await pool.query(call?.text ?? "", values);
    });
    await eventually(async () => {
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM holdfast.quota_bucket");
      expect(rows[0].n).toBe(3);
    });
    await hf.migrate();
    over = true;
    await Promise.all(calling);
  });

  test("patterns go on with what is there", async () => {
    await replay(pool);
    const { rows } = await pool.query(
      "SELECT used FROM holdfast.quota_bucket WHERE quota = 'uploads' AND subject = 'ada1'",
    );
    expect(rows).toEqual([{ used: "1" }]);
    await hf.migrate();
    const uploads = quota(hf, { name: "uploads", limit: 10 });
    const answers = await Promise.all(
      Array.from({ length: 20 }, (_, i) => uploads.tryConsume("ada1", 1, { id: `n${i}` })),
    );
    expect(answers.filter(({ granted }) => granted)).toHaveLength(9);
    // An id of before is known.
    expect(await uploads.tryConsume("ada1", 1, { id: "c1" })).toMatchObject({ granted: true });
    expect(await uploads.peek("ada1")).toMatchObject({ used: 10 });
    expect(await uploads.reconcile("ada1")).toMatchObject({ ok: true });

    const shelf = stock(hf);
    const { onHand } = await shelf.level("CAP");
    await shelf.decrease("CAP", 1, { externalId: "new" });
    expect(await shelf.level("CAP")).toMatchObject({ onHand: onHand - 1 });

    const emails = queue<{ n: number }>(hf, "emails");
    await emails.enqueue({ n: 5 });
    const seen: number[] = [];
    const worker = emails.work(async (job) => void seen.push(job.payload.n));
    await eventually(async () => expect(seen).toContain(5));
    await worker.stop();

    const report = schedule(hf, "another report", { every: "1 hour" }, async () => {});
    expect(await report.runNow()).toMatchObject({ ran: true });
    await report.stop();

    const lease = await hf.lease(key("lease", "1"));
    await hf.transaction((tx) => fenced(tx, lease));
    await lease.release();
    // 2 was given by the old version.
    expect(lease.fence).toBeGreaterThan(2);
  });

  test("a process that is newer than the database is told so", async () => {
    const uploads = quota(hf, { name: "uploads", limit: 10 });
    await pool.query("DROP FUNCTION holdfast.quota_use");
    await expect(uploads.consume("ada")).rejects.toMatchObject({
      code: "HF_SCHEMA_MISSING",
      message: expect.stringContaining("older version of Holdfast"),
    });
    await pool.query("ALTER TABLE holdfast.quota_line DROP COLUMN held CASCADE");
    await expect(uploads.history("ada")).rejects.toMatchObject({ code: "HF_SCHEMA_MISSING" });
  });
});

describe.each(["mysql", "mariadb"] as const)("%s", (server) => {
  const why = unavailable(server);

  describe.each(versions)("migrated by %s", (version) => {
    let database: TestDatabase;
    let pool: MysqlPool;
    let hf: Holdfast<unknown>;

    beforeEach(async ({ skip }) => {
      skip(why !== undefined, why);
      database = await createDatabase(server);
      pool = createPool({ uri: database.url, connectionLimit: 6 });
      hf = holdfast(fromMysql2(pool));
      for (const statement of statements(kept(version, "mysql.sql"))) await pool.query(statement);
    });

    afterEach(async () => {
      if (why !== undefined) return;
      await hf.close();
      await pool.end();
      await database.drop();
    });

    const procedures = async () =>
      (
        await pool.query<RowDataPacket[]>(
          "SELECT routine_name AS name, SHA2(routine_definition, 256) AS text FROM information_schema.routines WHERE routine_schema = DATABASE() ORDER BY 1",
        )
      )[0];

    test("procedures come beside those of before, which stay as they are", async () => {
      const before = await procedures();
      const routines = async () => (await hf.migrations()).filter(({ kind }) => kind === "routine");
      const stale = (await routines()).filter(({ state }) => state !== "applied");
      const done = await hf.migrate();
      expect(done.filter(({ kind }) => kind === "routine")).toEqual(
        stale.map(({ name, state }) => ({ kind: "routine", name, was: state })),
      );
      expect(new Set((await hf.migrations()).map(({ state }) => state))).toEqual(new Set(["applied"]));
      expect(await hf.migrate()).toEqual([]);
      expect(await procedures()).toEqual(expect.arrayContaining(before));
    });

    /** As it was called in that version. */
    const nameOf = async (procedure: string) =>
      String((await procedures()).find(({ name }) => String(name).startsWith(procedure))?.["name"]);

    test("an older text of a procedure is not what is called", async () => {
      await pool.query(`DROP PROCEDURE ${await nameOf("holdfast_take_lease")}`);
      await pool.query(
        "CREATE PROCEDURE holdfast_take_lease(a blob, b text, c text, d text, e text, f int, g int, h bigint, i bigint) SELECT NULL AS fence, 0 AS free, 0 AS line",
      );
      await hf.migrate();
      await (await hf.lease(key("replaced"))).release();
    });

    test("its processes go on as before, and exclude those of today", async () => {
      const [taking, releasing] = [
        await nameOf("holdfast_take_lease"),
        await nameOf("holdfast_release_lease"),
      ];
      /** As its processes call it. */
      const take = async (resource: string, token: string) => {
        const [rows] = await pool.query<RowDataPacket[][]>(
          `CALL ${taking}(?, 'job', 'exclusive', ?, 'host:1', 1073741824, 1073741824, 600000000, 3000000)`,
          [Buffer.from(resource), token],
        );
        return rows[0]?.[0]?.["fence"] as string | null;
      };
      await hf.migrate();
      const mine = await hf.lease(key("job", 1));
      const [rows] = await pool.query<RowDataPacket[]>("SELECT resource FROM holdfast_lease");
      const resource = String(rows[0]?.["resource"]);
      expect(await take(resource, "theirs")).toBe(null);
      await mine.release();
      const fence = await take(resource, "theirs");
      expect(Number(fence)).toBeGreaterThan(mine.fence);
      expect(await hf.lease(key("job", 1), { wait: "skip" })).toBe(undefined);
      await pool.query(`CALL ${releasing}(?, 'theirs', 0)`, [Buffer.from(resource)]);
      await (await hf.lease(key("job", 1))).release();
    });

    test("transactions with locks run while it is migrated", async () => {
      await pool.query("CREATE TABLE tally (n int NOT NULL) ENGINE=InnoDB");
      await pool.query("INSERT INTO tally VALUES (0)");
      const [beginning, committing] = [await nameOf("holdfast_begin"), await nameOf("holdfast_commit")];
      const connection = await pool.getConnection();
      // As its processes do it.
      const id = Buffer.from(`${version} job`);
      await pool.query("INSERT INTO holdfast_lock (id, name) VALUES (?, 'job')", [id]);
      let over = false;
      let count = 0;
      const older = (async () => {
        while (!over || count < 20) {
          await connection.query(`CALL ${beginning}(?)`, [id]);
          await connection.query("UPDATE tally SET n = n + 1");
          await connection.query(`CALL ${committing}()`);
          count++;
        }
      })();
      try {
        await eventually(async () => expect(count).toBeGreaterThan(0));
        await hf.migrate();
        await hf.transaction({ lock: key("new") }, async () => {});
      } finally {
        over = true;
        await older;
        connection.release();
      }
      const [tally] = await pool.query<RowDataPacket[]>("SELECT n FROM tally");
      expect(tally).toEqual([{ n: count }]);
    });

    test("a process that is newer than the database is told so", async ({ skip }) => {
      const states = (await hf.migrations()).map(({ state }) => state);
      skip(!states.includes("outdated"), "its procedures are those of today");
      await expect(hf.transaction({ lock: key("new") }, async () => {})).rejects.toMatchObject({
        code: "HF_SCHEMA_MISSING",
        message: expect.stringContaining("older version of Holdfast"),
      });
      await expect(hf.lease(key("new"))).rejects.toMatchObject({ code: "HF_SCHEMA_MISSING" });
    });
  });
});

describe("limits of time that are too low for DDL", () => {
  test("PostgreSQL: the library and the command raise them for their own transaction", async ({ skip }) => {
    const why = unavailable("postgres");
    skip(why !== undefined, why);
    const database = await createDatabase("postgres");
    const admin = new Pool({ connectionString: database.url });
    const url = new URL(database.url);
    url.searchParams.set("options", "-c statement_timeout=2000 -c transaction_timeout=2000");
    const pool = new Pool({ connectionString: url.href, max: 1 });
    const hf = holdfast(fromPg(pool));
    try {
      await holdfast(fromPg(admin)).migrate();
      await admin.query("DROP FUNCTION holdfast.key");
      const holder = await admin.connect();
      await holder.query("BEGIN");
      await holder.query("LOCK TABLE holdfast.migration IN ROW EXCLUSIVE MODE");
      const both = Promise.all([hf.migrate(), command(["migrate", "--yes", "--url", url.href])]);
      both.catch(() => {});
      try {
        await eventually(async () => {
          const { rows } = await admin.query(
            "SELECT count(*)::int AS n FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.datname = current_database() AND l.waitstart < clock_timestamp() - interval '3 s'",
          );
          expect(rows).toEqual([{ n: 2 }]);
        });
      } finally {
        await holder.query("ROLLBACK");
        holder.release();
      }
      const [applied, { code, err }] = await both;
      expect(code, err).toBe(0);
      expect([0, 1]).toContain(applied.length);
      expect(new Set((await hf.migrations()).map(({ state }) => state))).toEqual(new Set(["applied"]));
      const { rows } = await pool.query(
        "SELECT current_setting('statement_timeout') AS s, current_setting('transaction_timeout') AS t, current_setting('lock_timeout') AS l",
      );
      expect(rows).toEqual([{ s: "2s", t: "2s", l: "0" }]);
    } finally {
      await hf.close();
      await pool.end();
      await admin.end();
      await database.drop();
    }
  });

  test.each(["mysql", "mariadb"] as const)("%s: they are raised, and set back", async (server) => {
    const why = unavailable(server);
    if (why !== undefined) return;
    const database = await createDatabase(server);
    const admin = createPool({ uri: database.url, connectionLimit: 4 });
    const pool = createPool({ uri: database.url, connectionLimit: 1 });
    const hf = holdfast(fromMysql2(pool));
    const statement = server === "mysql" ? "max_execution_time" : "max_statement_time";
    const limits = `@@SESSION.lock_wait_timeout AS metadata, @@SESSION.innodb_lock_wait_timeout AS row_lock, @@SESSION.${statement} + 0 AS statement`;
    try {
      await holdfast(fromMysql2(admin)).migrate();
      await admin.query("DELETE FROM holdfast_migration WHERE id = 2");
      await admin.query("ALTER TABLE holdfast_lock DROP COLUMN holder, DROP COLUMN since");
      const migrating = await admin.getConnection();
      const reading = await admin.getConnection();
      await migrating.query(
        "DO GET_LOCK(CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':migrate'), 256), 40)), 0)",
      );
      await reading.query("BEGIN");
      await reading.query("SELECT COUNT(*) FROM holdfast_lock");
      // What the instance asks first is not limited.
      await hf.capabilities();
      await pool.query(
        `SET SESSION lock_wait_timeout = 1, SESSION innodb_lock_wait_timeout = 1, SESSION ${statement} = ${server === "mysql" ? 1000 : 1}`,
      );
      const [before] = await pool.query<RowDataPacket[]>(`SELECT ${limits}`);
      const migrated = hf.migrate();
      migrated.catch(() => {});
      const waits = (state: string) =>
        eventually(async () => {
          const [rows] = await admin.query<RowDataPacket[]>(
            "SELECT COUNT(*) AS n FROM /*M! information_schema. *//*!80022 performance_schema. */ processlist WHERE db = DATABASE() AND time >= 3 AND state = ?",
            [state],
          );
          expect(rows).toEqual([{ n: 1 }]);
        });
      try {
        await waits("User lock");
        migrating.destroy();
        await waits("Waiting for table metadata lock");
      } finally {
        migrating.destroy();
        reading.destroy();
      }
      expect(await migrated).toMatchObject([{ kind: "migration", id: 2 }]);
      expect((await pool.query<RowDataPacket[]>(`SELECT ${limits}`))[0]).toEqual(before);
    } finally {
      await hf.close();
      await pool.end();
      await admin.end();
      await database.drop();
    }
  });
});
