/** The same races as on PostgreSQL, through the clients of MySQL and MariaDB. */
import { PrismaMariaDb } from "@prisma/adapter-mariadb";
import { eq, sql as drizzleSql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/mysql2";
import { int, mysqlTable, varchar } from "drizzle-orm/mysql-core";
import { type Exploration, explore } from "holdfast/testing";
import { fromMysql2 } from "holdfast/mysql2";
import makeKnex, { type Knex } from "knex";
import { Kysely, MysqlDialect, sql } from "kysely";
import {
  type PoolConnection as MariadbConnection,
  type Pool as MariadbPool,
  createPool as createMariadbPool,
} from "mariadb";
import { createPool as createCallbackPool } from "mysql2";
import { type Pool, type PoolConnection, type RowDataPacket, createPool } from "mysql2/promise";
import { QueryTypes, Sequelize } from "sequelize";
import { DataSource } from "typeorm";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { PrismaClient } from "./generated/prisma-mysql/client.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

type Found = { used?: unknown }[];
type Run = (text: string, values: (string | number)[]) => Promise<Found>;

interface Tables {
  upload: { user_id: string; bytes: number };
}

const used = "SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = ?";
const insert = "INSERT INTO upload (user_id, bytes) VALUES (?, ?)";
const fits = (value: unknown) => Number(value) + 60 <= 100;

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  /** What was prepared in an earlier exploration is not known by its text any more. */
  let fresh: Pool;
  let mariadb: MariadbPool;
  let knex: Knex;
  let kysely: Kysely<Tables>;
  let prisma: PrismaClient;
  let sequelize: Sequelize;
  let typeorm: DataSource;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    const { url } = database;
    const mariadbUrl = `${url.replace("mysql:", "mariadb:")}?allowPublicKeyRetrieval=true&connectionLimit=4`;
    pool = createPool({ uri: url, connectionLimit: 6 });
    fresh = createPool({ uri: url, connectionLimit: 4 });
    mariadb = createMariadbPool(mariadbUrl);
    knex = makeKnex({ client: "mysql2", connection: url, pool: { min: 0, max: 4 } });
    kysely = new Kysely({
      dialect: new MysqlDialect({ pool: createCallbackPool({ uri: url, connectionLimit: 4 }) }),
    });
    prisma = new PrismaClient({
      adapter: new PrismaMariaDb(mariadbUrl),
      transactionOptions: { maxWait: 60_000, timeout: 60_000 },
    });
    sequelize = new Sequelize(url, { pool: { max: 4 }, logging: false });
    typeorm = await new DataSource({ type: "mysql", url, poolSize: 4 }).initialize();
    await pool.query(
      "CREATE TABLE upload (id int AUTO_INCREMENT PRIMARY KEY, user_id varchar(20) NOT NULL, bytes int NOT NULL)",
    );
    await pool.query("CREATE TABLE ballast (n int)");
    await pool.query("CREATE TABLE stock (id varchar(20) PRIMARY KEY, qty int NOT NULL)");
    await pool.query("CREATE TABLE account (id varchar(20) PRIMARY KEY, balance int NOT NULL)");
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  afterAll(async () => {
    await Promise.all([
      pool?.end(),
      fresh?.end(),
      mariadb?.end(),
      knex?.destroy(),
      kysely?.destroy(),
      prisma?.$disconnect(),
      sequelize?.close(),
      typeorm?.destroy(),
    ]);
    await database?.drop();
  });

  const reset = async () => {
    await pool.query("DELETE FROM upload");
    await pool.query("DELETE FROM ballast");
    await pool.query("REPLACE INTO stock VALUES ('pen', 1)");
    await pool.query("REPLACE INTO account VALUES ('a', 10), ('b', 10)");
  };

  async function number(query: string): Promise<number> {
    const [[row]] = await pool.query<RowDataPacket[]>(query);
    return Number(row?.["n"]);
  }

  async function inTransaction<T>(body: (connection: PoolConnection) => Promise<T>, from = pool): Promise<T> {
    const connection = await from.getConnection();
    try {
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

  async function onMariadb(body: (connection: MariadbConnection) => Promise<void>): Promise<void> {
    const connection = await mariadb.getConnection();
    try {
      await connection.beginTransaction();
      await body(connection);
      await connection.commit();
    } finally {
      // It rolls back what is still open.
      await connection.release();
    }
  }

  /** Two of the same, at the same time. */
  function twice(
    act: () => Promise<unknown>,
    invariant: () => Promise<void>,
    more: { replay?: string } = {},
  ): Promise<Exploration> {
    return explore("twice", { db: fromMysql2(pool), reset, actors: { A: act, B: act }, invariant, ...more });
  }

  const uploadsFit = async () =>
    expect(await number("SELECT coalesce(sum(bytes), 0) AS n FROM upload")).toBeLessThanOrEqual(100);
  const soldOnce = async () => {
    const left = await number("SELECT qty AS n FROM stock");
    expect([left, await number("SELECT count(*) AS n FROM upload")]).toEqual([0, 1]);
  };

  describe("an upload that checks the quota, then writes", () => {
    const table = mysqlTable("upload", {
      userId: varchar("user_id", { length: 20 }).notNull(),
      bytes: int().notNull(),
    });
    const clients = {
      "mysql2, query": () =>
        inTransaction(async (connection) => {
          const [[row]] = await connection.query<RowDataPacket[]>(used, ["u"]);
          if (fits(row?.["used"])) await connection.query(insert, ["u", 60]);
        }),
      "mysql2, execute": () =>
        inTransaction(async (connection) => {
          const [[row]] = await connection.execute<RowDataPacket[]>(used, ["u"]);
          if (fits(row?.["used"])) await connection.execute(insert, ["u", 60]);
        }),
      "mariadb, query": () =>
        onMariadb(async (connection) => {
          const [row] = await connection.query<{ used: unknown }[]>(used, ["u"]);
          if (fits(row?.used)) await connection.query(insert, ["u", 60]);
        }),
      "mariadb, execute": () =>
        onMariadb(async (connection) => {
          const [row] = await connection.execute<{ used: unknown }[]>(used, ["u"]);
          if (fits(row?.used)) await connection.execute(insert, ["u", 60]);
        }),
      knex: () =>
        knex.transaction(async (trx) => {
          const found = await trx("upload").where({ user_id: "u" }).sum({ used: "bytes" }).first();
          if (fits(found?.["used"])) await trx("upload").insert({ user_id: "u", bytes: 60 });
        }),
      drizzle: () =>
        drizzle(pool).transaction(async (tx) => {
          const [row] = await tx
            .select({ used: drizzleSql<number>`coalesce(sum(bytes), 0)` })
            .from(table)
            .where(eq(table.userId, "u"));
          if (fits(row?.used)) await tx.insert(table).values({ userId: "u", bytes: 60 });
        }),
      kysely: () =>
        kysely.transaction().execute(async (tx) => {
          const row = await tx
            .selectFrom("upload")
            .select(sql<number>`coalesce(sum(bytes), 0)`.as("used"))
            .where("user_id", "=", "u")
            .executeTakeFirst();
          if (fits(row?.used)) await tx.insertInto("upload").values({ user_id: "u", bytes: 60 }).execute();
        }),
      typeorm: () =>
        typeorm.transaction(async (manager) => {
          const [row] = await manager.query<{ used: unknown }[]>(used, ["u"]);
          if (fits(row?.used)) await manager.query(insert, ["u", 60]);
        }),
      prisma: () =>
        prisma.$transaction(async (tx) => {
          const { _sum } = await tx.upload.aggregate({ where: { userId: "u" }, _sum: { bytes: true } });
          if (fits(_sum.bytes ?? 0)) await tx.upload.create({ data: { userId: "u", bytes: 60 } });
        }),
      sequelize: () =>
        sequelize.transaction(async (transaction) => {
          const [row] = await sequelize.query<{ used: unknown }>(used, {
            replacements: ["u"],
            transaction,
            type: QueryTypes.SELECT,
          });
          if (fits(row?.used)) await sequelize.query(insert, { replacements: ["u", 60], transaction });
        }),
    };

    test.for(Object.entries(clients))("leaks: %s", async ([, act]) => {
      const report = await twice(act, uploadsFit);
      expect(report.text).toContain("Replay:");
      expect(report.text).toMatch(/select [^\n]*sum\([^\n]* → [\s\S]*switch[\s\S]*insert into/i);
      expect({ ok: report.ok, few: report.runs <= 20, preemptions: report.preemptions }).toEqual({
        ok: false,
        few: true,
        preemptions: 1,
      });
      // What it found can be had again.
      for (let i = 0; i < 3; i++)
        expect(await twice(act, uploadsFit, { replay: report.replay as string })).toMatchObject({
          ok: false,
          runs: 1,
        });
    });

    /** SERIALIZABLE locks what is read, so that one of the two is ended: the one that has written less. */
    test.for(["mysql2, query", "mysql2, execute", "mariadb, query"] as const)(
      "at another isolation level: %s",
      async (client) => {
        const body = (ballast: boolean) => async (run: Run) => {
          if (ballast) await run(`INSERT INTO ballast VALUES ${Array(20).fill("(1)").join()}`, []);
          const [row] = await run(used, ["u"]);
          if (fits(row?.used)) await run(insert, ["u", 60]);
        };
        const acts = {
          "mysql2, query": (ballast: boolean) =>
            inTransaction((connection) =>
              body(ballast)(async (text, values) => (await connection.query(text, values))[0] as Found),
            ),
          "mysql2, execute": (ballast: boolean) =>
            inTransaction(
              (connection) =>
                body(ballast)(async (text, values) => (await connection.execute(text, values))[0] as Found),
              fresh,
            ),
          "mariadb, query": (ballast: boolean) =>
            onMariadb((connection) => body(ballast)((text, values) => connection.query(text, values))),
        };
        const act = acts[client];
        const report = await explore(client, {
          db: fromMysql2(pool),
          reset,
          actors: { A: () => act(true), B: () => act(false) },
          invariant: uploadsFit,
          isolation: ["serializable", "read committed"],
          maxMs: 60_000,
        });
        expect(report).toMatchObject({ ok: false, preemptions: 1, isolation: "read committed" });
        expect(report.levels).toMatchObject([{ isolation: "serializable", coverage: "exhaustive" }]);
      },
    );

    test("without a reset of one's own", async () => {
      await reset();
      const report = await explore("kept", {
        db: fromMysql2(pool),
        actors: { A: clients["mysql2, query"], B: clients["mysql2, query"] },
        invariant: uploadsFit,
      });
      expect(report).toMatchObject({ ok: false, preemptions: 1 });
      expect(await number("SELECT count(*) AS n FROM stock")).toBe(1);
    });
  });

  const overTls = async () => {
    const secure = createPool({ uri: database.url, connectionLimit: 4, ssl: { rejectUnauthorized: false } });
    try {
      const act = async () => {
        const [[row]] = await secure.execute<RowDataPacket[]>(used, ["u"]);
        if (fits(row?.["used"])) await secure.execute(insert, ["u", 60]);
      };
      expect(await twice(act, uploadsFit)).toMatchObject({ ok: false, preemptions: 1 });
    } finally {
      await secure.end();
    }
  };
  // The other one comes without a certificate.
  test.for(server === "mysql" ? ["over TLS"] : [])("%s", overTls);

  describe("stock that is read, then written", () => {
    const sell = async (connection: PoolConnection, query: string) => {
      const [[row]] = await connection.query<RowDataPacket[]>(query);
      const qty = Number(row?.["qty"]);
      if (qty < 1) return;
      await connection.query("UPDATE stock SET qty = ? WHERE id = 'pen'", [qty - 1]);
      await connection.query(insert, ["order", 1]);
    };

    test("is sold twice", async () => {
      const naive = () =>
        inTransaction((connection) => sell(connection, "SELECT qty FROM stock WHERE id = 'pen'"));
      const report = await twice(naive, soldOnce);
      expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "lost update" });
    });

    test("without a switch, it is said what was never interleaved", async () => {
      const naive = () =>
        inTransaction((connection) => sell(connection, "SELECT qty FROM stock WHERE id = 'pen'"));
      const actors = { A: naive, B: naive };
      const invariant = () => {};
      const report = await explore("serial", {
        db: fromMysql2(pool),
        reset,
        actors,
        invariant,
        preemptions: 0,
      });
      expect(report).toMatchObject({ ok: true, coverage: { bounded: 0 } });
      expect(report.unexplored).toContainEqual({
        table: "stock",
        statements: [
          { actor: "A", statement: expect.stringMatching(/^SELECT qty/), place: expect.any(String) },
          { actor: "B", statement: expect.stringMatching(/^UPDATE/), place: expect.any(String) },
        ],
      });
    });

    test("and with FOR UPDATE, whose waits are seen, it is not", async () => {
      const locked = () =>
        inTransaction((connection) =>
          // MySQL's information_schema cannot show it.
          sell(connection, "SELECT qty FROM stock WHERE id = 'pen' AND id <> '😀' FOR UPDATE"),
        );
      expect(await twice(locked, soldOnce)).toMatchObject({ ok: true, coverage: "exhaustive" });
    });

    /** Its name is in the text of the statement, or in a parameter, where MariaDB does not show it. */
    test.for([
      ["written out", "SELECT GET_LOCK('pen', 10)"],
      ["a parameter", "SELECT GET_LOCK(?, 10)"],
    ] as const)("nor with GET_LOCK, whose name is %s", async ([, take]) => {
      const locked = async () => {
        const connection = await pool.getConnection();
        try {
          await connection.execute(take, take.includes("?") ? ["pen"] : []);
          await sell(connection, "SELECT qty FROM stock WHERE id = 'pen'");
          await connection.execute("DO RELEASE_LOCK('pen')");
        } finally {
          connection.release();
        }
      };
      expect(await twice(locked, soldOnce)).toMatchObject({ ok: true, coverage: "exhaustive" });
    });
  });

  test("transfers in both directions deadlock, and it is seen in which order", async () => {
    const transfer = (from: string, to: string) => () =>
      inTransaction(async (connection) => {
        await connection.query("UPDATE account SET balance = balance - 1 WHERE id = ?", [from]);
        await connection.query("UPDATE account SET balance = balance + 1 WHERE id = ?", [to]);
      });
    const report = await explore("transfers", {
      db: fromMysql2(pool),
      reset,
      actors: { A: transfer("a", "b"), B: transfer("b", "a") },
      invariant: (results) =>
        expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
    });
    expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "deadlock" });
    expect(report.text).toMatch(/waits for [AB][\s\S]*Deadlock found/);
  });
});
