/** Examples and the demo are programs that people run first: they must run. */
import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { createDatabase } from "./harness/databases.ts";

const root = fileURLToPath(new URL("../", import.meta.url));

async function run(
  file: string,
  args: string[],
  env: NodeJS.ProcessEnv = {},
): Promise<{ code: number | null; output: string }> {
  const child = spawn(process.execPath, ["--conditions=holdfast-source", file, ...args], {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let output = "";
  for (const stream of [child.stdout, child.stderr])
    stream.on("data", (chunk: Buffer) => (output += chunk.toString()));
  const code = await new Promise<number | null>((resolve) => child.once("close", resolve));
  return { code, output };
}

test("examples/quota", async () => {
  const database = await createDatabase("postgres");
  const { code, output } = await run("examples/quota/index.ts", [], { DATABASE_URL: database.url });
  await database.drop();
  expect({ code, output }).toMatchObject({ code: 0, output: expect.stringContaining("10") });
});

test("npm start shows the bug and the fix, and ends by itself", async () => {
  const { code, output } = await run("packages/cli/src/bin.ts", ["demo", "--json"]);
  expect(code, output).toBe(0);
  const last = output.trim().split("\n").at(-1) ?? "";
  const { limit, rows }: { limit: number; rows: { contestant: string; granted: number; leaked: number }[] } =
    JSON.parse(last);
  const ours = rows.at(-1);
  expect(ours).toMatchObject({ granted: limit, leaked: 0 });
  // It would show nothing if the naive code did not leak.
  expect(rows[0]?.leaked).toBeGreaterThan(0);
});

test("the command says what it can do, and what it cannot", async () => {
  expect(await run("packages/cli/src/bin.ts", ["--help"])).toMatchObject({
    code: 0,
    output: expect.stringContaining("demo"),
  });
  expect(await run("packages/cli/src/bin.ts", ["dmeo"])).toMatchObject({
    code: 1,
    output: expect.stringContaining("demo"),
  });
});
