/** What subscribers of `node:diagnostics_channel` are told. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { type Events, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 4 });
});

afterAll(async () => {
  await pool.end();
  await database.drop();
});

const names: (keyof Events)[] = [
  "holdfast:transaction:begin",
  "holdfast:transaction:end",
  "holdfast:transaction:retry",
  "holdfast:lock:granted",
  "holdfast:lock:refused",
  "holdfast:session:held",
  "holdfast:session:released",
];

async function told(run: () => Promise<unknown>): Promise<[string, Record<string, unknown>][]> {
  const events: [string, Record<string, unknown>][] = [];
  const listeners = names.map((name) => {
    const listen = (payload: unknown) => events.push([name, payload as Record<string, unknown>]);
    subscribe(name, listen);
    return () => unsubscribe(name, listen);
  });
  try {
    await run();
  } finally {
    for (const stop of listeners) stop();
  }
  return events;
}

test("a transaction, its lock, its end", async () => {
  const hf = holdfast(fromPg(pool));
  const events = await told(() => hf.transaction({ lock: key("e", 1) }, async () => {}));
  expect(events.map(([name]) => name)).toEqual([
    "holdfast:transaction:begin",
    "holdfast:lock:granted",
    "holdfast:transaction:end",
  ]);
  expect(events.at(-1)?.[1]).toMatchObject({
    attempt: 1,
    locks: ["e:1"],
    outcome: "commit",
    durationMs: expect.any(Number),
  });
});

test("a refusal, a retry, a session lock; and names only as they are to be shown", async () => {
  const hf = holdfast(fromPg(pool), { names: (name) => name.replace(/:.*/, ":***") });
  const events = await told(async () => {
    await hf.transaction({ lock: key("e", "secret") }, () =>
      hf.tryLock(key("e", "secret"), async () => {}, { separate: true }),
    );
    let runs = 0;
    await hf.transaction({ retry: { baseMs: 0 } }, async () => {
      if (++runs === 1) throw Object.assign(new Error("deadlock"), { code: "40P01" });
    });
    await (await hf.hold(key("e", "secret"))).release();
  });
  const seen = new Set(events.map(([name]) => name));
  expect([...seen].toSorted()).toEqual(names.toSorted());
  expect(JSON.stringify(events)).not.toContain("secret");
  expect(events.find(([name]) => name === "holdfast:transaction:retry")?.[1]).toMatchObject({
    attempt: 1,
    failure: "deadlock",
  });
});
