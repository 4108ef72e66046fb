/** What befalls a handler in the middle of what it does: one that is not prepared for it fails, with `once` it passes. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import Sqlite from "better-sqlite3";
import { type Holdfast, type Lease, fenced, holdfast, key, once } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { type FaultKind, explore, inThread } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type SqlClient, isMysql, openSql, sqlServers } from "./harness/sql.ts";

/** What each is told as, and what would have helped. */
const kinds: readonly (readonly [FaultKind, RegExp, RegExp])[] = [
  [
    "crash",
    /handler's process ends here, and handler is called again/,
    /called again.*once\(hf, id, async \(tx\) => …\)/,
  ],
  ["lost commit", /the answer to this COMMIT is lost/, /does not know whether COMMIT was done/],
  [
    "twice",
    /handler is called again, as if nobody had heard that it is done/,
    /called twice, and did it twice/,
  ],
];

const pay = ["INSERT INTO payment (amount) VALUES (10)", "UPDATE account SET balance = balance + 10"];

describe.each(sqlServers)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let sql: SqlClient;
  let hf: Holdfast<{ query(text: string): Promise<unknown> }>;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    sql = openSql(server, database.url, 8);
    hf = holdfast(sql.db);
    await hf.migrate();
    await sql.script(
      `CREATE TABLE payment (id ${isMysql(server) ? "int AUTO_INCREMENT" : "serial"} PRIMARY KEY, amount int NOT NULL)`,
      "CREATE TABLE account (id varchar(20) PRIMARY KEY, balance int NOT NULL)",
      "INSERT INTO account VALUES ('ada', 0)",
    );
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await hf?.close();
    await sql?.end();
    await database?.drop();
  });

  const own = isMysql(server) ? "holdfast_" : "holdfast.";
  const reset = () =>
    sql.script(
      "DELETE FROM payment",
      `DELETE FROM ${own}once`,
      `DELETE FROM ${own}lease`,
      "UPDATE account SET balance = 0",
    );

  /** Somebody has paid 10, once. */
  const paidOnce = async () => {
    expect(await sql.number("SELECT count(*) FROM payment")).toBe(1);
    expect(await sql.number("SELECT balance FROM account")).toBe(10);
  };

  const naive = () =>
    sql.transaction(async (tx) => {
      for (const statement of pay) await tx.rows(statement);
    });

  const withOnce = () =>
    once(hf, "message 7", async (tx) => {
      for (const statement of pay) await tx.client.query(statement);
    });

  const explored = (act: () => Promise<unknown>, faults: readonly FaultKind[], replay?: string) =>
    explore("handler", {
      db: sql.db,
      reset,
      actors: { handler: act },
      invariant: paidOnce,
      faults,
      maxMs: 30_000,
      ...(replay === undefined ? {} : { replay }),
    });

  describe.each(kinds)("%s", (kind, told, fix) => {
    test("a handler that is not prepared does it twice", async () => {
      const found = await explored(naive, [kind]);
      expect(found, found.text).toMatchObject({ ok: false, anomaly: "fault" });
      expect(found.text).toMatch(told);
      expect(found.fix).toMatch(fix);
      const again = await explored(naive, [kind], found.replay);
      expect(again, again.text).toMatchObject({ ok: false, replay: found.replay });
    });

    test("with once it does not", async () => {
      const found = await explored(withOnce, [kind]);
      expect(found, found.text).toMatchObject({ ok: true });
      expect(found.text).toMatch(/\d+ runs? with a fault/);
    });
  });

  test("a COMMIT in other words is one too", async () => {
    const locked = () =>
      hf.transaction({ lock: key("ada") }, async (tx) => {
        for (const statement of pay) await tx.client.query(statement);
      });
    const found = await explored(locked, ["lost commit"]);
    // The server is asked what became of it, or the row that the transaction wrote for that.
    expect(found, found.text).toMatchObject({ ok: true });
    expect(found.text).toMatch(/\d+ runs? with a fault/);
  });

  test("what is done in several steps stays half done", async () => {
    const steps = async () => {
      for (const statement of pay) await sql.rows(statement);
    };
    const found = await explored(steps, ["crash"]);
    expect(found, found.text).toMatchObject({ ok: false, replay: expect.stringMatching(/c/) });
  });

  describe("a lease that is lost while its holder pauses", { timeout: 240_000 }, () => {
    const counted = async (write: (n: number, lease: Lease) => Promise<unknown>) => {
      const lease = await hf.lease(key("report"), { wait: 30_000, renew: false, ttl: 60_000 });
      try {
        const n = await sql.number("SELECT balance AS n FROM account");
        await write(n + 1, lease);
      } finally {
        await lease.release().catch(() => {});
      }
    };
    const text = (n: number) => `UPDATE account SET balance = ${n}`;
    const run = (act: () => Promise<unknown>, faults: readonly FaultKind[]) =>
      explore("lease", {
        db: sql.db,
        reset,
        actors: { A: act, B: act },
        invariant: async (results) => {
          const done = Object.values(results).filter(({ status }) => status === "fulfilled").length;
          expect(await sql.number("SELECT balance AS n FROM account")).toBe(done);
        },
        faults,
        preemptions: 0,
        minCoverage: 0,
        maxMs: 200_000,
      });

    test("the late write is a lost update", async () => {
      const found = await run(() => counted((n) => sql.rows(text(n))), ["pause", "expired lease"]);
      expect(found, found.text).toMatchObject({ ok: false, anomaly: "fault" });
      expect(found.fix).toContain("fenced(tx, lease)");
    });

    test("and is refused with fenced", async () => {
      const act = () =>
        counted((n, lease) =>
          hf.transaction(async (tx) => {
            await fenced(tx, lease);
            await tx.client.query(text(n));
          }),
        );
      const found = await run(act, ["pause", "expired lease"]);
      expect(found, found.text).toMatchObject({ ok: true });
    });
  });

  test("a fault that is none is refused", async () => {
    await expect(explored(naive, ["fire" as never])).rejects.toThrow(
      /there is no fault "fire"; there are "crash"/,
    );
  });
});

