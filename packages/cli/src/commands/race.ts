import { type Command, InvalidArgumentError, Option } from "commander";
import { milliseconds, whole } from "../options.ts";
import type { Isolation, RaceOptions } from "../race/run.ts";

const examples = `
The file exports scenarios, or functions that make one for the database that they are given:

  export async function quota({ url }) {
    const pool = new Pool({ connectionString: url });
    await pool.query("CREATE TABLE image …");
    return {
      db: fromPg(pool),
      actors: { A: () => upload(pool, 60), B: () => upload(pool, 60) },
      invariant: async () => { /* throws if what is in the tables cannot be */ },
      close: () => pool.end(),
    };
  }

It writes to no database of yours: it makes one of its own, on the server that --url, HOLDFAST_URL or DATABASE_URL names, as a
copy of the database there; that is what functions are given, and what DATABASE_URL says while they run. It is removed
afterwards, also after Ctrl-C. --in-place asks before it runs in yours, and only while nobody else is in it.

With --proxy the actors are requests to an application in another process, in any language. A function starts it, and is given
the address for it: ({ url, proxy }) => … Or it runs already, connects to that port, and --in-place names its database.

Examples:
  holdfast race quota.race.ts
  holdfast race quota.race.ts --isolation read-committed serializable
  holdfast race quota.race.ts --only quota --replay 'A2B4A2'
  holdfast race quota.race.ts --html report.html --max-ms 60000
  holdfast race quota.race.ts --min-coverage exhaustive
  holdfast race quota.race.ts --junit race.xml --sarif race.sarif
  holdfast race quota.race.ts --only quota --svg docs/quota.svg
  holdfast race quota.race.ts --write-test quota.test.ts
  holdfast race quota.race.ts --url postgres://app@localhost/shop_test --in-place
  holdfast race server.race.ts --proxy 6543

The exit code is 0 if no race was found, 1 if one was or the question was answered with no, 2 if something could not be run,
and 130 if it was stopped.`;

export function race(program: Command): void {
  const command = program
    .command("race")
    .description("Run the scenarios of a file in every order of their statements, and show the race.")
    .argument("<file>", "a module that exports scenarios: .ts, .js or .mjs")
    .option("--only <name...>", "only these scenarios")
    .option(
      "--url <url>",
      "the database that a copy is made of (default: HOLDFAST_URL, DATABASE_URL, or a PostgreSQL of its own)",
    )
    .addOption(new Option("--empty", "an empty database in place of a copy").conflicts("inPlace"))
    .option("--in-place", "run in the database that --url names, and not in a copy of it; asks first")
    .option("--yes", "do not ask")
    .option("--preemptions <n>", "at most so many switches", whole(0, 1000))
    .option("--max-ms <ms>", "time for each scenario (default: 10,000)", milliseconds(1))
    .option(
      "--min-coverage <n>",
      "not ok unless all orders with so many switches were tried, or all of them: exhaustive",
      coverage,
    )
    .option("--isolation <level...>", "try all of it at each of these levels")
    .option("--replay <order>", "only the order that a report named", order)
    .option("--seed <n>", "of the orders that are tried at random", whole(0))
    .option("--bail", "stop at the first race")
    .option("--json", "print one JSON document")
    .option("--html <file>", "write a report with the schedules drawn")
    .option("--svg <path>", "draw the schedule of each race: a file (.svg), or a folder")
    .option("--junit <file>", "write a report for CI as JUnit XML")
    .option("--sarif <file>", "write a report for code scanning as SARIF")
    .option("--annotations", "print GitHub annotations (default: where GITHUB_ACTIONS is true)")
    .option("--no-annotations", "print none there either")
    .option("--write-test <file>", "write a test that fails until the races that were found are gone")
    .addOption(
      new Option(
        "--proxy <port>",
        "listen there (0: any port that is free) for an application in another process, to hold its statements back",
      )
        .argParser(whole(0, 65_535))
        .conflicts("writeTest"),
    )
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast race --help` lists the options.");
  command.action(async (file: string, options: RaceOptions) => {
    const isolation = options.isolation && levels(options.isolation);
    if (isolation?.length === 0)
      command.error(
        `error: option '--isolation <level...>' does not know '${options.isolation?.join(" ")}'. Levels: read-uncommitted, read-committed, repeatable-read, serializable.`,
      );
    // Loaded here, so that other verbs start without it.
    const { runRace } = await import("../race/run.ts");
    const code = await runRace(file, { ...options, isolation });
    // Scenarios may have left connections open, which would keep the process alive.
    process.exit(code);
  });
}

/** Empty: it is none. */
function levels(words: readonly string[]): Isolation[] {
  const text = words
    .join(" ")
    .toLowerCase()
    .replaceAll(/[-_,\s]+/g, " ")
    .trim();
  const level = "read uncommitted|read committed|repeatable read|serializable";
  if (!new RegExp(`^(?:(?:${level})(?: |$))+$`).test(text)) return [];
  return [...new Set(text.match(new RegExp(level, "g")) as Isolation[])];
}

function coverage(text: string): "exhaustive" | number {
  if (text === "exhaustive") return text;
  if (!/^\d{1,3}$/.test(text))
    throw new InvalidArgumentError(
      'It must be a word, "exhaustive", or a number of switches, from 0 to 999.',
    );
  return Number(text);
}

function order(text: string): string {
  if (!/^(?:[A-Z]\d*[a-z]?)+(?:\+[A-Z](?:[A-Z]\d*)+)?(?:![A-Z])?$/.test(text))
    throw new InvalidArgumentError("It is what a report names, e.g. A2B4A2.");
  return text;
}
