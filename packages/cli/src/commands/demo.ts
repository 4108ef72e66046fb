import { type Command, Option } from "commander";
import type { DemoOptions } from "../demo/options.ts";
import { raceNames } from "../demo/race.ts";
import { whole } from "../options.ts";

const examples = `
The races:
  quota      100 uploads are allowed, and many come at once
  last-item  one piece is left, and everybody wants it
  transfers  two people send each other money at the same moment, and deadlock
  jobs       several workers take the same job
  cron       every instance runs what should be run once

Examples:
  holdfast demo
  holdfast demo --only quota jobs
  holdfast demo --html demo.html
  holdfast demo --url postgres://me@localhost/postgres

With --url it creates a database of its own on that server, holdfast_demo_…, and drops it in the end, also after
Ctrl-C. HOLDFAST_URL and DATABASE_URL are not looked at.

The exit code is 0 if everything is exact with Holdfast, 1 if not, 2 if it could not be run, and 130 if you stopped it.`;

export function demo(program: Command): void {
  program
    .command("demo")
    .description("Show five classic races, as the code is often written and fixed, on a real PostgreSQL.")
    .addOption(new Option("--only <race...>", "only these races").choices(raceNames))
    .option("--processes <n>", "OS processes that call at once", whole(1, 1000), 5)
    .option("--callers <n>", "concurrent callers in each of them", whole(1, 1000), 6)
    .option(
      "--url <url>",
      "a PostgreSQL to run on, in a database that is dropped again (default: a server of its own)",
    )
    .option("--html <file>", "write a page with charts, which needs no other file")
    .option("--json", "print the result as one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast demo --help` lists the options.")
    .action(async (options: DemoOptions) => {
      // Loaded here, so that other verbs start without it.
      const { runDemo } = await import("../demo/run.ts");
      process.exitCode = await runDemo(options);
    });
}
