/** Who holds what on PostgreSQL: names, chains, and nothing that is a secret. */
import { type Holdfast, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { Client, Pool, type PoolClient } from "pg";
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

const hashOf = (...parts: [string, ...string[]]) => {
  const { form } = key(...parts);
  return `bigint ${form.kind === "name" && form.hash}`;
};

/** Names of the advisory locks of the session whose application begins with this, while it is inside. */
async function namesIn(application: string, statements: readonly string[]): Promise<[string[], string]> {
  const client = new Client({ connectionString: database.url, application_name: application });
  await client.connect();
  try {
    for (const statement of statements) await client.query(statement);
    const { holders } = await hf.inspect();
    const mine = holders.filter(({ session }) =>
      session.application.startsWith(application.split(" ")[0] ?? ""),
    );
    return [mine.map(({ name }) => name).toSorted(), mine[0]?.session.application ?? ""];
  } finally {
    await client.end();
  }
}

test("a label names the lock that it hashes to, and no other", async () => {
  const take = (id: string) => `SELECT pg_advisory_lock(${id.replace("bigint ", "")})`;
  const upload = hashOf("upload", "42");
  // Among others; of three keys; and shared.
  for (const label of ["api [hf:upload:42]", "api [hf:upload:42 +2]", "api [hf:upload:42 (shared)]"])
    expect(await namesIn(label, [take(upload), take("5"), "SELECT pg_advisory_lock(1, 2)"])).toEqual([
      ["bigint 5", "int 1,2", `upload:42 (${upload})`],
      "api",
    ]);
  // A part that has a colon in it.
  const colon = hashOf("a:b", "c");
  expect(await namesIn("api [hf:a:b:c]", [take(colon), take("5")])).toEqual([
    [`a:b:c (${colon})`, "bigint 5"],
    "api",
  ]);
  // A label of something else is left where it was.
  expect(await namesIn("api [hf:upload:42]", [take("5")])).toEqual([["bigint 5"], "api [hf:upload:42]"]);
  // One that was cut is right if there is one lock; of two nobody knows.
  const long = `api [hf:${"x".repeat(80)}`;
  const cut = long.slice(8, 63);
  expect(await namesIn(long, [take("5")])).toEqual([[`${cut} (bigint 5)`], "api"]);
  expect((await namesIn(long, [take("5"), take("6")]))[0]).toEqual(["bigint 5", "bigint 6"]);
  // So is one that has lost characters, and none that has not.
  expect(await namesIn("api [hf:gr??e]", [take("5")])).toEqual([["gr??e (bigint 5)"], "api"]);
});

test("who waits without a label has the holder's name; a worker has its queue's", async () => {
  await hf.migrate();
  const emails = queue(hf, "emails");
  await using worker = emails.work(async () => {});
  const held = await hf.hold(key("nightly"));
  const waiting = hf.hold(key("nightly"), { wait: 60_000 });
  try {
    await eventually(async () => {
      const { holders, waiters } = await hf.inspect();
      expect(waiters.map(({ name }) => name)).toEqual([`nightly (${hashOf("nightly")})`]);
      expect(holders.map(({ name }) => name)).toContainEqual(
        expect.stringMatching(/^queue emails: worker \d+ \(bigint /),
      );
    });
  } finally {
    await held.release();
    await (await waiting).release();
  }
  await worker.stop();
});

test("of locks that share a session one is shown after the other, and none that was given back", async () => {
  await using apart = holdfast(fromPg(pool));
  await apart.migrate();
  await using worker = queue(apart, "letters").work(async () => {});
  /** What the locks are called, without numbers. */
  const names = async () =>
    (await hf.inspect()).holders.map(({ name }) => name.replace(/(?: \d+)? ?\(.*| -?\d+/, "")).toSorted();
  await eventually(async () => expect(await names()).toEqual(["queue letters: worker"]));
  const invoice = await apart.hold(key("invoice"));
  const report = await apart.hold(key("report"));
  expect(await names()).toEqual(["bigint", "invoice", "queue letters: worker"]);
  await invoice.release();
  expect(await names()).toEqual(["queue letters: worker", "report"]);
  await worker.stop();
  expect(await names()).toEqual(["report"]);
  await report.release();
});
