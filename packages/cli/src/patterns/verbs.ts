/** Verbs that have verbs below them: `holdfast queue`, `holdfast queue retry`. */
import type { Command } from "commander";
import { shown } from "../text.ts";
import { urlOption } from "../url.ts";
import { changeOptions } from "./options.ts";

export interface Verb {
  readonly description: string;
  readonly examples: string;
  readonly changes?: boolean;
}

function dressed(command: Command, path: string, { description, examples, changes }: Verb): Command {
  const made = urlOption(command).description(description).option("--json", "print one JSON document");
  return (changes ? changeOptions(made) : made)
    .addHelpText("after", examples)
    .showHelpAfterError(`\`holdfast ${path} --help\` lists the options.`);
}

export function family(program: Command, name: string, verb: Verb): Command {
  // What follows the name of a verb below is that verb's.
  return dressed(program.command(name), name, verb).enablePositionalOptions().allowExcessArguments();
}

export function below(parent: Command, name: string, verb: Verb): Command {
  return dressed(parent.command(name), `${parent.name()} ${name}`, verb);
}

/** A slip in the name of a verb below, which would be taken for an argument. */
export function refuseUnknown(command: Command): void {
  const [word] = command.args;
  if (command.commands.length === 0 || word === undefined) return;
  const known = command.commands.map((each) => each.name()).join(", ");
  command.error(`error: holdfast ${command.name()} knows no '${shown(word)}', but ${known}.`);
}

/** What was typed, and the options, also those before the name of the verb. */
export function does(
  command: Command,
  run: (typed: readonly unknown[], options: never) => Promise<void>,
): Command {
  return command.action(async (...given: unknown[]) => {
    const self = given.at(-1) as Command;
    refuseUnknown(self);
    await run(given.slice(0, -2), self.optsWithGlobals());
  });
}
