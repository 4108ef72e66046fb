/** What looks like a green run, and in which nothing was tested, fails with its reason. */
import { once } from "node:events";
import { type Server, createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { fromPg } from "holdfast/pg";
import { RaceError, type Scenario, expectNoRace, explore } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;
let server: Server;
let origin: string;

/** Check, then write. */
async function buy(from: Pool): Promise<boolean> {
  const { rows } = await from.query("SELECT qty FROM stock");
  if (rows[0].qty < 1) return false;
  await from.query("UPDATE stock SET qty = $1", [rows[0].qty - 1]);
  return true;
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 6 });
  await pool.query("CREATE TABLE stock (qty int NOT NULL); INSERT INTO stock VALUES (1)");
  server = createServer((request, response) => {
    const parts: Buffer[] = [];
    request.on("data", (part: Buffer) => parts.push(part));
    // The body arrives in the context of the connection, not of the request.
    request.on("end", () => {
      const answer = (bought: boolean) =>
        response.end(JSON.stringify({ bought, bytes: Buffer.concat(parts).length }));
      void (request.url === "/exact" ? atomic() : buy(pool)).then(answer);
    });
  });
  await once(server.listen(0, "127.0.0.1"), "listening");
  origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
});
afterAll(async () => {
  server?.close();
  server?.closeAllConnections();
  await pool?.end();
  await database?.drop();
});

const atomic = async () => (await pool.query("UPDATE stock SET qty = qty - 1 WHERE qty >= 1")).rowCount === 1;
const reset = () => pool.query("UPDATE stock SET qty = 1");
const once1: Scenario["invariant"] = (results) =>
  expect(Object.values(results).filter((each) => each.status === "fulfilled" && each.value).length).toBe(1);
const twice = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
  explore("twice", { db: fromPg(pool), reset, actors: { A: act, B: act }, invariant: once1, ...more });

test("every actor throws", async () => {
  const act = async () => {
    await pool.query("SELECT qty FROM stok");
  };
  await expect(twice(act, { invariant: () => {} })).rejects.toThrow(
    /every actor threw in every run.*A: relation "stok" does not exist/,
  );
});

test("the invariant returns false", async () => {
  const invariant = async () => (await pool.query("SELECT qty FROM stock")).rows[0].qty === 7;
  const report = await twice(() => buy(pool), { invariant });
  expect(report).toMatchObject({ ok: false, error: { message: "the invariant returned false" } });
});

test.for(["GET", "POST"])(
  "requests to a server in this process are the actor's who sent them: %s",
  async (method) => {
    const ask = (path: string) => async () => {
      const answer = await fetch(`${origin}${path}`, {
        method,
        ...(method === "POST" ? { body: "x".repeat(200_000) } : {}),
      });
      return ((await answer.json()) as { bought: boolean }).bought;
    };
    expect(await twice(ask("/naive"))).toMatchObject({ ok: false, preemptions: 1, anomaly: "lost update" });
    expect(await twice(ask("/exact"))).toMatchObject({ ok: true, coverage: "exhaustive" });
  },
);

test("no statement is seen", async () => {
  await expect(twice(async () => true, { invariant: () => {} })).rejects.toThrow(
    /no statement of A, B was seen/,
  );
  await expect(
    explore("one", {
      db: fromPg(pool),
      reset,
      actors: { A: atomic, B: async () => true },
      invariant: () => {},
    }),
  ).rejects.toThrow(/no statement of B was seen/);
});

test("the pool is one too small", async () => {
  const small = new Pool({ connectionString: database.url, max: 2 });
  const act = async () => {
    const client = await small.connect();
    try {
      await client.query("BEGIN");
      const { rows } = await client.query("SELECT qty FROM stock");
      if (rows[0].qty >= 1) await client.query("UPDATE stock SET qty = $1", [rows[0].qty - 1]);
      await client.query("COMMIT");
      return rows[0].qty >= 1;
    } finally {
      client.release();
    }
  };
  try {
    await expect(twice(act, { db: fromPg(small) })).rejects.toThrow(
      /never had a statement.*too few connections/,
    );
  } finally {
    await small.end();
  }
});

test("a timer keeps them apart", async () => {
  await expect(
    explore("apart", {
      db: fromPg(pool),
      reset,
      actors: { A: atomic, B: () => sleep(300).then(atomic) },
      invariant: once1,
    }),
  ).rejects.toThrow(/keeps them apart/);
});

test("too little time for one switch", async () => {
  const many = async () => {
    for (let i = 0; i < 12; i++) await pool.query(`UPDATE stock SET qty = qty + ${i}`);
  };
  await expect(twice(many, { maxMs: 1, invariant: () => {} })).rejects.toThrow(
    /not all orders with one switch between each two actors were tried.*`maxMs`/,
  );
});

test("less than was asked for, and what that is", async () => {
  const act = async () => {
    for (let i = 0; i < 6; i++) await pool.query("UPDATE stock SET qty = qty + 1");
  };
  const invariant = () => {};
  await expect(twice(act, { invariant, maxMs: 2000, minCoverage: "exhaustive" })).rejects.toThrow(
    /not all orders/,
  );
  await expect(twice(act, { invariant, minCoverage: -1 })).rejects.toThrow(/minCoverage/);
  expect(await twice(atomic, { minCoverage: "exhaustive" })).toMatchObject({ ok: true });
});

test("what was tried, deadlocks and errors are said of a green one too", async () => {
  await pool.query(
    "CREATE TABLE account (id int PRIMARY KEY, n int); INSERT INTO account VALUES (1, 0), (2, 0)",
  );
  const move = (a: number, b: number) => async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      await client.query("UPDATE account SET n = n + 1 WHERE id = $1", [a]);
      await client.query("UPDATE account SET n = n + 1 WHERE id = $1", [b]);
      await client.query("COMMIT");
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  };
  const said: string[] = [];
  const report = await expectNoRace(fromPg(pool), [move(1, 2), move(2, 1)], () => {}, {
    reset: async () => {},
    name: "moves",
    maxMs: 30_000,
    report: (text) => said.push(text),
  });
  expect(report.deadlocks).toBeGreaterThan(0);
  expect(said).toEqual([report.text]);
  expect(report.text).toMatch(
    /✓ moves: \d+ runs, exhaustive; \d+ runs with a deadlock; .* threw in some: deadlock detected/,
  );
  await expect(
    expectNoRace(fromPg(pool), [() => buy(pool), () => buy(pool)], once1, {
      reset,
      report: (text) => said.push(text),
    }),
  ).rejects.toThrow(RaceError);
  expect(said.length).toBe(1);
});
