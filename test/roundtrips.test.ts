import { PrismaPg } from "@prisma/adapter-pg";
import { holdfast, key, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { fromPrisma } from "holdfast/prisma";
import { execute } from "holdfast/testing";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";
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
async function count(run: () => Promise<unknown>, through = proxy): Promise<number> {
  await run();
  await run();
  through.resetCount();
  await run();
  return through.roundTrips;
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
        await tx.client.query(insert, ["1", 1]);
        await tx.lock(key("u", 1));
      }),
    ),
  ).toBe(4);
  // As the first thing in it, it carries BEGIN.
  expect(
    await count(() =>
      hf.transaction(async (tx) => {
        await tx.lock(key("u", 1));
        await tx.client.query(insert, ["1", 1]);
      }),
    ),
  ).toBe(3);

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
  const client = postgres(url, { max: 1 });
  const hf = holdfast(fromPostgres(client));
  const run = () =>
    hf.transaction(
      { lock: key("u", 1) },
      (tx) => tx.client`INSERT INTO upload (user_id, bytes) VALUES (${"1"}, ${1})`,
    );
  expect(await count(run)).toBe(3);
  await client.end();
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

test.for([
  ["Drizzle", 3],
  ["Kysely with its pool", 3],
  ["Kysely", 4],
  ["Knex", 3],
  ["TypeORM", 3],
  ["MikroORM", 3],
  ["Sequelize", 3],
  ["mysql2 on MySQL", 3],
  ["mysql2 on MariaDB", 3],
] as const)("… on %s: %i", async ([name, trips], { skip }) => {
  const backend = backendNamed(name);
  skip(missing(backend) !== undefined, missing(backend));
  const place = await placeFor(backend);
  const own = await startProxy({ port: Number(new URL(place.url).port) });
  const site = await backend.open(own.url(place.url));
  const hf = holdfast(site.database);
  try {
    await hf.migrate();
    await execute(site, sql`CREATE TABLE upload (user_id varchar(40) NOT NULL)`);
    const run = () =>
      hf.transaction({ lock: key("u", 1) }, (tx) => tx.query(sql`INSERT INTO upload VALUES (${"1"})`));
    expect(await count(run, own)).toBe(trips);
  } finally {
    await hf.close();
    await site.close();
    await own.close();
    await place.drop();
  }
});
