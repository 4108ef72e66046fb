#!/usr/bin/env node
import { readFileSync } from "node:fs";
import { Command } from "commander";
import { demo } from "./commands/demo.ts";

const { version }: { version: string } = JSON.parse(
  readFileSync(new URL("../package.json", import.meta.url), "utf8"),
);

const program = new Command("holdfast")
  .description("Makes code that checks, then writes, exact under concurrency.")
  .version(version)
  .showHelpAfterError("`holdfast --help` lists the commands.");

for (const register of [demo]) register(program);

try {
  await program.parseAsync();
} catch (error) {
  console.error(`holdfast: ${describe(error)}`);
  process.exitCode = 1;
}

function describe(error: unknown): string {
  if (process.env["DEBUG"] && error instanceof Error) return error.stack ?? error.message;
  if (!(error instanceof Error)) return String(error);
  // A host with several addresses fails with one error for each, and no message over them.
  if (error instanceof AggregateError && error.message === "") return error.errors.map(describe).join("; ");
  return error.message;
}
