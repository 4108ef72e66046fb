/** Functions in which there is nothing to find, by every means that people use: none may be called a race. */
import { setTimeout as sleep } from "node:timers/promises";
import { holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { type Scenario, explore } from "holdfast/testing";
import {
  type Pool as MysqlPool,
  type PoolConnection,
  type ResultSetHeader,
  type RowDataPacket,
  createPool,
} from "mysql2/promise";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

/** With HOLDFAST_LONG it gets further. */
const maxMs = process.env["HOLDFAST_LONG"] === "1" ? 10_000 : 1000;

/** Each takes one of what there is one of; true: it got it. */
type Act = () => Promise<boolean>;

const oneGot: Scenario["invariant"] = (results) => {
  const got = Object.values(results).map((each) => (each.status === "fulfilled" ? each.value : each.reason));
  expect(got.toSorted((a, b) => Number(a) - Number(b))).toEqual([false, true]);
};

describe.each(["postgres", "postgresOld"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 8 });
    await pool.query(`
      CREATE TABLE stock (id text PRIMARY KEY, qty int NOT NULL, version int NOT NULL);
      CREATE TABLE sale (id serial PRIMARY KEY, sku text NOT NULL);
      CREATE TABLE seat (id int PRIMARY KEY, holder text);
      CREATE TABLE claim (name text PRIMARY KEY, owner text);
      CREATE TABLE mutex (name text PRIMARY KEY, owner text NOT NULL);
      CREATE TABLE doctor (name text PRIMARY KEY, on_call boolean NOT NULL);
      CREATE TABLE slot (during int4range NOT NULL, EXCLUDE USING gist (during WITH &&));
      CREATE FUNCTION take() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        PERFORM 1 FROM stock WHERE id = 'pen' FOR UPDATE;
        UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1;
        RETURN FOUND;
      END $$;
      CREATE PROCEDURE taking(INOUT got boolean) LANGUAGE plpgsql AS $$ BEGIN got := take(); END $$`);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  const reset = () =>
    pool.query(`DELETE FROM sale; DELETE FROM claim; DELETE FROM mutex; DELETE FROM stock; DELETE FROM seat; DELETE FROM doctor;
      DELETE FROM slot; INSERT INTO stock VALUES ('pen', 1, 0); INSERT INTO seat VALUES (1, NULL); INSERT INTO doctor VALUES ('a', true), ('b', true)`);

  async function inTransaction<T>(begin: string, body: (client: PoolClient) => Promise<T>): Promise<T> {
    const client = await pool.connect();
    try {
      await client.query(begin);
      const value = await body(client);
      await client.query("COMMIT");
      return value;
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  }
  const retried =
    (codes: readonly string[], body: Act, { times = 6, pauseMs = 0 } = {}): Act =>
    async () => {
      for (let left = times; ; left--)
        try {
          return await body();
        } catch (error) {
          if (left <= 1 || !codes.includes((error as { code: string }).code)) throw error;
          if (pauseMs > 0) await sleep(pauseMs);
        }
    };
  const buyWith = async (client: Pick<PoolClient, "query">, lock = "") => {
    const { rows } = await client.query(`SELECT qty FROM stock WHERE id = 'pen' ${lock}`);
    if (rows[0].qty < 1) return false;
    await client.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
    return true;
  };
  const countedSale = async (client: Pick<PoolClient, "query">) => {
    const { rows } = await client.query("SELECT count(*)::int AS n FROM sale WHERE sku = 'pen'");
    if (rows[0].n >= 1) return false;
    await client.query("INSERT INTO sale (sku) VALUES ('pen')");
    return true;
  };
  const hit = ({ rowCount }: { rowCount: number | null }) => rowCount === 1;
  const unless = async (code: string, work: Promise<unknown>): Promise<boolean> => {
    try {
      await work;
      return true;
    } catch (error) {
      if ((error as { code: string }).code === code) return false;
      throw error;
    }
  };
  const versioned: Act = async () => {
    for (;;) {
      const { rows } = await pool.query("SELECT qty, version FROM stock WHERE id = 'pen'");
      if (rows[0].qty < 1) return false;
      const done = await pool.query(
        "UPDATE stock SET qty = $1, version = version + 1 WHERE id = 'pen' AND version = $2",
        [rows[0].qty - 1, rows[0].version],
      );
      if (hit(done)) return true;
    }
  };
  /** A row that is there while somebody is at it; who finds it tries again a little later. */
  const lockTable =
    (pauseMs: number): Act =>
    async () => {
      for (let left = 5; ; left--) {
        const taken = await pool.query("INSERT INTO mutex VALUES ('pen', 'me') ON CONFLICT DO NOTHING");
        if (hit(taken)) break;
        if (left <= 1) throw new Error("The lock is taken");
        if (pauseMs > 0) await sleep(pauseMs);
      }
      try {
        return await buyWith(pool);
      } finally {
        await pool.query("DELETE FROM mutex WHERE name = 'pen'");
      }
    };
  const tryAdvisory =
    (pauseMs: number): Act =>
    async () => {
      const client = await pool.connect();
      try {
        for (let left = 6; ; left--) {
          const { rows } = await client.query("SELECT pg_try_advisory_lock(7) AS got");
          if (rows[0].got) break;
          if (left <= 1) throw new Error("The lock is taken");
          if (pauseMs > 0) await sleep(pauseMs);
        }
        try {
          return await buyWith(client);
        } finally {
          await client.query("SELECT pg_advisory_unlock(7)");
        }
      } finally {
        client.release();
      }
    };
  const rc = "BEGIN";
  const rr = "BEGIN ISOLATION LEVEL REPEATABLE READ";
  const ssi = "BEGIN ISOLATION LEVEL SERIALIZABLE";
  const refused = ["40001", "40P01"];
  const made = () => holdfast(fromPg(pool));
  let exact: ReturnType<typeof made> | undefined;
  const hf = () => (exact ??= made());

  const correct: Record<string, Act> = {
    "FOR UPDATE": () => inTransaction(rc, (client) => buyWith(client, "FOR UPDATE")),
    "FOR NO KEY UPDATE": () => inTransaction(rc, (client) => buyWith(client, "FOR NO KEY UPDATE")),
    "FOR UPDATE NOWAIT, tried again": retried(["55P03"], () =>
      inTransaction(rc, (client) => buyWith(client, "FOR UPDATE NOWAIT")),
    ),
    "FOR UPDATE NOWAIT, tried again after a pause": retried(
      ["55P03"],
      () => inTransaction(rc, (client) => buyWith(client, "FOR UPDATE NOWAIT")),
      { times: 3, pauseMs: 20 },
    ),
    "lock_timeout, tried again": retried(["55P03"], () =>
      inTransaction(rc, async (client) => {
        await client.query("SET LOCAL lock_timeout = '5s'");
        return buyWith(client, "FOR UPDATE");
      }),
    ),
    "LOCK TABLE": () =>
      inTransaction(rc, async (client) => {
        await client.query("LOCK TABLE sale IN SHARE ROW EXCLUSIVE MODE");
        return countedSale(client);
      }),
    pg_advisory_xact_lock: () =>
      inTransaction(rc, async (client) => {
        await client.query("SELECT pg_advisory_xact_lock(7)");
        return countedSale(client);
      }),
    "pg_advisory_lock, around a transaction": async () => {
      const client = await pool.connect();
      try {
        await client.query("SELECT pg_advisory_lock(7)");
        try {
          return await countedSale(client);
        } finally {
          await client.query("SELECT pg_advisory_unlock(7)");
        }
      } finally {
        client.release();
      }
    },
    "pg_try_advisory_lock, tried again": tryAdvisory(0),
    "pg_try_advisory_lock, tried again after a pause": tryAdvisory(10),
    "a lock table": lockTable(0),
    "a lock table, with a pause": lockTable(10),
    "hf.transaction with a key": () =>
      hf().transaction({ lock: key("pen") }, ({ client }) => countedSale(client)),
    "hf.lock, in a transaction": () =>
      hf().transaction({ lock: [key("pen"), key("cap")] }, ({ client }) => buyWith(client)),
    "hf.tryLock, tried again": async () => {
      for (let left = 6; left > 0; left--) {
        const ran = await hf().tryLock(key("pen"), ({ client }) => buyWith(client));
        if (ran.acquired) return ran.value;
      }
      throw new Error("busy");
    },
    "hf.hold": async () => {
      await using _ = await hf().hold(key("pen"));
      return await buyWith(pool);
    },
    "tx.rows": () =>
      hf().transaction({}, async (tx) => {
        await tx.rows("stock", ["pen"]);
        return buyWith(tx.client);
      }),
    "SERIALIZABLE, tried again": retried(refused, () => inTransaction(ssi, (client) => buyWith(client))),
    "SERIALIZABLE, a count, tried again": retried(refused, () => inTransaction(ssi, countedSale)),
    "SERIALIZABLE over two tables, tried again": retried(refused, () =>
      inTransaction(ssi, async (client) => {
        const got = await countedSale(client);
        if (got) await client.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen'");
        return got;
      }),
    ),
    "SERIALIZABLE by itself, tried again": retried(refused, async () => {
      const client = await pool.connect();
      try {
        await client.query("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE");
        return hit(
          await client.query("INSERT INTO sale (sku) SELECT 'pen' WHERE (SELECT count(*) FROM sale) < 1"),
        );
      } finally {
        await client.query("RESET default_transaction_isolation").finally(() => client.release());
      }
    }),
    "hf.transaction at SERIALIZABLE": () =>
      hf().transaction({ isolation: "serializable" }, ({ client }) => countedSale(client)),
    "REPEATABLE READ, tried again": retried(refused, () => inTransaction(rr, (client) => buyWith(client))),
    "REPEATABLE READ and FOR UPDATE, tried again": retried(refused, () =>
      inTransaction(rr, (client) => buyWith(client, "FOR UPDATE")),
    ),
    "ON CONFLICT DO NOTHING": async () =>
      hit(await pool.query("INSERT INTO claim VALUES ('pen', 'me') ON CONFLICT DO NOTHING")),
    "ON CONFLICT DO UPDATE … WHERE": async () =>
      hit(
        await pool.query(
          "INSERT INTO claim VALUES ('pen', 'me') ON CONFLICT (name) DO UPDATE SET owner = 'me' WHERE claim.owner IS NULL",
        ),
      ),
    "a unique constraint": () => unless("23505", pool.query("INSERT INTO claim VALUES ('pen', 'me')")),
    "a unique constraint, in a transaction": () =>
      unless(
        "23505",
        inTransaction(rc, async (client) => {
          await client.query("SELECT name FROM claim");
          await client.query("INSERT INTO claim VALUES ('pen', 'me')");
        }),
      ),
    "an EXCLUDE constraint": () => unless("23P01", pool.query("INSERT INTO slot VALUES (int4range(1, 5))")),
    "UPDATE … WHERE": async () =>
      hit(await pool.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1")),
    "UPDATE … WHERE … RETURNING": async () =>
      hit(await pool.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1 RETURNING qty")),
    "UPDATE … WHERE, then a sale": () =>
      inTransaction(rc, async (client) => {
        const got = hit(await client.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1"));
        if (got) await client.query("INSERT INTO sale (sku) VALUES ('pen')");
        return got;
      }),
    "UPDATE … WHERE … IS NULL": async () =>
      hit(await pool.query("UPDATE seat SET holder = 'me' WHERE id = 1 AND holder IS NULL")),
    "DELETE … RETURNING": async () => hit(await pool.query("DELETE FROM seat WHERE id = 1 RETURNING id")),
    "a claim that skips what is locked": async () =>
      hit(
        await pool.query(
          "UPDATE seat SET holder = 'me' WHERE id = (SELECT id FROM seat WHERE holder IS NULL FOR UPDATE SKIP LOCKED LIMIT 1)",
        ),
      ),
    "a claim that skips what is locked, in a transaction": () =>
      inTransaction(rc, async (client) => {
        const { rows } = await client.query(
          "SELECT id FROM seat WHERE holder IS NULL FOR UPDATE SKIP LOCKED",
        );
        if (!rows[0]) return false;
        return hit(await client.query("UPDATE seat SET holder = 'me' WHERE id = $1", [rows[0].id]));
      }),
    versions: versioned,
    "a version, tried again in a transaction": () =>
      inTransaction(rc, async (client) => {
        for (;;) {
          const { rows } = await client.query("SELECT qty, version FROM stock WHERE id = 'pen'");
          if (rows[0].qty < 1) return false;
          const done = await client.query(
            "UPDATE stock SET qty = qty - 1, version = version + 1 WHERE id = 'pen' AND version = $1",
            [rows[0].version],
          );
          if (hit(done)) return true;
        }
      }),
    "a function that locks": async () => (await pool.query("SELECT take() AS got")).rows[0].got,
    "a procedure that locks": async () => (await pool.query("CALL taking(NULL)")).rows[0].got,
    "a doctor stays on call, by a lock on all": () =>
      inTransaction(rc, async (client) => {
        const { rows } = await client.query("SELECT name FROM doctor WHERE on_call ORDER BY name FOR UPDATE");
        if (rows.length < 2) return false;
        return hit(await client.query("UPDATE doctor SET on_call = false WHERE name = $1", [rows[0].name]));
      }),
  };

  test("there are forty of them", () => expect(Object.keys(correct).length).toBeGreaterThanOrEqual(40));

  test("SERIALIZABLE, each reads what the other one writes, in another table, tried again", async () => {
    const exclude = (mine: string, other: string, besides: string): Act =>
      retried(refused, () =>
        inTransaction(ssi, async (client) => {
          const { rows } = await client.query(`SELECT count(*)::int AS n FROM ${other}`);
          if (rows[0].n > 0) return false;
          await client.query(mine);
          // Nobody else touches it, and yet it depends on what the others have ended by then.
          await client.query(besides);
          return true;
        }),
      );
    const report = await explore("exclude each other", {
      db: fromPg(pool),
      reset,
      actors: {
        A: exclude("INSERT INTO claim VALUES ('pen', 'me')", "sale", "UPDATE stock SET qty = 0"),
        B: exclude("INSERT INTO sale (sku) VALUES ('pen')", "claim", "UPDATE seat SET holder = 'me'"),
      },
      invariant: oneGot,
      maxMs,
      minCoverage: 0,
    });
    expect(report.ok, report.text).toBe(true);
  });

  test.for(Object.entries(correct))("%s", async ([name, act]) => {
    await reset();
    const alone = [await act(), await act()];
    expect(alone, "one after the other").toEqual([true, false]);
    const report = await explore(name, {
      db: fromPg(pool),
      reset,
      actors: { A: act, B: act },
      invariant: oneGot,
      maxMs,
      // How far it gets in the time depends on the machine, and not whether it calls something a race that is none.
      minCoverage: 0,
    });
    expect(report.ok, report.text).toBe(true);
  });
});

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: MysqlPool;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 8 });
    await pool.query(
      "CREATE TABLE stock (id varchar(20) PRIMARY KEY, qty int NOT NULL, version int NOT NULL)",
    );
    await pool.query("CREATE TABLE claim (name varchar(20) PRIMARY KEY)");
    await pool.query("CREATE TABLE mutex (name varchar(20) PRIMARY KEY)");
    await pool.query("CREATE TABLE sale (id int AUTO_INCREMENT PRIMARY KEY, sku varchar(20) NOT NULL)");
    await holdfast(fromMysql2(pool)).migrate();
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  const reset = async () => {
    await pool.query("DELETE FROM sale");
    await pool.query("DELETE FROM claim");
    await pool.query("DELETE FROM mutex");
    await pool.query("REPLACE INTO stock VALUES ('pen', 1, 0)");
  };
  async function inTransaction<T>(
    body: (connection: PoolConnection) => Promise<T>,
    level?: "SERIALIZABLE",
  ): Promise<T> {
    const connection = await pool.getConnection();
    try {
      if (level) await connection.query(`SET TRANSACTION ISOLATION LEVEL ${level}`);
      await connection.query("START TRANSACTION");
      const value = await body(connection);
      await connection.query("COMMIT");
      return value;
    } catch (error) {
      await connection.query("ROLLBACK");
      throw error;
    } finally {
      connection.release();
    }
  }
  const retried =
    (codes: readonly string[], body: Act): Act =>
    async () => {
      for (let left = 6; ; left--)
        try {
          return await body();
        } catch (error) {
          if (left <= 1 || !codes.includes((error as { code: string }).code)) throw error;
        }
    };
  const buyWith = async (connection: Pick<PoolConnection, "query">, lock = "") => {
    const [rows] = await connection.query<RowDataPacket[]>(`SELECT qty FROM stock WHERE id = 'pen' ${lock}`);
    const qty = Number(rows[0]?.["qty"]);
    if (qty < 1) return false;
    await connection.query("UPDATE stock SET qty = ? WHERE id = 'pen'", [qty - 1]);
    return true;
  };
  const changed = async (text: string, values: unknown[] = []) =>
    (await pool.query<ResultSetHeader>(text, values))[0].affectedRows === 1;
  const hf = () => holdfast(fromMysql2(pool));
  const polled =
    (pauseMs: number): Act =>
    async () => {
      const connection = await pool.getConnection();
      try {
        for (let left = 6; ; left--) {
          const [rows] = await connection.query<RowDataPacket[]>("SELECT GET_LOCK('pen', 0) AS got");
          if (Number(rows[0]?.["got"]) === 1) break;
          if (left <= 1) throw new Error("The lock is taken");
          if (pauseMs > 0) await sleep(pauseMs);
        }
        try {
          return await buyWith(connection);
        } finally {
          await connection.query("DO RELEASE_LOCK('pen')");
        }
      } finally {
        connection.release();
      }
    };

  const correct: Record<string, Act> = {
    "FOR UPDATE": () => inTransaction((connection) => buyWith(connection, "FOR UPDATE")),
    "FOR UPDATE NOWAIT, tried again": retried(["ER_LOCK_NOWAIT", "ER_LOCK_WAIT_TIMEOUT"], () =>
      inTransaction((connection) => buyWith(connection, "FOR UPDATE NOWAIT")),
    ),
    "UPDATE … WHERE": () => changed("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1"),
    "INSERT IGNORE": () => changed("INSERT IGNORE INTO claim VALUES ('pen')"),
    GET_LOCK: async () => {
      const connection = await pool.getConnection();
      try {
        await connection.query("SELECT GET_LOCK('pen', 10)");
        return await buyWith(connection);
      } finally {
        await connection.query("DO RELEASE_LOCK('pen')").finally(() => connection.release());
      }
    },
    versions: async () => {
      for (;;) {
        const [rows] = await pool.query<RowDataPacket[]>("SELECT qty, version FROM stock WHERE id = 'pen'");
        if (Number(rows[0]?.["qty"]) < 1) return false;
        const done = await changed(
          "UPDATE stock SET qty = qty - 1, version = version + 1 WHERE id = 'pen' AND version = ?",
          [rows[0]?.["version"]],
        );
        if (done) return true;
      }
    },
    "GET_LOCK without a wait, tried again": polled(0),
    "GET_LOCK without a wait, tried again after a pause": polled(10),
    "a lock table, with a pause": async () => {
      for (let left = 5; !(await changed("INSERT IGNORE INTO mutex VALUES ('pen')")); left--) {
        if (left <= 1) throw new Error("The lock is taken");
        await sleep(10);
      }
      try {
        return await buyWith(pool);
      } finally {
        await pool.query("DELETE FROM mutex WHERE name = 'pen'");
      }
    },
    // What is read is locked there; nothing is judged at the end, as it is on PostgreSQL.
    "SERIALIZABLE, tried again": retried(["ER_LOCK_DEADLOCK"], () =>
      inTransaction((connection) => buyWith(connection), "SERIALIZABLE"),
    ),
    "hf.transaction with a key": () =>
      hf().transaction({ lock: key("pen") }, ({ client }) => buyWith(client)),
    "a guard that counts, tried again after a deadlock": retried(["ER_LOCK_DEADLOCK"], () =>
      changed("INSERT INTO sale (sku) SELECT 'pen' FROM (SELECT count(*) AS n FROM sale) s WHERE s.n < 1"),
    ),
  };

  test.for(Object.entries(correct))("%s", async ([name, act]) => {
    await reset();
    expect([await act(), await act()], "one after the other").toEqual([true, false]);
    const report = await explore(name, {
      db: fromMysql2(pool),
      reset,
      actors: { A: act, B: act },
      invariant: oneGot,
      maxMs,
      minCoverage: 0,
    });
    expect(report.ok, report.text).toBe(true);
  });
});