/** Each call in a thread that stands for a process, which is ended by a crash. */
describe("on SQLite", () => {
  let folder: string;
  beforeAll(async () => void (folder = await mkdtemp(join(tmpdir(), "holdfast-faults-"))));
  afterAll(() => rm(folder, { recursive: true }));

  const module = new URL("./races/sqlite/handler.ts", import.meta.url);
  const tables = `PRAGMA journal_mode = WAL; CREATE TABLE payment (id integer PRIMARY KEY, amount int NOT NULL);
    CREATE TABLE account (id text PRIMARY KEY, balance int NOT NULL); INSERT INTO account VALUES ('ada', 0)`;
  const empty = `DELETE FROM payment; DELETE FROM holdfast_once; DELETE FROM holdfast_lease; UPDATE account SET balance = 0`;

  describe.each(["better-sqlite3", "node:sqlite"] as const)("%s", (library) => {
    let file: string;
    let db: { exec(text: string): unknown; close(): unknown };
    let number: (text: string) => number;
    beforeAll(async () => {
      file = join(folder, `${library.replace(":", "-")}.db`);
      if (library === "node:sqlite") {
        const own = new DatabaseSync(file, { timeout: 5000 });
        await holdfast(fromNodeSqlite(own)).migrate();
        number = (text) => Number(Object.values(own.prepare(text).get() ?? {})[0]);
        db = own;
      } else {
        const own = new Sqlite(file);
        await holdfast(fromBetterSqlite3(own)).migrate();
        number = (text) => Number(own.prepare(text).pluck().get());
        db = own;
      }
      db.exec(tables);
    });
    afterAll(() => db?.close());

    const explored = (name: string, faults: readonly FaultKind[], replay?: string) =>
      explore("handler", {
        reset: () => db.exec(empty),
        actors: { handler: inThread(module, name, library, file) },
        invariant() {
          expect(number("SELECT count(*) FROM payment")).toBe(1);
          expect(number("SELECT balance FROM account")).toBe(10);
        },
        faults,
        maxMs: 30_000,
        ...(replay === undefined ? {} : { replay }),
      });

    describe.each(kinds.filter(([kind]) => kind !== "lost commit"))("%s", (kind, told, fix) => {
      test("a handler that is not prepared does it twice", async () => {
        const found = await explored("naive", [kind]);
        expect(found, found.text).toMatchObject({ ok: false, anomaly: "fault" });
        expect(found.text).toMatch(told);
        expect(found.fix).toMatch(fix);
        const again = await explored("naive", [kind], found.replay);
        expect(again, again.text).toMatchObject({ ok: false, replay: found.replay });
      });

      test("with once it does not", async () => {
        const found = await explored("withOnce", [kind]);
        expect(found, found.text).toMatchObject({ ok: true });
        expect(found.text).toMatch(/\d+ runs? with a fault/);
      });
    });

    test("what is done in several steps stays half done", async () => {
      const found = await explored("steps", ["crash"]);
      expect(found, found.text).toMatchObject({ ok: false, replay: expect.stringMatching(/c/) });
    });

    test("what cannot be is refused", async () => {
      await expect(explored("naive", ["crash", "lost commit"])).rejects.toThrow(
        /there is no "lost commit" for actors in threads.*COMMIT is a call there/,
      );
      await expect(explored("naive", ["pause"])).rejects.toThrow(/"pause" lets leases run out.*need `db`/);
    });
  });

  describe("a lease that is lost while its holder pauses", { timeout: 240_000 }, () => {
    let db: Sqlite.Database;
    beforeAll(async () => {
      db = new Sqlite(join(folder, "lease.db"));
      await holdfast(fromBetterSqlite3(db)).migrate();
      db.exec(tables);
    });
    afterAll(() => db?.close());

    const balance = () => db.prepare("SELECT balance FROM account").pluck().get();
    const run = (name: string) =>
      explore("lease", {
        db: fromBetterSqlite3(() => new Sqlite(db.name)),
        reset: () => db.exec(empty),
        actors: { A: inThread(module, name, db.name), B: inThread(module, name, db.name) },
        invariant: (results) =>
          expect(balance()).toBe(
            Object.values(results).filter(({ status }) => status === "fulfilled").length,
          ),
        faults: ["pause", "expired lease"],
        preemptions: 0,
        minCoverage: 0,
        maxMs: 200_000,
      });

    test("the late write is a lost update", async () => {
      const found = await run("late");
      expect(found, found.text).toMatchObject({ ok: false, anomaly: "fault" });
      expect(found.fix).toContain("fenced(tx, lease)");
    });

    test("and is refused with fenced", async () => {
      const found = await run("refused");
      expect(found, found.text).toMatchObject({ ok: true });
    });
  });
});
