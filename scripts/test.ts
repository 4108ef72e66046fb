import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import type { Tally } from "../test/harness/tally-reporter.ts";

const ROOT = fileURLToPath(new URL("../", import.meta.url));
const ENV = { ...process.env, PATH: `${join(ROOT, "node_modules", ".bin")}:${process.env["PATH"] ?? ""}` };

/** One after the other; those of one line at the same time. */
const CHECKS: Record<string, string[][]>[] = [
  // First: the types of the generated client are part of the type check.
  { generate: [["node", "scripts/generate.ts"]] },
  // In this order: the cli package sees holdfast by the types that were built, and so does lint.
  {
    build: [
      ["tsc", "-p", "packages/holdfast"],
      ["tsc", "-p", "packages/cli"],
    ],
  },
  {
    lint: [["oxlint", "--type-aware", "--deny-warnings"]],
    format: [["prettier", "--check", "."]],
    typecheck: [
      ["tsc", "-p", "tsconfig.json", "--noEmit"],
      ["tsc", "-p", "site", "--noEmit"],
    ],
  },
];

let passed = 0;
let failed = 0;
for (const line of CHECKS) {
  await Promise.all(
    Object.entries(line).map(async ([name, commands]) => {
      const start = performance.now();
      const failure = await firstFailure(commands);
      const seconds = Math.round((performance.now() - start) / 1000);
      console.log(`${failure === undefined ? "✓" : "✗"} ${name} (${seconds} s)`);
      if (failure === undefined) passed++;
      else {
        failed++;
        console.log(failure);
      }
    }),
  );
}

const tests = await runTests();
const { tally } = tests;
let skipped = 0;
if (tally === undefined) {
  failed++;
  console.log(`vitest ended before the tests did (exit code ${tests.code})`);
} else {
  passed += tally.passed;
  failed += tally.failed.length + tally.errors;
  skipped = tally.skipped.length;
  console.log(processors(tally.cpuSeconds));
  for (const { name, reason } of tally.skipped) console.log(`skipped: ${name}: ${reason}`);
  // Once more, in short: what was printed of each may be long ago, or cut off.
  for (const { name, message } of tally.failed.slice(0, 50)) console.log(`failed: ${name}: ${message}`);
  if (tally.passed + tally.failed.length === 0) {
    failed++;
    console.log("No test ran.");
  } else if (tests.code !== 0 && tally.failed.length + tally.errors === 0) {
    // A teardown that failed, for example.
    failed++;
    console.log(`vitest ended with exit code ${tests.code}`);
  }
}
if (process.env["CI"]) {
  // There, everything the tests need can be had.
  failed += skipped;
  skipped = 0;
}
process.exitCode = failed === 0 ? 0 : 1;
console.log(`${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ""}`);

/** The time of a run is what they take, if there are two of them: what to look at when it becomes too long. */
function processors(seconds: Tally["cpuSeconds"]): string {
  const all = Object.entries(seconds).toSorted(([, a], [, b]) => b - a);
  const total = all.reduce((sum, [, each]) => sum + each, 0);
  const most = all.slice(0, 40).map(([file, each]) => `${file} ${Math.round(each)}`);
  return `Processor time of the tests, without servers: ${Math.round(total / 60)} min. Most, in s: ${most.join(", ")}`;
}

async function firstFailure(commands: string[][]): Promise<string | undefined> {
  for (const command of commands) {
    const result = await run(command, "pipe");
    if (result.code !== 0) return `$ ${command.join(" ")}\n${result.output.trimEnd()}`;
  }
  return undefined;
}

async function runTests(): Promise<{ code: number | null; tally: Tally | undefined }> {
  const dir = mkdtempSync(join(tmpdir(), "holdfast-tally-"));
  const file = join(dir, "tally.json");
  try {
    const command = ["vitest", "run", "--reporter=default", "--reporter=./test/harness/tally-reporter.ts"];
    const result = await run([...command, ...process.argv.slice(2)], "inherit", { HOLDFAST_TALLY: file });
    return {
      code: result.code,
      tally: existsSync(file) ? JSON.parse(readFileSync(file, "utf8")) : undefined,
    };
  } finally {
    rmSync(dir, { recursive: true });
  }
}

function run(
  [file = "", ...args]: string[],
  output: "pipe" | "inherit",
  env: Record<string, string> = {},
): Promise<{ code: number | null; output: string }> {
  return new Promise((resolve) => {
    const child = spawn(file, args, {
      cwd: ROOT,
      env: { ...ENV, ...env },
      stdio: ["ignore", output, output],
    });
    let text = "";
    child.stdout?.on("data", (chunk) => (text += String(chunk)));
    child.stderr?.on("data", (chunk) => (text += String(chunk)));
    child.once("error", (error) => resolve({ code: -1, output: String(error) }));
    child.once("close", (exitCode) => resolve({ code: exitCode, output: text }));
  });
}
