/** What is advised is what the schedule shows: a protection that was meant, and why it did not hold. */
import { fromPg } from "holdfast/pg";
import { type Exploration, type Invariant, explore } from "holdfast/testing";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type SqlClient, openSql } from "./harness/sql.ts";

type Act = (actor: "A" | "B") => Promise<unknown>;

describe.each(["postgres", "postgresOld"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;

  beforeEach(({ skip }) => skip(why !== undefined, why));
  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 8 });
    await pool.query(`
    CREATE TABLE upload (id serial PRIMARY KEY, bytes int NOT NULL);
    CREATE TABLE stock (id text PRIMARY KEY, qty int NOT NULL);
    CREATE TABLE job (id serial PRIMARY KEY, taken_by text);
    CREATE TABLE done (job int NOT NULL);
    CREATE TABLE account (id text PRIMARY KEY, balance int NOT NULL);
    CREATE TABLE person (email text CONSTRAINT person_email UNIQUE);
    CREATE TABLE "User" (id int PRIMARY KEY, credit int NOT NULL);`);
  });

  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  const reset = () =>
    pool.query(`DELETE FROM upload; DELETE FROM stock; DELETE FROM job; DELETE FROM done; DELETE FROM account; DELETE FROM person;
    DELETE FROM "User"; INSERT INTO "User" VALUES (1, 10); INSERT INTO stock VALUES ('pen', 1); INSERT INTO job (id) VALUES (1), (2); INSERT INTO account VALUES ('a', 10), ('b', 10)`);

  async function one(query: string, db: Pick<Pool, "query"> = pool): Promise<number> {
    return Number((await db.query(query)).rows[0]?.n);
  }

  async function inTransaction(work: (client: PoolClient) => Promise<unknown>): Promise<void> {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      await work(client);
      await client.query("COMMIT");
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  }

  async function report(act: Act, invariant: Invariant): Promise<Exploration> {
    const found = await explore("advice", {
      db: fromPg(pool),
      reset,
      actors: { A: () => act("A"), B: () => act("B") },
      invariant,
    });
    expect(found.ok, found.text).toBe(false);
    expect(found.text).toContain(found.fix);
    return found;
  }

  const fits = async () => expect(await one("SELECT sum(bytes) AS n FROM upload")).toBeLessThanOrEqual(100);
  const uploaded = "SELECT coalesce(sum(bytes), 0) AS n FROM upload";
  const upload = "INSERT INTO upload (bytes) VALUES (60)";
  const soldOnce = async () => expect(await one("SELECT count(*) AS n FROM upload")).toBeLessThanOrEqual(1);

  test.each<[string, Act, Invariant, RegExp]>([
    [
      "FOR UPDATE outside of a transaction",
      async () => {
        if ((await one("SELECT qty AS n FROM stock WHERE id = 'pen' FOR UPDATE")) < 1) return;
        await pool.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen'");
        await pool.query(upload);
      },
      soldOnce,
      /^FOR UPDATE on stock stands outside of a transaction: its lock is gone as soon as the statement has ended\. BEGIN before it/,
    ],
    [
      "a lock of the transaction outside of one",
      async () => {
        await pool.query("SELECT pg_advisory_xact_lock(7)");
        if ((await one(uploaded)) + 60 <= 100) await pool.query(upload);
      },
      fits,
      /^pg_advisory_xact_lock\(7\) stands outside of a transaction/,
    ],
    [
      "lock and read in one statement",
      () =>
        inTransaction(async (client) => {
          const n = await one(
            "SELECT (SELECT coalesce(sum(bytes), 0) FROM upload) AS n FROM (SELECT pg_advisory_xact_lock(7)) l",
            client,
          );
          if (n + 60 <= 100) await client.query(upload);
        }),
      fits,
      /^The lock and the reading of upload are one statement \(step \d+\): what it sees is from before it waited for the lock\. Take the lock in a statement of its own/,
    ],
    [
      "a row is locked, and others are added up in the same statement",
      () =>
        inTransaction(async (client) => {
          const n = await one(
            "SELECT (SELECT coalesce(sum(bytes), 0) FROM upload) AS n FROM stock WHERE id = 'pen' FOR UPDATE",
            client,
          );
          if (n + 60 <= 100) await client.query(upload);
        }),
      fits,
      /^The lock and the reading of upload are one statement/,
    ],
    [
      "two different keys",
      (actor) =>
        inTransaction(async (client) => {
          await client.query("SELECT pg_advisory_xact_lock(hashtext($1))", [`upload:${actor}`]);
          if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
        }),
      fits,
      /^Both lock something, but not the same: pg_advisory_xact_lock\(hashtext\('upload:[AB]'\)\) and pg_advisory_xact_lock\(hashtext\('upload:[AB]'\)\) do not exclude each other/,
    ],
    [
      "one statement that picks a row and writes it",
      async (actor) => {
        const { rows } = await pool.query(
          "UPDATE job SET taken_by = $1 WHERE id = (SELECT id FROM job WHERE taken_by IS NULL ORDER BY id LIMIT 1) RETURNING id",
          [actor],
        );
        for (const { id } of rows) await pool.query("INSERT INTO done VALUES ($1)", [id]);
      },
      async () =>
        expect(await one("SELECT max(n) AS n FROM (SELECT count(*) AS n FROM done GROUP BY job) x")).toBe(1),
      /^Both pick the same row of job, and the second one writes it after the first.*FOR UPDATE SKIP LOCKED LIMIT 1/,
    ],
    [
      "COMMIT before the write",
      async () => {
        let n = 0;
        await inTransaction(async (client) => {
          await client.query("SELECT pg_advisory_xact_lock(7)");
          n = await one(uploaded, client);
        });
        if (n + 60 <= 100) await pool.query(upload);
      },
      fits,
      /^The lock \(step \d+\) was given back by COMMIT \(step \d+\) before upload was written \(step \d+\): write first/,
    ],
    [
      "COMMIT between the claim and the status",
      async (actor) => {
        let id = 0;
        await inTransaction(async (client) => {
          id = await one(
            "SELECT id AS n FROM job WHERE taken_by IS NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED",
            client,
          );
        });
        await pool.query("UPDATE job SET taken_by = $1 WHERE id = $2", [actor, id]);
        await pool.query("INSERT INTO done VALUES ($1)", [id]);
      },
      async () =>
        expect(await one("SELECT max(n) AS n FROM (SELECT count(*) AS n FROM done GROUP BY job) x")).toBe(1),
      /^The row was claimed \(step \d+\) and let go by COMMIT \(step \d+\) before it was marked as taken \(step \d+\): between both, the next one claims it too/,
    ],
    [
      "a UNIQUE constraint that is there, and fired",
      async () => {
        if ((await one("SELECT count(*) AS n FROM person WHERE email = 'ada@example.org'")) === 0)
          await pool.query("INSERT INTO person VALUES ('ada@example.org')");
      },
      // Of people who want that nobody throws.
      (results) =>
        expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
      /^The UNIQUE constraint person_email refused the second one, as it should, and nobody expected that: INSERT INTO person … ON CONFLICT DO NOTHING/,
    ],
    [
      "a lock that is taken after the reading",
      () =>
        inTransaction(async (client) => {
          const n = await one(uploaded, client);
          await client.query("SELECT pg_advisory_xact_lock(7)");
          if (n + 60 <= 100) await client.query(upload);
        }),
      fits,
      /^pg_advisory_xact_lock\(7\) \(step \d+\) was taken after upload had been read \(step \d+\): others could write in between\. Take the lock first, then read\.$/,
    ],
    [
      "a row that is locked after it was read",
      () =>
        inTransaction(async (client) => {
          const n = await one("SELECT qty AS n FROM stock WHERE id = 'pen'", client);
          await client.query("SELECT 1 FROM stock WHERE id = 'pen' FOR UPDATE");
          await client.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [n + 1]);
        }),
      async () => expect(await one("SELECT qty AS n FROM stock WHERE id = 'pen'")).toBe(3),
      /^FOR UPDATE on stock \(step \d+\) was taken after stock had been read \(step \d+\).*decide by what the locking statement returns\.$/,
    ],
    [
      "a lock at REPEATABLE READ",
      () =>
        inTransaction(async (client) => {
          await client.query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ");
          await client.query("SELECT pg_advisory_xact_lock(7)");
          if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
        }),
      fits,
      /^pg_advisory_xact_lock\(7\) \(step \d+\) was held, but the transaction reads upload \(step \d+\) as it was in step \d+, before it had the lock: at REPEATABLE READ/,
    ],
    [
      "a lock of the session that is given back before COMMIT",
      () =>
        inTransaction(async (client) => {
          await client.query("SELECT pg_advisory_lock(7)");
          try {
            if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
          } finally {
            await client.query("SELECT pg_advisory_unlock(7)");
          }
        }),
      fits,
      /^pg_advisory_lock\(7\) \(step \d+\) was given back \(step \d+\) before COMMIT \(step \d+\): until then others do not see what was written to upload\./,
    ],
    [
      "a lock through the pool, beside the transaction",
      () =>
        inTransaction(async (client) => {
          await pool.query("SELECT pg_advisory_xact_lock(7)");
          if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
        }),
      fits,
      /^pg_advisory_xact_lock\(7\) \(step \d+\) was sent through a pool, over another connection than the transaction that began in step \d+/,
    ],
    [
      "a name that needs its quotes",
      async () => {
        const n = await one('SELECT credit AS n FROM "public"."User" WHERE "User"."id" = 1');
        await pool.query('UPDATE "public"."User" SET credit = $1 WHERE id = 1', [n - 1]);
      },
      async () => expect(await one('SELECT credit AS n FROM "User"')).toBe(8),
      /UPDATE "User" SET n = .*tx\.rows\("User", \[id\]\)/,
    ],
    [
      "no UNIQUE where there is one",
      async (actor) => {
        if ((await one("SELECT count(*) AS n FROM person")) === 0)
          await pool.query("INSERT INTO person VALUES ($1) ON CONFLICT (email) DO NOTHING", [actor]);
      },
      async () => expect(await one("SELECT count(*) AS n FROM person")).toBe(1),
      /^Rows that are not there yet cannot be locked: take a lock for what is checked \(hf\.transaction\(\{ lock: key\("person", id\) \}, …\)\)\.$/,
    ],
    [
      "no UNIQUE for a sum",
      async () => {
        if ((await one(uploaded)) + 60 <= 100) await pool.query(upload);
      },
      fits,
      /^Rows that are not there yet cannot be locked: take a lock for what is checked [^,]*, id\) \}, …\)\)\.$/,
    ],
    [
      "a deadlock on one row that both share first",
      () =>
        inTransaction(async (client) => {
          await client.query("SELECT qty FROM stock WHERE id = 'pen' FOR SHARE");
          await client.query("UPDATE stock SET qty = qty + 1 WHERE id = 'pen'");
        }),
      (results) =>
        expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
      /^Both share a row of stock \(FOR SHARE\), and then each wants to write it/,
    ],
  ])("%s", async (_, act, invariant, sentence) => {
    const found = await report(act, invariant);
    expect(found.fix, found.text).toMatch(sentence);
  });

  describe("a lock of the session, taken and given back through the pool", () => {
    const throughPool: Act = async () => {
      await pool.query("SELECT pg_advisory_lock(7)");
      try {
        if ((await one(uploaded)) + 60 <= 100) await pool.query(upload);
      } finally {
        await pool.query("SELECT pg_advisory_unlock(7)");
      }
    };
    const onOne: Act = async () => {
      const client = await pool.connect();
      try {
        await client.query("SELECT pg_advisory_lock(7)");
        try {
          if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
        } finally {
          await client.query("SELECT pg_advisory_unlock(7)");
        }
      } finally {
        client.release();
      }
    };

    test("another one gets the connection, and the lock with it", async () => {
      const found = await report(throughPool, fits);
      expect(found.text).toContain("B begins, and gets the connection that was just given back");
      expect(found.fix, found.text).toMatch(
        /^pg_advisory_unlock\(7\) answered no: it was sent over another connection than the one that has the lock/,
      );
      const again = await explore("again", {
        db: fromPg(pool),
        reset,
        actors: { A: () => throughPool("A"), B: () => throughPool("B") },
        invariant: fits,
        replay: found.replay ?? "",
      });
      expect(again, again.text).toMatchObject({ ok: false, replay: found.replay });
    });

    test("on one connection it is right", async () => {
      const found = await explore("one connection", {
        db: fromPg(pool),
        reset,
        actors: { A: () => onOne("A"), B: () => onOne("B") },
        invariant: fits,
      });
      expect(found, found.text).toMatchObject({ ok: true });
    });
  });

  test("a reader that only reads: REPEATABLE READ", async () => {
    let seen = 0;
    const found = await explore("report", {
      db: fromPg(pool),
      reset,
      actors: {
        report: async () => {
          seen =
            (await one("SELECT balance AS n FROM account WHERE id = 'a'")) +
            (await one("SELECT balance AS n FROM account WHERE id = 'b'"));
        },
        transfer: () =>
          inTransaction(async (client) => {
            await client.query("UPDATE account SET balance = balance - 5 WHERE id = 'a'");
            await client.query("UPDATE account SET balance = balance + 5 WHERE id = 'b'");
          }),
      },
      invariant: () => expect(seen).toBe(20),
    });
    expect(found).toMatchObject({ ok: false, anomaly: "read skew" });
    expect(found.fix, found.text).toMatch(
      /^It only reads, in several statements, and between them the other one has committed.*REPEATABLE READ/,
    );
  });

  const locked: Act = () =>
    inTransaction(async (client) => {
      await client.query("SELECT pg_advisory_xact_lock(7)");
      if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
    });
  const unlocked: Act = () =>
    inTransaction(async (client) => {
      await client.query("SELECT 7");
      if ((await one(uploaded, client)) + 60 <= 100) await client.query(upload);
    });

  test("a replay after the mending says that it is no longer possible, and why", async () => {
    const { replay } = await report(unlocked, fits);
    const replayed = (act: Act, order: string | undefined) =>
      explore("replay", {
        db: fromPg(pool),
        reset,
        actors: { A: () => act("A"), B: () => act("B") },
        invariant: fits,
        replay: order ?? "",
      });
    expect(await replayed(unlocked, replay)).toMatchObject({ ok: false, runs: 1 });
    const after = await replayed(locked, replay);
    expect(after.text).toMatch(
      /^✓ replay: this order is no longer possible: step \d+ was to be B's, which now waits for A$/,
    );
  });

  test.each([
    ["nonsense"],
    [""],
    ["A2C4"],
    ["A2B4!"],
    ["a2b2"],
    ["A2B4!C"],
    ["A99999"],
    ["A2+B"],
    ["+BA"],
    ["A+BA+BA"],
  ])("%j is no order, and refused", async (replay) => {
    await expect(
      explore("replay", {
        db: fromPg(pool),
        reset,
        actors: { A: () => locked("A"), B: () => locked("B") },
        invariant: fits,
        replay,
      }),
    ).rejects.toThrow(/replay is an order that a report named, such as A2B4A2 for both actors \(A to B\)/);
  });

  test("what goes over one connection stands in the column of whoever asked for it", async () => {
    const client = new Client({ connectionString: database.url });
    await client.connect();
    const act = async (name: string) => {
      for (const n of [1, 2, 3]) await client.query(`SELECT '${name}${n}' AS name`);
    };
    try {
      const found = await explore("shared", {
        db: fromPg(pool),
        reset,
        actors: { A: () => act("a"), B: () => act("b"), C: () => act("c") },
        invariant: () => {
          throw new Error("look");
        },
      });
      const sent = found.turns?.map(({ actor, statement }) => [actor, /'(\w)\d'/.exec(statement)?.[1]]);
      expect(sent, found.text).toHaveLength(9);
      expect(sent, found.text).toEqual(sent?.map(([actor]) => [actor, actor?.toLowerCase()]));
    } finally {
      await client.end();
    }
  });

  test("three actors fit into 100 columns", async () => {
    const found = await explore("three", {
      db: fromPg(pool),
      reset,
      actors: {
        accounting: () => unlocked("A"),
        "the nightly report": () => one(uploaded),
        shop: () => unlocked("B"),
      },
      invariant: fits,
    });
    expect(found.ok).toBe(false);
    const lines = found.text.split("\n");
    const drawn = lines.slice(
      1,
      lines.findIndex((line) => line.startsWith("expected")),
    );
    expect(drawn.length).toBeGreaterThan(8);
    expect(Math.max(...drawn.map(({ length }) => length)), found.text).toBeLessThanOrEqual(100);
    expect(found.text).toMatch(/waits for|◄ stale/);
  });
});

