/** Locks of InnoDB on what is between rows: correct code passes, and racy code does not, whatever the server still has of older rows. */
import { explore } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, onTestFinished, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { startMysql } from "./harness/mysql.ts";
import { type SqlClient, type Statements, openSql } from "./harness/sql.ts";

type Actor = (sql: SqlClient) => Promise<unknown>;

interface Case {
  readonly actors: Readonly<Record<string, Actor>>;
  /** The number that this statement comes to. */
  readonly asks: string;
  readonly wanted: (found: number) => boolean;
  readonly reset?: readonly string[];
  readonly racy?: true;
}

const retried =
  (body: (tx: Statements) => Promise<unknown>, begin?: readonly string[]): Actor =>
  async (sql) => {
    for (let i = 0; ; i++)
      try {
        return await sql.transaction(body, begin);
      } catch (error) {
        const { errno } = error as { errno?: number };
        if ((errno !== 1213 && errno !== 1020) || i === 9) throw error;
      }
  };

const unlessDuplicate = async (work: Promise<unknown>) => {
  try {
    await work;
    return true;
  } catch (error) {
    if ((error as { errno?: number }).errno !== 1062) throw error;
    return false;
  }
};

const committed = ["SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "START TRANSACTION"];

const absent = (id: number) =>
  retried(async (tx) => {
    const rows = await tx.rows(`SELECT n FROM cart WHERE id = ${id} FOR UPDATE`);
    await tx.rows(
      rows.length === 0 ? `INSERT INTO cart VALUES (${id}, 1)` : `UPDATE cart SET n = n + 1 WHERE id = ${id}`,
    );
  });
const seat = (n: number) =>
  retried(async (tx) => {
    if ((await tx.number("SELECT count(*) FROM seat WHERE event = 5 FOR UPDATE")) < 1)
      await tx.rows(`INSERT INTO seat (event, number) VALUES (5, ${n})`);
  });
const empty = ["DELETE FROM cart", "DELETE FROM seat", "DELETE FROM login"];
const around = [...empty, "INSERT INTO cart VALUES (0, 0), (10, 0)"];

const cases: Readonly<Record<string, Case>> = {
  "a row that is not there, locked and inserted": {
    actors: { A: absent(1), B: absent(1) },
    asks: "SELECT n FROM cart",
    wanted: (n) => n === 2,
  },
  "the same between other rows": {
    actors: { A: absent(1), B: absent(1) },
    reset: around,
    asks: "SELECT n FROM cart WHERE id = 1",
    wanted: (n) => n === 2,
  },
  "neighbours that are not there": {
    actors: { A: absent(1), B: absent(2) },
    reset: around,
    asks: "SELECT count(*) FROM cart",
    wanted: (n) => n === 4,
  },
  "three of them": {
    actors: { A: absent(1), B: absent(1), C: absent(2) },
    asks: "SELECT sum(n) FROM cart",
    wanted: (n) => n === 3,
  },
  "inserted, or updated if it is there": {
    actors: Object.fromEntries(
      ["A", "B"].map((name) => [
        name,
        retried(async (tx) => {
          await tx.rows("INSERT INTO cart VALUES (1, 1) ON DUPLICATE KEY UPDATE n = n + 1");
          await tx.rows("INSERT INTO cart VALUES (2, 1) ON DUPLICATE KEY UPDATE n = n + 1");
        }),
      ]),
    ),
    asks: "SELECT sum(n) FROM cart",
    wanted: (n) => n === 4,
  },
  "a range, deleted and inserted anew": {
    actors: Object.fromEntries(
      [1, 2].map((n) => [
        `set${n}`,
        retried(async (tx) => {
          await tx.rows("DELETE FROM seat WHERE event = 5");
          await tx.rows(`INSERT INTO seat (event, number) VALUES (5, ${n})`);
        }),
      ]),
    ),
    reset: [...empty, "INSERT INTO seat (event, number) VALUES (5, 7), (6, 8)"],
    asks: "SELECT count(*) FROM seat WHERE event = 5",
    wanted: (n) => n === 1,
  },
  "one key, deleted and inserted anew": {
    actors: Object.fromEntries(
      [1, 2].map((n) => [
        `set${n}`,
        retried(async (tx) => {
          await tx.rows("DELETE FROM cart WHERE id = 1");
          await tx.rows(`INSERT INTO cart VALUES (1, ${n})`);
        }),
      ]),
    ),
    reset: around,
    asks: "SELECT count(*) FROM cart",
    wanted: (n) => n === 3,
  },
  "updated over a secondary index": {
    actors: Object.fromEntries(
      ["A", "B"].map((name) => [
        name,
        retried(async (tx) => {
          await tx.rows("UPDATE seat SET event = 6 WHERE event = 5 AND number = 7");
          await tx.rows("UPDATE seat SET note = note + 1 WHERE event = 6");
        }),
      ]),
    ),
    reset: [...empty, "INSERT INTO seat (event, number) VALUES (4, 1), (5, 7), (6, 8)"],
    asks: "SELECT sum(note) FROM seat",
    wanted: (n) => n === 4,
  },
  "a unique name, and who comes second reads it": {
    actors: Object.fromEntries(
      ["A", "B"].map((name) => [
        name,
        retried(async (tx) => {
          if (!(await unlessDuplicate(tx.rows("INSERT INTO login (name) VALUES ('ada')"))))
            await tx.rows("UPDATE login SET n = n + 1 WHERE name = 'ada'");
        }),
      ]),
    ),
    asks: "SELECT n FROM login",
    wanted: (n) => n === 1,
  },
  "a unique name that changes": {
    actors: {
      A: retried((tx) => unlessDuplicate(tx.rows("UPDATE login SET name = 'bob' WHERE name = 'ada'"))),
      B: retried((tx) => unlessDuplicate(tx.rows("INSERT INTO login (name) VALUES ('bob')"))),
      C: retried((tx) => tx.rows("UPDATE login SET n = 5 WHERE name = 'ada'")),
    },
    reset: [...empty, "INSERT INTO login (name) VALUES ('ada')"],
    asks: "SELECT count(*) FROM login WHERE name = 'bob'",
    wanted: (n) => n === 1,
  },
  replaced: {
    actors: Object.fromEntries(
      [1, 2].map((n) => [
        `set${n}`,
        retried(async (tx) => {
          await tx.rows(`REPLACE INTO login (name, n) VALUES ('ada', ${n})`);
          await tx.rows(`REPLACE INTO login (name, n) VALUES ('bob', ${n})`);
        }),
      ]),
    ),
    asks: "SELECT count(DISTINCT n) FROM login",
    wanted: (n) => n === 1,
  },
  "counted under a lock of the range": {
    actors: { A: seat(1), B: seat(2) },
    asks: "SELECT count(*) FROM seat",
    wanted: (n) => n === 1,
  },
  "racy: counted without a lock": {
    racy: true,
    actors: Object.fromEntries(
      ["A", "B"].map((name) => [
        name,
        retried(async (tx) => {
          if ((await tx.number("SELECT count(*) FROM seat WHERE event = 5")) < 1)
            await tx.rows("INSERT INTO seat (event, number) VALUES (5, 1)");
        }),
      ]),
    ),
    asks: "SELECT count(*) FROM seat",
    wanted: (n) => n === 1,
  },
  "racy: counted under a lock that locks no gap": {
    racy: true,
    actors: Object.fromEntries(
      ["A", "B"].map((name) => [
        name,
        retried(async (tx) => {
          if ((await tx.number("SELECT count(*) FROM seat WHERE event = 5 FOR UPDATE")) < 1)
            await tx.rows("INSERT INTO seat (event, number) VALUES (5, 1)");
        }, committed),
      ]),
    ),
    asks: "SELECT count(*) FROM seat",
    wanted: (n) => n === 1,
  },
  "racy: inserted if it was not there, without a unique key": {
    racy: true,
    actors: Object.fromEntries(
      ["A", "B"].map((name) => [
        name,
        retried(async (tx) => {
          const changed = await tx.change("UPDATE seat SET note = note + 1 WHERE event = 5");
          if (changed === 0) await tx.rows("INSERT INTO seat (event, number, note) VALUES (5, 1, 1)");
        }, committed),
      ]),
    ),
    reset: [...empty, "INSERT INTO seat (event, number) VALUES (4, 1), (6, 8)"],
    asks: "SELECT count(*) FROM seat WHERE event = 5",
    wanted: (n) => n === 1,
  },
};

const tables = [
  "CREATE TABLE cart (id int PRIMARY KEY, n int NOT NULL)",
  "CREATE TABLE seat (id int AUTO_INCREMENT PRIMARY KEY, event int NOT NULL, number int NOT NULL, note int NOT NULL DEFAULT 0, KEY (event))",
  "CREATE TABLE login (id int AUTO_INCREMENT PRIMARY KEY, name varchar(20) NOT NULL, n int NOT NULL DEFAULT 0, UNIQUE KEY (name))",
];

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let shared: SqlClient;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    shared = openSql(server, database.url, 8);
    await shared.script(...tables);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await shared?.end();
    await database?.drop();
  });

  const explored = (
    { actors, asks, wanted, reset = empty }: Case,
    {
      own = true,
      maxMs = 5000,
      sql = shared,
    }: { readonly own?: boolean; readonly maxMs?: number; readonly sql?: SqlClient } = {},
  ) =>
    explore("gaps", {
      db: sql.db,
      ...(own && { reset: () => sql.script(...reset) }),
      actors: Object.fromEntries(Object.entries(actors).map(([name, act]) => [name, () => act(sql)])),
      invariant: async () => wanted(await sql.number(asks)),
      minCoverage: 0,
      maxMs,
    });

  test.for(Object.entries(cases))("%s", async ([, one]) => {
    const report = await explored(one);
    expect(report, report.text).toMatchObject({ ok: one.racy !== true });
  });

  test.for(Object.entries(cases).slice(0, 3))("without a reset: %s", async ([, one]) => {
    await shared.script(...(one.reset ?? empty));
    const report = await explored(one, { own: false });
    expect(report, report.text).toMatchObject({ ok: true });
  });

  test("the same orders each time, and all of them", async () => {
    const one = cases["counted under a lock of the range"] as Case;
    const [first, second] = [await explored(one, { maxMs: 30_000 }), await explored(one, { maxMs: 30_000 })];
    expect(first, first.text).toMatchObject({ ok: true, coverage: "exhaustive" });
    // One that was only tried again counts too.
    expect(Math.abs(first.runs - second.runs), `${first.text}\n${second.text}`).toBeLessThan(10);
  });

  // On a server of its own: a snapshot keeps the deleted rows of all databases, and other tests explore there.
  test("while somebody's old snapshot keeps deleted rows, nothing is certain, and nobody is blamed", async () => {
    const own = await (server === "mariadb" ? startMariadb() : startMysql());
    const url = new URL(own.url);
    url.pathname = "/gaps";
    const admin = openSql(server, own.url, 1);
    await admin.script("CREATE DATABASE gaps");
    await admin.end();
    const sql = openSql(server, url.href, 8);
    onTestFinished(async () => {
      await sql.end();
      await own.stop();
    });
    await sql.script(...tables);
    await sql.connected(async (other) => {
      await other.rows("START TRANSACTION WITH CONSISTENT SNAPSHOT");
      const report = await explored(cases["a row that is not there, locked and inserted"] as Case, { sql });
      expect(report, report.text).toMatchObject({ ok: true, levels: [{ unsettled: true }] });
      expect(report.coverage).toHaveProperty("runs");
      expect(report.text).toContain("locks depend on deleted rows");
      await other.rows("ROLLBACK");
    });
  });
});
