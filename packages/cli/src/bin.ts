#!/usr/bin/env node
import { readFileSync } from "node:fs";
import { Command } from "commander";
import { demo } from "./commands/demo.ts";
import { race } from "./commands/race.ts";
import { complain, exitCodes } from "./failure.ts";

const { version }: { version: string } = JSON.parse(
  readFileSync(new URL("../package.json", import.meta.url), "utf8"),
);

const program = new Command("holdfast")
  .description("Makes code that checks, then writes, exact under concurrency.")
  .version(version)
  .showHelpAfterError("`holdfast --help` lists the commands.")
  // A mistake in what was typed, as any other reason for which nothing could be done.
  .exitOverride(({ exitCode }) => process.exit(exitCode === 0 ? exitCodes.ok : exitCodes.failed));

for (const register of [demo, race]) register(program);

try {
  await program.parseAsync();
} catch (error) {
  complain(error);
}
