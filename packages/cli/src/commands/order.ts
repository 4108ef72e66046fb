import { type Command, Option } from "commander";
import type { OrderOptions } from "../order/run.ts";

const examples = `
The files are what processes write that run with HOLDFAST_ORDER=FILE, or with holdfast(…, { orderFile }): a line for each
two locks that were taken one after the other, with both places. Several processes may write to one file.

Examples:
  HOLDFAST_ORDER=order.jsonl npx vitest run && holdfast order order.jsonl
  holdfast order api.jsonl worker.jsonl
  holdfast order order.jsonl --mermaid > order.mmd

The exit code is 0 if all take them in one order, 1 if not, and 2 if a file could not be read.`;

export function order(program: Command): void {
  program
    .command("order")
    .description("In which order the processes of an application take their locks, and where that differs.")
    .argument("<file...>", "what they have written")
    .option("--json", "print one JSON document")
    .addOption(new Option("--mermaid", "print a diagram").conflicts("json"))
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast order --help` lists the options.")
    .action(async (files: string[], options: OrderOptions) => {
      const { runOrder } = await import("../order/run.ts");
      process.exitCode = await runOrder(files, options);
    });
}
