import { PrismaPg } from "@prisma/adapter-pg";
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { fromPrisma } from "holdfast/prisma";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, expect, test } from "vitest";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";

let database: TestDatabase;
let proxy: Proxy;
let url: string;

beforeAll(async () => {
  database = await createDatabase("postgres");
  proxy = await startProxy({ port: Number(new URL(database.url).port) });
  url = proxy.url(database.url);
  const pool = new Pool({ connectionString: database.url });
  await pool.query(
    "CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes integer NOT NULL)",
  );
  await pool.end();
});

afterAll(async () => {
  await proxy.close();
  await database.drop();
});

/** The third run: connections are open and statements prepared. */
async function count(run: () => Promise<unknown>): Promise<number> {
  await run();
  await run();
  proxy.resetCount();
  await run();
  return proxy.roundTrips;
}

const insert = "INSERT INTO upload (user_id, bytes) VALUES ($1, $2)";

test("a locked transaction with one statement costs 3 round trips on pg, the textbook 6", async () => {
  const pool = new Pool({ connectionString: url, max: 1 });
  const hf = holdfast(fromPg(pool));
  expect(
    await count(() => hf.transaction({ lock: key("u", 1) }, (tx) => tx.client.query(insert, ["1", 1]))),
  ).toBe(3);
  // More keys, and a transaction without any, cost no more.
  expect(
    await count(() =>
      hf.transaction({ lock: [key("u", 1), key("u", 2)] }, (tx) => tx.client.query(insert, ["1", 1])),
    ),
  ).toBe(3);
  expect(await count(() => hf.transaction((tx) => tx.client.query(insert, ["1", 1])))).toBe(3);
  expect(await count(() => hf.tryLock(key("u", 1), (tx) => tx.client.query(insert, ["1", 1])))).toBe(3);
  // A lock in the middle of the transaction, savepoint and all, is one more.
  expect(
    await count(() =>
      hf.transaction(async (tx) => {
        await tx.lock(key("u", 1));
        await tx.client.query(insert, ["1", 1]);
      }),
    ),
  ).toBe(4);

  const textbook = await count(async () => {
    const client = await pool.connect();
    await client.query("BEGIN");
    await client.query("SET LOCAL lock_timeout = '5s'");
    await client.query("SELECT pg_advisory_xact_lock(hashtext($1))", ["u1"]);
    await client.query("SET LOCAL lock_timeout = 0");
    await client.query(insert, ["1", 1]);
    await client.query("COMMIT");
    client.release();
  });
  expect(textbook).toBe(6);
  await pool.end();
});

test("… 3 on postgres.js", async () => {
  const sql = postgres(url, { max: 1 });
  const hf = holdfast(fromPostgres(sql));
  const run = () =>
    hf.transaction(
      { lock: key("u", 1) },
      (tx) => tx.client`INSERT INTO upload (user_id, bytes) VALUES (${"1"}, ${1})`,
    );
  expect(await count(run)).toBe(3);
  await sql.end();
});

test("… 4 on Prisma, which sends BEGIN alone", async () => {
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: url, max: 1 }) });
  const hf = holdfast(fromPrisma(prisma));
  const run = () =>
    hf.transaction({ lock: key("u", 1) }, (tx) =>
      tx.client.upload.create({ data: { userId: "1", bytes: 1 } }),
    );
  expect(await count(run)).toBe(4);
  await prisma.$disconnect();
});
