import { type Command, InvalidArgumentError } from "commander";
import { whole } from "../options.ts";
import { urlOption } from "../url.ts";

export interface BenchOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly seconds: number;
  readonly connections: number;
  readonly list?: true;
  readonly yes?: true;
  readonly json?: true;
}

const examples = `
It reads and writes nothing of yours: it makes a database of its own, and removes it again, also after Ctrl-C or an
error. A user that may not create one gets a schema, and fewer suites. Without a database, it runs on a PostgreSQL of
its own. It is load: think before you run it on a server that others need.

Examples:
  holdfast bench
  holdfast bench locks quota --url postgres://app@localhost/shop
  holdfast bench --seconds 10 --connections 20 --yes
  holdfast bench queue --json | jq '.suites[].ratios'
  holdfast bench --list

The exit code is 0 if Holdfast was exact, 1 if it was not or nothing was done, 2 if it could not run, 130 if it was
stopped.`;

export function bench(program: Command): void {
  urlOption(
    program
      .command("bench")
      .description(
        "Measure what Holdfast costs on your server, next to the same by hand and to doing it wrong.",
      ),
  )
    .argument("[suite...]", "locks, rows, quota, stock, queue (default: all)")
    .option("--seconds <n>", "how long each line of a table is measured", seconds, 2)
    .option("--connections <n>", "how many are used at a time", whole(2, 200), 8)
    .option("--list", "what the suites do")
    .option("--yes", "do not ask")
    .option("--json", "print the results as one JSON object")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast bench --help` lists the options.")
    .action(async (names: string[], options: BenchOptions) => {
      // Loaded here, so that other verbs start without it.
      const { runBench } = await import("../bench/run.ts");
      process.exitCode = await runBench(names, options);
    });
}

function seconds(text: string): number {
  const value = Number(text);
  if (text.trim() === "" || !(value >= 0.05 && value <= 600))
    throw new InvalidArgumentError("It must be a number from 0.05 to 600.");
  return value;
}
