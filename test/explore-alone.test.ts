/** A statement outside of any transaction is one by itself, and others can come before its COMMIT. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import Sqlite from "better-sqlite3";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { type Scenario, explore, inThread } from "holdfast/testing";
import { type Pool as MysqlPool, type ResultSetHeader, type RowDataPacket, createPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

const guarded =
  "INSERT INTO seat (event) SELECT 1 FROM (SELECT count(*) AS n FROM seat WHERE event = 1) taken WHERE taken.n < 1";

describe.each(["postgres", "postgresOld"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let sql: postgres.Sql;
  const notices: unknown[] = [];

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 6 });
    sql = postgres(database.url, { max: 4, onnotice: (notice) => notices.push(notice) });
    await pool.query(`
      CREATE TABLE seat (id serial PRIMARY KEY, event int NOT NULL);
      CREATE TABLE job (id int PRIMARY KEY, worker text);
      CREATE TABLE pair (id int PRIMARY KEY, n int NOT NULL);
      CREATE TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED);
      CREATE FUNCTION book(exact boolean) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        IF exact THEN PERFORM pg_advisory_xact_lock(7); END IF;
        IF (SELECT count(*) FROM seat WHERE event = 1) >= 1 THEN RETURN false; END IF;
        INSERT INTO seat (event) VALUES (1);
        RETURN true;
      END $$;
      CREATE FUNCTION one_by_one() RETURNS bigint LANGUAGE plpgsql AS $$ DECLARE a bigint; b bigint; BEGIN
        SELECT n INTO a FROM pair WHERE id = 2; SELECT n INTO b FROM pair WHERE id = 3; RETURN a + b; END $$;
      CREATE FUNCTION at_once() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT sum(n) FROM pair';
      CREATE TABLE watched (n int);
      CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM 1 FROM seat; RETURN NEW; END $$;
      CREATE TRIGGER watch BEFORE INSERT ON watched FOR EACH ROW EXECUTE FUNCTION watch();
      CREATE PROCEDURE book_all() LANGUAGE plpgsql AS $$ BEGIN PERFORM book(false); END $$;
      CREATE PROCEDURE book_twice() LANGUAGE plpgsql AS $$ BEGIN PERFORM 1; COMMIT; PERFORM book(true); END $$`);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await Promise.all([pool?.end(), sql?.end()]);
    await database?.drop();
  });

  const reset = () =>
    pool.query(`DELETE FROM seat; DELETE FROM job; DELETE FROM late; DELETE FROM pair;
      INSERT INTO job VALUES (1), (2); INSERT INTO pair VALUES (2, 2), (3, 3)`);
  const twice = (
    act: () => Promise<unknown>,
    invariant: Scenario["invariant"],
    more: Partial<Scenario> = {},
  ) => explore("twice", { db: fromPg(pool), reset, actors: { A: act, B: act }, invariant, ...more });
  const oneSeat = async () => {
    const { rows } = await pool.query("SELECT count(*)::int AS n FROM seat");
    expect(rows[0].n).toBe(1);
  };
  const claimed: Scenario["invariant"] = ({ A, B }) => {
    const jobs = [A, B].map((each) => (each?.status === "fulfilled" ? each.value : undefined));
    expect(new Set(jobs).size).toBe(2);
  };
  const claim = (how: string) => async () => {
    const { rows } = await pool.query(
      `UPDATE job SET worker = 'me' WHERE id = (SELECT id FROM job WHERE worker IS NULL ORDER BY id LIMIT 1 ${how}) RETURNING id`,
    );
    return rows[0]?.id;
  };

  const clients = {
    "pg, simple": () => pool.query(guarded),
    "pg, extended": () => pool.query(guarded.replaceAll("event = 1", "event = $1"), [1]),
    "pg, prepared": () =>
      pool.query({ name: "guarded", text: guarded.replaceAll("event = 1", "event = $1"), values: [1] }),
    "postgres.js": () => sql.unsafe(guarded),
    "postgres.js, prepared": () =>
      sql`INSERT INTO seat (event) SELECT ${1}::int WHERE (SELECT count(*) FROM seat WHERE event = ${1}) < 1`,
  };

  test.for(Object.entries(clients))("a guard that counts: %s", async ([, act]) => {
    const report = await twice(act, oneSeat);
    expect(report.text).toMatch(/switch[\s\S]*COMMIT \(by itself\)/);
    expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "phantom", table: "seat" });
    expect(await twice(act, oneSeat, { replay: report.replay as string })).toMatchObject({
      ok: false,
      runs: 1,
    });
    expect(notices).toEqual([]);
  });

  test("a claim by a subquery; and one that skips what is locked", async () => {
    expect(await twice(claim(""), claimed)).toMatchObject({ ok: false, preemptions: 1 });
    expect(await twice(claim("FOR UPDATE SKIP LOCKED"), claimed)).toMatchObject({
      ok: true,
      coverage: "exhaustive",
    });
  });

  test("a function that checks, then inserts; and one that locks first", async () => {
    expect(await twice(() => pool.query("SELECT book(false)"), oneSeat)).toMatchObject({ ok: false });
    // Its statements are not held back one by one: what is between these is not tried, and not claimed.
    expect(await twice(() => pool.query("SELECT book(true)"), oneSeat)).toMatchObject({
      ok: true,
      coverage: { runs: expect.any(Number) },
      levels: [{ unseen: ["SELECT book(true)"] }],
    });
    expect(await twice(() => pool.query("CALL book_all()"), oneSeat)).toMatchObject({ ok: false });
  });

  test("a function that reads twice, and a trigger, are not claimed to be known, in a transaction neither", async () => {
    const within = (text: string) => async () => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        await client.query(text);
        await client.query("COMMIT");
      } finally {
        client.release();
      }
    };
    for (const text of ["SELECT one_by_one()", "INSERT INTO watched VALUES (1)"]) {
      const report = await twice(within(text), () => {});
      expect(report, report.text).toMatchObject({ ok: true, levels: [{ unseen: [text] }] });
      expect(report.coverage).not.toBe("exhaustive");
    }
    // What is stable sees the same as whoever calls it.
    expect(await twice(within("SELECT at_once()"), () => {})).toMatchObject({ coverage: "exhaustive" });
  });

  test("two updates by what they find", async () => {
    const report = await explore("swap", {
      db: fromPg(pool),
      reset,
      actors: {
        A: () => pool.query("UPDATE pair SET n = 3 WHERE n = 2"),
        B: () => pool.query("UPDATE pair SET n = 2 WHERE n = 3"),
      },
      async invariant() {
        const { rows } = await pool.query("SELECT DISTINCT n FROM pair");
        expect(rows.length).toBe(1);
      },
    });
    expect(report).toMatchObject({ ok: false, preemptions: 1 });
  });

  test("what cannot be inside of a transaction is left alone, and the report does not claim to know everything", async () => {
    const procedure = await twice(() => pool.query("CALL book_twice()"), oneSeat);
    expect(procedure).toMatchObject({ ok: true, levels: [{ unseen: ["CALL book_twice()"] }] });
    expect(procedure.coverage).not.toBe("exhaustive");
    expect(procedure.text).toContain('others cannot come into "CALL book_twice()"');
    const vacuum = async () => {
      await pool.query("VACUUM job");
      await pool.query("SELECT book(true)");
    };
    expect(await twice(vacuum, oneSeat)).toMatchObject({
      ok: true,
      levels: [{ unseen: ["VACUUM job", "SELECT book(true)"] }],
    });
    const several = await twice(
      () => pool.query("BEGIN; SELECT count(*) FROM seat; SELECT book(true); COMMIT"),
      oneSeat,
    );
    expect(several.coverage).not.toBe("exhaustive");
  });

  test("the client hears what it would have heard: rows, counts, and a COMMIT that is refused", async () => {
    const heard: unknown[] = [];
    const act = async () => {
      const { rows, rowCount, command } = await pool.query(
        "INSERT INTO late SELECT 1 FROM pair LIMIT 1 RETURNING n",
      );
      heard.push([rows, rowCount, command]);
    };
    const invariant: Scenario["invariant"] = ({ A, B }) => {
      const codes = [A, B].map((each) => (each?.status === "rejected" ? String(each.reason.code) : "kept"));
      expect(codes.toSorted((a, b) => a.localeCompare(b))).toEqual(["23505", "kept"]);
    };
    expect(await twice(act, invariant)).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(new Set(heard.map((each) => JSON.stringify(each)))).toEqual(
      new Set([JSON.stringify([[{ n: 1 }], 1, "INSERT"])]),
    );
    expect(
      await twice(
        () => sql`UPDATE job SET id = 1 WHERE id = 2`,
        ({ A, B }) => {
          expect([A, B].map((each) => each?.status === "rejected" && each.reason.code)).toEqual([
            "23505",
            "23505",
          ]);
          throw new Error("seen");
        },
      ),
    ).toMatchObject({ ok: false, error: { message: "seen" } });
    const { rows } = await pool.query(
      "SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'",
    );
    expect(rows[0].n).toBe(0);
  });
});

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: MysqlPool;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 6 });
    await pool.query("CREATE TABLE seat (id int AUTO_INCREMENT PRIMARY KEY, event int NOT NULL)");
    await pool.query("CREATE TABLE job (id int PRIMARY KEY, worker varchar(20))");
    await pool.query("INSERT INTO job VALUES (1, NULL), (2, NULL)");
    await pool.query("CREATE TABLE pair (id int PRIMARY KEY, n int NOT NULL)");
    await pool.query(`CREATE FUNCTION book_one() RETURNS boolean MODIFIES SQL DATA BEGIN
      IF (SELECT count(*) FROM seat WHERE event = 1) >= 1 THEN RETURN FALSE; END IF;
      INSERT INTO seat (event) VALUES (1);
      RETURN TRUE; END`);
    await pool.query(`CREATE PROCEDURE book_counted() BEGIN DECLARE taken int;
      SELECT count(*) INTO taken FROM seat; IF taken < 1 THEN INSERT INTO seat (event) VALUES (1); END IF; END`);
    await pool.query(`CREATE PROCEDURE book() BEGIN
      IF (SELECT count(*) FROM seat) < 1 THEN INSERT INTO seat (event) VALUES (1); END IF; END`);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  const twice = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
    explore("twice", {
      db: fromMysql2(pool),
      reset: () => pool.query("DELETE FROM seat"),
      actors: { A: act, B: act },
      async invariant() {
        const [rows] = await pool.query<RowDataPacket[]>("SELECT count(*) AS n FROM seat");
        expect(Number(rows[0]?.["n"])).toBeLessThanOrEqual(1);
      },
      maxMs: 30_000,
      ...more,
    });

  test.for(["query", "execute"] as const)("a guard that counts: %s", async (how) => {
    const report = await twice(() => (how === "query" ? pool.query(guarded) : pool.execute(guarded)), {
      isolation: "read committed",
    });
    expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "phantom" });
    expect(report.text).toContain("COMMIT (by itself)");
  });

  /** MySQL lets no UPDATE read its own table but through a derived one. What they claim is told by what they write. */
  const claim = (who: string, how: string) => async () => {
    const [{ affectedRows }] = await pool.query<ResultSetHeader>(
      `UPDATE job SET worker = '${who}' WHERE id =
        (SELECT id FROM (SELECT id FROM job WHERE worker IS NULL ORDER BY id LIMIT 1 ${how}) free)`,
    );
    return affectedRows;
  };
  const claiming = (how: string, isolation: Scenario["isolation"] & string) =>
    explore("claim", {
      db: fromMysql2(pool),
      reset: () => pool.query("UPDATE job SET worker = NULL"),
      actors: { A: claim("A", how), B: claim("B", how) },
      async invariant(results) {
        const [rows] = await pool.query<RowDataPacket[]>("SELECT worker FROM job WHERE worker IS NOT NULL");
        const done = Object.values(results).filter((each) => each.status === "fulfilled" && each.value === 1);
        expect(rows.length).toBe(done.length);
      },
      isolation,
      maxMs: 30_000,
    });

  test("a claim by a subquery; and one that skips what is locked", async () => {
    expect(await claiming("", "read committed")).toMatchObject({ ok: false, preemptions: 1 });
    // What the subquery reads is locked there: one of both is ended in a deadlock, or waits.
    expect(await claiming("", "repeatable read")).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(await claiming("FOR UPDATE SKIP LOCKED", "read committed")).toMatchObject({
      ok: true,
      coverage: "exhaustive",
    });
  });

  /** What it reads is locked there, as nowhere else: it is found only in what comes between its statements, if at all. */
  test("a function that checks, then inserts, is not claimed to be known", async () => {
    const report = await twice(() => pool.query("SELECT book_one()"), { isolation: "read committed" });
    expect(report, report.text).toMatchObject({ ok: true, levels: [{ unseen: ["SELECT book_one()"] }] });
    expect(report.coverage).not.toBe("exhaustive");
    const called = async () => {
      const connection = await pool.getConnection();
      await connection.query("START TRANSACTION");
      await connection.query("CALL book_counted()");
      await connection.query("COMMIT");
      connection.release();
    };
    const procedure = await twice(called, { isolation: "read committed" });
    expect(procedure, procedure.text).toMatchObject({ ok: false, preemptions: 1 });
  });

  test("two updates by what they find", async () => {
    const report = await explore("swap", {
      db: fromMysql2(pool),
      reset: () => pool.query("REPLACE INTO pair VALUES (2, 2), (3, 3)"),
      actors: {
        A: () => pool.query("UPDATE pair SET n = 3 WHERE n = 2"),
        B: () => pool.query("UPDATE pair SET n = 2 WHERE n = 3"),
      },
      async invariant() {
        const [rows] = await pool.query<RowDataPacket[]>("SELECT DISTINCT n FROM pair");
        expect(rows.length).toBe(1);
      },
      isolation: "read committed",
      maxMs: 30_000,
    });
    expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
  });

  test("in a procedure every statement is a transaction by itself, in which nobody can be held back", async () => {
    const report = await twice(() => pool.query("CALL book()"));
    expect(report.coverage).not.toBe("exhaustive");
    expect(report.levels[0]?.unseen).toEqual(["CALL book()"]);
  });
});

