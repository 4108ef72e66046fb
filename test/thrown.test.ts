/** Whatever handlers and bodies throw: the process lives, it is written down, and it is thrown on as it is. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterAll, beforeEach, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { odd } from "./harness/odd-values.ts";
import { startWorker } from "./harness/processes.ts";
import type { OddArg, OddResult } from "./workers/odd-throws.ts";

const missing = unavailable("postgres");
let database: TestDatabase | undefined;

beforeEach(async ({ skip }) => {
  skip(missing !== undefined, missing);
  database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url });
  await holdfast(fromPg(pool)).migrate();
  await pool.query("CREATE TABLE odd (n int)");
  await pool.query("CREATE TABLE odd_version (id int PRIMARY KEY, version int NOT NULL)");
  await pool.query("INSERT INTO odd_version VALUES (1, 1)");
  await pool.end();
});

afterAll(() => database?.drop());

test.each([
  ["with nobody who listens", false],
  ["with traces and metrics", true],
])("%s", async (_, told) => {
  const arg: OddArg = { url: (database as TestDatabase).url, told };
  const worker = startWorker<OddResult>(new URL("./workers/odd-throws.ts", import.meta.url), arg);
  const { texts, replaced, leaders } = await worker.result;
  expect(replaced).toEqual([]);
  for (const [i, { name, shows }] of odd.entries())
    for (const how of ["plain", "transactional", "completed"] as const)
      expect(texts[how][i], `${name}, ${how}`).toMatch(shows);
  // In the order in which they ran, and without where they came from.
  for (const how of ["schedule", "enqueue"] as const) {
    expect(texts[how]).toHaveLength(odd.length);
    for (const [i, { name }] of odd.entries()) {
      expect(texts[how][i], `${name}, ${how}`).toMatch(/./);
      expect(texts[how][i], `${name}, ${how}`).not.toMatch(/\n {4}at /);
    }
    expect(texts[how].join("\n")).toMatch(
      /Error: it broke\ncaused by: Error: the disk\ncaused by: \{ errno: -28 \}/,
    );
  }
  expect(leaders.warned).toBeGreaterThanOrEqual(odd.length);
  expect(leaders.told).toBeGreaterThanOrEqual(odd.length);
});
