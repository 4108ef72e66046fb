/** The command: its verbs. */
import { readFileSync } from "node:fs";
import { Command } from "commander";
import { audit } from "./commands/audit.ts";
import { bench } from "./commands/bench.ts";
import { certify } from "./commands/certify.ts";
import { choose } from "./commands/choose.ts";
import { completion } from "./commands/completion.ts";
import { demo } from "./commands/demo.ts";
import { doctor } from "./commands/doctor.ts";
import { exec } from "./commands/exec.ts";
import { hold } from "./commands/hold.ts";
import { importJobs } from "./commands/import.ts";
import { keys } from "./commands/keys.ts";
import { kill } from "./commands/kill.ts";
import { lease } from "./commands/lease.ts";
import { locks } from "./commands/locks.ts";
import { migrate } from "./commands/migrate.ts";
import { order } from "./commands/order.ts";
import { queue } from "./commands/queue.ts";
import { quota } from "./commands/quota.ts";
import { race } from "./commands/race.ts";
import { schedule } from "./commands/schedule.ts";
import { stock } from "./commands/stock.ts";
import { strategy } from "./commands/strategy.ts";
import { top } from "./commands/top.ts";
import { complain, exitCodes } from "./failure.ts";
import { beginJson, printJsonError } from "./json.ts";
import { keepGoingWithoutReaders } from "./output.ts";
import { shown, shownLines } from "./text.ts";
import { withoutAddresses } from "./url.ts";

const { version }: { version: string } = JSON.parse(
  readFileSync(new URL("../package.json", import.meta.url), "utf8"),
);

/** In one line, also if what was typed has several; but for the guess what may have been meant. */
function mistake(text: string): string {
  const [, said = text, guess = ""] = /^(.*?)(\n\(Did you mean .*\))?\n?$/s.exec(text) ?? [];
  return `${shown(withoutAddresses(said))}${withoutAddresses(guess)}`;
}

/** With all its verbs, also for what is written about them. */
export const program = new Command("holdfast")
  .description("Makes code that checks, then writes, exact under concurrency.")
  .version(version)
  .showHelpAfterError("`holdfast --help` lists the commands.")
  // What was typed may be an address in the wrong place, an order to a terminal, or pages long.
  .configureOutput({ outputError: (text, write) => write(`${shownLines(mistake(text), 500)}\n`) })
  // A mistake in what was typed, as any other reason for which nothing could be done.
  .exitOverride(({ exitCode, message }) => {
    if (exitCode === 0) process.exit(exitCodes.ok);
    printJsonError({ message: mistake(message).replace(/^error: /, ""), exitCode: exitCodes.failed });
    process.exit(exitCodes.failed);
  });

for (const register of [
  demo,
  choose,
  doctor,
  certify,
  race,
  order,
  locks,
  top,
  kill,
  lease,
  exec,
  hold,
  keys,
  bench,
  migrate,
  strategy,
  queue,
  importJobs,
  schedule,
  quota,
  stock,
  audit,
  completion,
])
  register(program);

export async function run(): Promise<void> {
  keepGoingWithoutReaders();
  beginJson();
  try {
    await program.parseAsync();
    printJsonError();
  } catch (error) {
    complain(error);
  }
}
