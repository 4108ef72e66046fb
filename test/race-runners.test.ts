/** `expectNoRace` in other runners than this one, with the limits that they come with. */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { Client } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;

beforeAll(async () => {
  database = await createDatabase("postgres");
  const client = new Client({ connectionString: database.url });
  await client.connect();
  await client.query("CREATE TABLE voucher (uses int NOT NULL); INSERT INTO voucher VALUES (1)");
  await client.end();
});
afterAll(() => database?.drop());

const path = (name: string) => fileURLToPath(new URL(name, import.meta.url));

/** `streams`: one of them says on both what is to be read here. */
async function run(
  args: readonly string[],
  streams: "stdout" | "both" = "stdout",
): Promise<{ output: string; code: number }> {
  const child = spawn(process.execPath, args, {
    env: { PATH: process.env["PATH"], DATABASE_URL: database.url, NO_COLOR: "1" },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let output = "";
  child.stdout.on("data", (chunk) => (output += String(chunk)));
  child.stderr.on("data", (chunk) => {
    if (streams === "both") output += String(chunk);
    else process.stderr.write(chunk as Buffer);
  });
  const [code] = (await once(child, "close")) as [number];
  return { output, code };
}

test("node:test: a green one, and one that fails with the schedule", async () => {
  const { output, code } = await run([
    "--conditions=holdfast-source",
    "--test",
    "--test-reporter=tap",
    path("./races/runners/node.ts"),
  ]);
  expect(output).toMatch(/^\s*ok \d+ - exact$/m);
  expect(output).toMatch(/^\s*not ok \d+ - naive$/m);
  expect(output).toContain("switch");
  expect(output).toContain("Lost update on voucher");
  // What was tried is said of the green one too.
  expect(output).toMatch(/✓ exact and exact: \d+ runs, exhaustive/);
  expect(code).toBe(1);
});

test("Vitest, with its own 5 s: what takes longer ends by itself, and the next one works", async () => {
  const { output, code } = await run([
    path("../node_modules/vitest/vitest.mjs"),
    "run",
    "--config",
    path("./races/runners/vitest.config.ts"),
    "--reporter=verbose",
  ]);
  expect(output).toMatch(/✓ .*more than can be tried/);
  expect(output).toMatch(/✓ .*a lock of somebody else/);
  expect(output).toMatch(/✓ .*> the next one/);
  expect(output).toMatch(/✓ the next one: \d+ runs, exhaustive/);
  expect(code).toBe(0);
});

test("Jest, with its own 5 s: a green one, one that fails with the schedule, one that ends by itself, and the next one", async () => {
  const { output, code } = await run(
    [
      "--experimental-vm-modules",
      path("../node_modules/jest/bin/jest.js"),
      "--config",
      path("./races/runners/jest.config.js"),
      "--runInBand",
      "--verbose",
      "--no-cache",
    ],
    "both",
  );
  expect(output).toMatch(/✓ exact/);
  expect(output).toMatch(/✕ naive \(/);
  expect(output).toContain("Lost update on voucher");
  expect(output).toContain("switch");
  // The place in the caller's code, although stacks name the library's sources there.
  expect(output).toMatch(/SELECT uses FROM voucher → 1 {2}◄ stale {2}limits\.jest\.js:\d+/);
  expect(output).toMatch(/✓ naive, and the error is one of its class/);
  expect(output).toMatch(/✓ more than can be tried/);
  expect(output).toMatch(/✓ what goes wrong is told/);
  expect(output).toMatch(/✓ the next one \(/);
  // What was tried is said of green ones too.
  expect(output).toMatch(/✓ exact and exact: \d+ runs, exhaustive/);
  expect(output).toMatch(/1 failed, 5 passed/);
  expect(code).toBe(1);
});
