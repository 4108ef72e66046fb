/** Who holds what on PostgreSQL: names, chains, and nothing that is a secret. */
import { type Holdfast, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 10, application_name: "shop" });
  hf = holdfast(fromPg(pool));
  await pool.query("CREATE TABLE item (id integer PRIMARY KEY, n integer); INSERT INTO item VALUES (1, 0)");
});

afterAll(async () => {
  await pool.end();
  await database.drop();
});

test("a chain of three, by key and by row", async () => {
  let release!: () => void;
  const done = new Promise<void>((resolve) => (release = resolve));
  let enter!: () => void;
  const inside = new Promise<void>((resolve) => (enter = resolve));
  const first = hf.transaction({ lock: key("upload", 42) }, async (tx) => {
    await tx.row("item", 1);
    enter();
    await done;
  });
  await inside;
  const second = hf.transaction({ lock: key("report") }, async (tx) => {
    await tx.row("item", 1, { wait: 60_000 });
  });
  await eventually(async () => (await hf.inspect()).waiters.length === 1);
  const third = hf.transaction({ lock: key("report"), wait: 60_000 }, async () => {});
  try {
    const seen = await eventually(async () => {
      const inspection = await hf.inspect();
      return inspection.waiters.length === 2 && inspection.chains.length === 1 && inspection;
    });
    if (!seen) throw new Error("never seen");
    const names = seen.holders.map(({ name }) => name);
    expect(names).toEqual(
      expect.arrayContaining([expect.stringContaining("upload:42"), expect.stringContaining("report")]),
    );
    const [chain] = seen.chains;
    expect(chain?.session).toMatchObject({ application: "shop", state: "idle in transaction" });
    expect(chain?.session.since).toBeInstanceOf(Date);
    expect(chain?.waiters).toHaveLength(1);
    expect(chain?.waiters[0]?.waiters).toHaveLength(1);
    for (const { waitingMs, blockedBy } of seen.waiters) {
      expect(waitingMs).toBeGreaterThanOrEqual(0);
      expect(blockedBy).toHaveLength(1);
    }
  } finally {
    release();
    await Promise.all([first, second, third]);
  }
  await eventually(async () => (await hf.inspect()).holders.length === 0);
  expect(await hf.inspect()).toEqual({ holders: [], waiters: [], chains: [] });
});
