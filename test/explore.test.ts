/** Races that people have published, as they would have been written, and their fixes. */
import { PrismaPg } from "@prisma/adapter-pg";
import { eq, sql as drizzleSql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { integer, pgTable, text } from "drizzle-orm/pg-core";
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { expectNoRace, explore } from "holdfast/testing";
import makeKnex, { type Knex } from "knex";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;
let knex: Knex;
let prisma: PrismaClient;
let sql: postgres.Sql;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  knex = makeKnex({ client: "pg", connection: database.url, pool: { min: 0, max: 4 } });
  prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url, max: 4 }) });
  sql = postgres(database.url, { max: 4, onnotice: () => {} });
  await pool.query(`
    CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL);
    CREATE TABLE voucher (code text PRIMARY KEY, uses int NOT NULL);
    CREATE TABLE stock (id text PRIMARY KEY, qty int NOT NULL);
    CREATE TABLE account (id text PRIMARY KEY, balance int NOT NULL)`);
});

afterAll(async () => {
  await Promise.all([pool?.end(), knex?.destroy(), prisma?.$disconnect(), sql?.end()]);
  await database?.drop();
});

const reset = () =>
  pool.query(`DELETE FROM upload; DELETE FROM voucher; DELETE FROM stock; DELETE FROM account;
    INSERT INTO voucher VALUES ('v', 1); INSERT INTO stock VALUES ('pen', 1);
    INSERT INTO account VALUES ('a', 10), ('b', 10)`);

async function number(query: string): Promise<number> {
  return Number((await pool.query(query)).rows[0].n);
}

/** Two of the same, at the same time. */
function twice(act: () => Promise<unknown>, check: () => Promise<void>, more: { replay?: string } = {}) {
  return explore("twice", {
    db: fromPg(pool),
    reset,
    actors: { A: act, B: act },
    invariant: check,
    ...more,
  });
}

const uploadsFit = async () =>
  expect(await number("SELECT sum(bytes) AS n FROM upload")).toBeLessThanOrEqual(100);
const neverBelowZero = async () => {
  const n = await number("SELECT min(qty) AS n FROM stock");
  const sold = await number("SELECT count(*) AS n FROM upload");
  expect([n >= 0, sold <= 1]).toEqual([true, true]);
};

describe("an upload that checks the quota, then writes", () => {
  const onPg = async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      const { rows } = await client.query(
        "SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = $1",
        ["u"],
      );
      if (Number(rows[0].used) + 60 <= 100)
        await client.query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", ["u", 60]);
      await client.query("COMMIT");
    } finally {
      client.release();
    }
  };
  const onKnex = () =>
    knex.transaction(async (trx) => {
      const found = await trx("upload").where({ user_id: "u" }).sum({ used: "bytes" }).first();
      if (Number(found?.["used"]) + 60 <= 100) await trx("upload").insert({ user_id: "u", bytes: 60 });
    });
  const onPrisma = () =>
    prisma.$transaction(async (tx) => {
      const { _sum } = await tx.upload.aggregate({ where: { userId: "u" }, _sum: { bytes: true } });
      if ((_sum.bytes ?? 0) + 60 <= 100) await tx.upload.create({ data: { userId: "u", bytes: 60 } });
    });
  const onPostgres = () =>
    sql.begin(async (tx) => {
      const [row] = await tx`SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = 'u'`;
      if (Number(row?.["used"]) + 60 <= 100) await tx`INSERT INTO upload (user_id, bytes) VALUES ('u', 60)`;
    });
  const upload = pgTable("upload", { userId: text("user_id").notNull(), bytes: integer().notNull() });
  const onDrizzle = () =>
    drizzle(pool).transaction(async (tx) => {
      const [row] = await tx
        .select({ used: drizzleSql<number>`coalesce(sum(bytes), 0)` })
        .from(upload)
        .where(eq(upload.userId, "u"));
      if (Number(row?.used) + 60 <= 100) await tx.insert(upload).values({ userId: "u", bytes: 60 });
    });

  test.for(Object.entries({ onPg, onKnex, onPrisma, onPostgres, onDrizzle }))(
    "leaks: %s",
    async ([, act]) => {
      const report = await twice(act, uploadsFit);
      expect(report.text).toContain("Replay:");
      expect({ ok: report.ok, few: report.runs <= 20, preemptions: report.preemptions }).toEqual({
        ok: false,
        few: true,
        preemptions: 1,
      });
      // What it found can be had again.
      for (let i = 0; i < 5; i++)
        expect(await twice(act, uploadsFit, { replay: report.replay as string })).toMatchObject({
          ok: false,
          runs: 1,
        });
    },
  );

  test("with its lock it does not", async () => {
    const hf = holdfast(fromPg(pool));
    const exact = () =>
      hf.transaction({ lock: key("upload", "u") }, async ({ client }) => {
        const { rows } = await client.query(
          "SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = $1",
          ["u"],
        );
        if (Number(rows[0].used) + 60 <= 100)
          await client.query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", ["u", 60]);
      });
    // What it asks once.
    await exact();
    expect(await twice(exact, uploadsFit)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});

describe("stock that is read, then written", () => {
  const naive = async () => {
    const { rows } = await pool.query("SELECT qty FROM stock WHERE id = 'pen'");
    if (rows[0].qty < 1) return;
    await pool.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
    await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
  };
  const fixed = async () => {
    const { rowCount } = await pool.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1");
    if (rowCount === 1) await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
  };

  test("is sold twice", async () => {
    await expect(
      expectNoRace({ db: fromPg(pool), reset, actors: { A: naive, B: naive }, invariant: neverBelowZero }),
    ).rejects.toThrow(/switch[\s\S]*SELECT qty[\s\S]*Replay/);
  });

  test("and with a guard in the write it is not", async () => {
    expect(await twice(fixed, neverBelowZero)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });

  test("nor with FOR UPDATE, whose waits are seen", async () => {
    const locked = async () => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        const { rows } = await client.query("SELECT qty FROM stock WHERE id = 'pen' FOR UPDATE");
        if (rows[0].qty >= 1) {
          await client.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
          await client.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
        }
        await client.query("COMMIT");
      } finally {
        client.release();
      }
    };
    expect(await twice(locked, neverBelowZero)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});

test("transfers in both directions deadlock, and it is seen in which order", async () => {
  const transfer = (from: string, to: string) => async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      await client.query("UPDATE account SET balance = balance - 1 WHERE id = $1", [from]);
      await client.query("UPDATE account SET balance = balance + 1 WHERE id = $1", [to]);
      await client.query("COMMIT");
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  };
  const report = await explore("transfers", {
    db: fromPg(pool),
    reset,
    actors: { A: transfer("a", "b"), B: transfer("b", "a") },
    invariant: (results) =>
      expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
  });
  expect(report).toMatchObject({ ok: false, preemptions: 1 });
  expect(report.text).toMatch(/waits for [AB][\s\S]*deadlock detected/);
});
