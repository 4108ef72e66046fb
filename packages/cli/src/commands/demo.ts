import { type Command, InvalidArgumentError } from "commander";

export interface DemoOptions {
  readonly processes: number;
  readonly callers: number;
  readonly calls: number;
  readonly limit: number;
  readonly url?: string;
  readonly json?: true;
}

export function demo(program: Command): void {
  program
    .command("demo")
    .description("Show a quota leak under concurrency, and the same code not leak.")
    .option("--processes <n>", "OS processes that call at once", atLeastOne, 4)
    .option("--callers <n>", "concurrent callers in each of them", atLeastOne, 8)
    .option("--calls <n>", "calls per contestant, all processes together", atLeastOne, 400)
    .option("--limit <n>", "uploads that the user may have", atLeastOne, 100)
    .option(
      "--url <url>",
      "a PostgreSQL to run on, in a schema that is dropped again (default: one of its own)",
    )
    .option("--json", "print the result as one JSON object")
    .action(async (options: DemoOptions) => {
      // Loaded here, so that other verbs start without it.
      const { runDemo } = await import("../demo/run.ts");
      process.exitCode = await runDemo(options);
    });
}

function atLeastOne(text: string): number {
  const value = Number(text);
  if (!Number.isInteger(value) || value < 1)
    throw new InvalidArgumentError("It must be a whole number from 1.");
  return value;
}
