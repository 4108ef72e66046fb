/** `expectNoRace` in another runner than this one. */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { Client } from "pg";
import { expect, test } from "vitest";
import { createDatabase } from "./harness/databases.ts";

test("node:test: a green one, and one that fails with the schedule", async () => {
  const database = await createDatabase("postgres");
  try {
    const client = new Client({ connectionString: database.url });
    await client.connect();
    await client.query("CREATE TABLE voucher (uses int NOT NULL); INSERT INTO voucher VALUES (1)");
    await client.end();
    const file = fileURLToPath(new URL("./races/runners/node.ts", import.meta.url));
    const child = spawn(
      process.execPath,
      ["--conditions=holdfast-source", "--test", "--test-reporter=tap", file],
      {
        env: { PATH: process.env["PATH"], DATABASE_URL: database.url },
        stdio: ["ignore", "pipe", "inherit"],
      },
    );
    let output = "";
    child.stdout.on("data", (chunk) => (output += String(chunk)));
    const [code] = (await once(child, "close")) as [number];
    expect(output).toMatch(/^\s*ok \d+ - exact$/m);
    expect(output).toMatch(/^\s*not ok \d+ - naive$/m);
    expect(output).toContain("switch");
    expect(output).toContain("Lost update on voucher");
    expect(code).toBe(1);
  } finally {
    await database.drop();
  }
});
