import { type Command, Option } from "commander";
import { databases, longs, whats } from "../choose/index.ts";
import type { ChooseOptions } from "../choose/run.ts";

const listed = (choices: readonly { readonly name: string; readonly text: string }[]): string => {
  const width = Math.max(...choices.map(({ name }) => name.length));
  return choices.map(({ name, text }) => `    ${name.padEnd(width)}  ${text}`).join("\n");
};

const examples = `
--what, what is checked before it is written:
${listed(whats)}

--long, how long it takes from the check to the write:
${listed(longs)}

Examples:
  holdfast choose
  holdfast choose --what limit --long statements --database postgres
  holdfast choose --what stock --long minutes --database mysql --json

What is not said is asked for, on a terminal. The code is a whole module, and goes to stdout with the rest of the answer.`;

const named = (choices: readonly { readonly name: string }[]): string[] => choices.map(({ name }) => name);

export function choose(program: Command): void {
  program
    .command("choose")
    .description("Three questions, and the tool that answers them, with its code.")
    .addOption(new Option("--what <check>", "what is checked").choices(named(whats)))
    .addOption(new Option("--long <time>", "how long the work takes").choices(named(longs)))
    .addOption(new Option("--database <name>", "which database").choices(named(databases)))
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast choose --help` lists the options.")
    .action(async (options: ChooseOptions) => {
      const { runChoose } = await import("../choose/run.ts");
      await runChoose(options);
    });
}
