import type { Command } from "commander";
import { urlOption } from "../url.ts";
import type { DoctorOptions } from "../doctor/run.ts";

const examples = `
It reads only. What it tries out (a lock on a random key, a message on a random
channel) is gone afterwards. Use the address and the user of the application:
settings, rights and poolers depend on them.

Examples:
  holdfast doctor --url postgres://app@localhost/shop
  holdfast doctor --strict --skip keepalive
  holdfast doctor --only pooler notify replica
  holdfast doctor --json | jq -r '.findings[].fix'
  holdfast doctor --list

The exit code is 0 if no error was found, 1 if one was (with --strict: or a
warning), and 2 if it could not run.`;

export function doctor(program: Command): void {
  urlOption(
    program
      .command("doctor")
      .description("Find what is set wrong on the server for code that checks, then writes."),
  )
    .option("--only <check...>", "only these checks")
    .option("--skip <check...>", "all but these")
    .option("--list", "what the checks look for (of one kind of server, if a database is named)")
    .option("--strict", "exit with 1 for warnings too")
    .option("--json", "print what was found as one JSON object")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast doctor --help` lists the options.")
    .action(async (options: DoctorOptions) => {
      // Loaded here, so that other verbs start without it.
      const { runDoctor } = await import("../doctor/run.ts");
      try {
        process.exitCode = await runDoctor(options);
      } finally {
        // A session of a check that had to be given up may never end; nobody waits for it.
        setTimeout(() => process.exit(), 1000).unref();
      }
    });
}
