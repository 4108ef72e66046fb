/** What befalls a handler in the middle of what it does: one that is not prepared for it fails, with `once` it passes. */
import { type Holdfast, type Lease, fenced, holdfast, key, once } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type FaultKind, explore } from "holdfast/testing";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  // Sessions are ended on purpose.
  pool.on("error", () => {});
  hf = holdfast(fromPg(pool));
  await hf.migrate();
  await pool.query("CREATE TABLE payment (id serial PRIMARY KEY, amount int NOT NULL)");
  await pool.query("CREATE TABLE account (id text PRIMARY KEY, balance int NOT NULL)");
});

afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
});

const reset = () =>
  pool.query(
    "DELETE FROM payment; DELETE FROM account; DELETE FROM holdfast.once; DELETE FROM holdfast.lease; INSERT INTO account VALUES ('ada', 0)",
  );

async function one(query: string): Promise<number> {
  return Number((await pool.query(query)).rows[0]?.n);
}

/** Somebody has paid 10, once. */
const paidOnce = async () => {
  expect(await one("SELECT count(*) AS n FROM payment")).toBe(1);
  expect(await one("SELECT balance AS n FROM account")).toBe(10);
};

const pay = ["INSERT INTO payment (amount) VALUES (10)", "UPDATE account SET balance = balance + 10"];

async function naive(): Promise<void> {
  const client = await pool.connect();
  let failed = true;
  try {
    await client.query("BEGIN");
    for (const statement of pay) await client.query(statement);
    await client.query("COMMIT");
    failed = false;
  } finally {
    client.release(failed);
  }
}

const withOnce = () =>
  once(hf, "message 7", async (tx) => {
    for (const statement of pay) await tx.client.query(statement);
  });

const explored = (act: () => Promise<unknown>, faults: readonly FaultKind[], replay?: string) =>
  explore("handler", {
    db: fromPg(pool),
    reset,
    actors: { handler: act },
    invariant: paidOnce,
    faults,
    maxMs: 20_000,
    ...(replay === undefined ? {} : { replay }),
  });

describe.each<[FaultKind, RegExp, RegExp]>([
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
])("%s", (kind, told, fix) => {
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

test("what is done in several steps stays half done", async () => {
  const steps = async () => {
    for (const statement of pay) await pool.query(statement);
  };
  const found = await explored(steps, ["crash"]);
  expect(found, found.text).toMatchObject({ ok: false, replay: expect.stringMatching(/c/) });
});

describe("a lease that is lost while its holder pauses", () => {
  const counted = async (write: (n: number, lease: Lease) => Promise<unknown>) => {
    const lease = await hf.lease(key("report"), { wait: 30_000, renew: false, ttl: 60_000 });
    try {
      const n = await one("SELECT balance AS n FROM account");
      await write(n + 1, lease);
    } finally {
      await lease.release().catch(() => {});
    }
  };
  const text = (n: number) => `UPDATE account SET balance = ${n}`;
  const run = (act: () => Promise<unknown>, faults: readonly FaultKind[]) =>
    explore("lease", {
      db: fromPg(pool),
      reset,
      actors: { A: act, B: act },
      invariant: async (results) => {
        const done = Object.values(results).filter(({ status }) => status === "fulfilled").length;
        expect(await one("SELECT balance AS n FROM account")).toBe(done);
      },
      faults,
      preemptions: 0,
      minCoverage: 0,
      maxMs: 60_000,
    });

  test("the late write is a lost update", async () => {
    const found = await run(() => counted((n) => pool.query(text(n))), ["pause", "expired lease"]);
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
