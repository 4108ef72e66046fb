#!/usr/bin/env node
import { readFileSync } from "node:fs";
import { Command } from "commander";
import { demo } from "./commands/demo.ts";
import { race } from "./commands/race.ts";
import { describe } from "./describe.ts";

const { version }: { version: string } = JSON.parse(
  readFileSync(new URL("../package.json", import.meta.url), "utf8"),
);

const program = new Command("holdfast")
  .description("Makes code that checks, then writes, exact under concurrency.")
  .version(version)
  .showHelpAfterError("`holdfast --help` lists the commands.");

for (const register of [demo, race]) register(program);

try {
  await program.parseAsync();
} catch (error) {
  console.error(`holdfast: ${describe(error)}`);
  process.exitCode = 1;
}