/** There a statement that writes is the only writer until it has ended, and reads nothing of before: it cannot race. */
describe("on SQLite", () => {
  let folder: string;
  let db: Sqlite.Database;
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-alone-"));
    db = new Sqlite(join(folder, "alone.db"));
    db.exec(`PRAGMA journal_mode = WAL; CREATE TABLE seat (id integer PRIMARY KEY, event int NOT NULL);
      CREATE TABLE job (id int PRIMARY KEY, worker text); INSERT INTO job VALUES (1, NULL), (2, NULL)`);
  });
  afterAll(async () => {
    db?.close();
    await rm(folder, { recursive: true });
  });

  const module = new URL("./races/sqlite/alone.ts", import.meta.url);
  const run = (name: string, text: string, invariant: () => void) =>
    explore(name, {
      reset: () => db.exec("DELETE FROM seat; UPDATE job SET worker = NULL"),
      actors: { A: inThread(module, name, db.name, text), B: inThread(module, name, db.name, text) },
      invariant,
    });
  const seats = () => expect(db.prepare("SELECT count(*) FROM seat").pluck().get()).toBe(1);

  test("a guard that counts", async () => {
    expect(await run("send", guarded, seats)).toMatchObject({ ok: true, coverage: "exhaustive" });
    // The same in two statements does.
    expect(await run("countThenSend", "INSERT INTO seat (event) VALUES (1)", seats)).toMatchObject({
      ok: false,
      preemptions: 1,
    });
  });

  test("a claim by a subquery", async () => {
    const claim =
      "UPDATE job SET worker = 'me' WHERE id = (SELECT id FROM job WHERE worker IS NULL ORDER BY id LIMIT 1)";
    const all = () =>
      expect(db.prepare("SELECT count(*) FROM job WHERE worker IS NULL").pluck().get()).toBe(0);
    expect(await run("send", claim, all)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});
