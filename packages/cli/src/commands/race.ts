import { type Command, InvalidArgumentError } from "commander";
import type { ExploreOptions } from "holdfast/testing";
import { milliseconds, whole } from "../options.ts";

export type Isolation = Extract<ExploreOptions["isolation"], string>;

export interface RaceOptions {
  readonly url?: string;
  readonly only?: readonly string[];
  readonly preemptions?: number;
  readonly maxMs?: number;
  /** As they were typed: `read committed` comes in two pieces. */
  readonly isolation?: readonly string[];
  readonly replay?: string;
  readonly seed?: number;
  readonly bail?: true;
  readonly json?: true;
  readonly html?: string;
}

/** Options are the caller's mistakes as much as a file that is not there is. */
const couldNotRun = 2;

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

Examples:
  holdfast race quota.race.ts
  holdfast race quota.race.ts --isolation read-committed serializable
  holdfast race quota.race.ts --only quota --replay 'A2B4A2'
  holdfast race quota.race.ts --html report.html --max-ms 60000

The exit code is 0 if no race was found, 1 if one was, and 2 if something could not be run.`;

export function race(program: Command): void {
  const command = program
    .command("race")
    .description("Run the scenarios of a file in every order of their statements, and show the race.")
    .argument("<file>", "a module that exports scenarios: .ts, .js or .mjs")
    .option("--only <name...>", "only these scenarios")
    .option(
      "--url <url>",
      "the database that functions are given (default: HOLDFAST_URL, DATABASE_URL, or a PostgreSQL of its own)",
    )
    .option("--preemptions <n>", "at most so many switches", whole(0, 1000))
    .option("--max-ms <ms>", "time for each scenario", milliseconds(1))
    .option("--isolation <level...>", "try all of it at each of these levels")
    .option("--replay <order>", "only the order that a report named", order)
    .option("--seed <n>", "of the orders that are tried at random", whole(0))
    .option("--bail", "stop at the first race")
    .option("--json", "print the reports as one JSON array")
    .option("--html <file>", "write a report with the schedules drawn")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast race --help` lists the options.")
    .exitOverride(({ exitCode }) => process.exit(exitCode === 0 ? 0 : couldNotRun));
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

function order(text: string): string {
  if (!/^(?:[A-Z]\d*)+(?:![A-Z])?$/.test(text))
    throw new InvalidArgumentError("It is what a report names, e.g. A2B4A2.");
  return text;
}