/** What is written in other words there. Locks of a transaction by name are PostgreSQL's alone. */
describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let own: TestDatabase;
  let sql: SqlClient;

  beforeAll(async () => {
    if (why !== undefined) return;
    own = await createDatabase(server);
    sql = openSql(server, own.url, 8);
    await sql.script(
      "CREATE TABLE upload (id int AUTO_INCREMENT PRIMARY KEY, bytes int NOT NULL)",
      "CREATE TABLE stock (id varchar(20) PRIMARY KEY, qty int NOT NULL)",
      "CREATE TABLE person (email varchar(50), CONSTRAINT person_email UNIQUE (email))",
    );
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await sql?.end();
    await own?.drop();
  });

  const add = "INSERT INTO upload (bytes) VALUES (60)";
  const sum = "SELECT coalesce(sum(bytes), 0) AS n FROM upload";
  const within = async () =>
    expect(await sql.number("SELECT sum(bytes) FROM upload")).toBeLessThanOrEqual(100);

  test.each<[string, Act, Invariant, RegExp]>([
    [
      "FOR UPDATE outside of a transaction",
      async () => {
        if ((await sql.number("SELECT qty FROM stock WHERE id = 'pen' FOR UPDATE")) < 1) return;
        await sql.rows("UPDATE stock SET qty = qty - 1 WHERE id = 'pen'");
        await sql.rows(add);
      },
      async () => expect(await sql.number("SELECT count(*) FROM upload")).toBeLessThanOrEqual(1),
      /^FOR UPDATE on stock stands outside of a transaction/,
    ],
    [
      "two different names",
      (actor) =>
        sql.connected(async (on) => {
          await on.rows(`SELECT GET_LOCK('upload:${actor}', 10)`);
          try {
            if ((await on.number(sum)) + 60 <= 100) await on.rows(add);
          } finally {
            await on.rows(`SELECT RELEASE_LOCK('upload:${actor}')`);
          }
        }),
      within,
      /^Both lock something, but not the same: GET_LOCK\('upload:[AB]'\) and GET_LOCK\('upload:[AB]'\) do not exclude each other/,
    ],
    [
      "a UNIQUE constraint that is there, and fired",
      async () => {
        if ((await sql.number("SELECT count(*) FROM person WHERE email = 'ada@example.org'")) === 0)
          await sql.rows("INSERT INTO person VALUES ('ada@example.org')");
      },
      (results) =>
        expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
      /^The UNIQUE constraint (person\.)?person_email refused the second one, as it should/,
    ],
    [
      "a lock that is taken after the reading",
      () =>
        sql.connected(async (on) => {
          const n = await on.number(sum);
          await on.rows("SELECT GET_LOCK('upload', 10)");
          if (n + 60 <= 100) await on.rows(add);
          await on.rows("SELECT RELEASE_LOCK('upload')");
        }),
      within,
      /^GET_LOCK\('upload'\) \(step \d+\) was taken after upload had been read \(step \d+\)/,
    ],
    [
      "a lock that is given back before COMMIT",
      () =>
        sql.connected(async (on) => {
          await on.rows("SELECT GET_LOCK('upload', 10)");
          await on.rows("BEGIN");
          if ((await on.number(sum)) + 60 <= 100) await on.rows(add);
          await on.rows("SELECT RELEASE_LOCK('upload')");
          await on.rows("COMMIT");
        }),
      within,
      /^GET_LOCK\('upload'\) \(step \d+\) was given back \(step \d+\) before COMMIT \(step \d+\)/,
    ],
    [
      "a lock in a transaction that has read something before",
      () =>
        sql.connected(async (on) => {
          await on.rows("BEGIN");
          await on.number("SELECT qty FROM stock WHERE id = 'pen'");
          await on.rows("SELECT GET_LOCK('upload', 10)");
          if ((await on.number(sum)) + 60 <= 100) await on.rows(add);
          await on.rows("COMMIT");
          await on.rows("SELECT RELEASE_LOCK('upload')");
        }),
      within,
      /^GET_LOCK\('upload'\) \(step \d+\) was held, but the transaction reads upload \(step \d+\) as it was in step \d+/,
    ],
    [
      "a deadlock on one row that both share first",
      () =>
        sql.transaction(async (on) => {
          await on.rows("SELECT qty FROM stock WHERE id = 'pen' LOCK IN SHARE MODE");
          await on.rows("UPDATE stock SET qty = qty + 1 WHERE id = 'pen'");
        }),
      (results) =>
        expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
      /^Both share a row of stock/,
    ],
    [
      "a deadlock on a gap",
      (actor) =>
        sql.transaction(async (on) => {
          await on.rows(`SELECT qty FROM stock WHERE id = 'zoom${actor}' FOR UPDATE`);
          await on.rows(`INSERT INTO stock VALUES ('zoom${actor}', 1)`);
        }),
      (results) =>
        expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
      /^Both locked a row of stock that is not there: what they have is the gap/,
    ],
  ])("%s", async (_, act, invariant, sentence) => {
    const found = await explore("advice", {
      db: sql.db,
      reset: () =>
        sql.script(
          "DELETE FROM upload",
          "DELETE FROM person",
          "DELETE FROM stock",
          "INSERT INTO stock VALUES ('pen', 1)",
        ),
      actors: { A: () => act("A"), B: () => act("B") },
      invariant,
    });
    expect(found.ok, found.text).toBe(false);
    expect(found.fix, found.text).toMatch(sentence);
  });
});
