/** `holdfast choose`: asks what was not said, and prints the answer. */
import { createInterface } from "node:readline";
import { Failure, Interrupted } from "../failure.ts";
import { colorsOf, note, print, printJson } from "../terminal.ts";
import { type Asked, type Choice, type Question, choose, questions } from "./index.ts";

export interface ChooseOptions extends Partial<Asked> {
  readonly json?: true;
}

export async function runChoose(options: ChooseOptions): Promise<void> {
  const asked: Record<string, string> = {};
  for (const question of questions) asked[question.name] = options[question.name] ?? (await ask(question));
  const answer = choose(asked as unknown as Asked);
  if (options.json) {
    printJson({ asked, ...answer });
    return;
  }
  const { bold, dim, cyan } = colorsOf(process.stdout);
  print(`${bold("Use")} ${bold(cyan(answer.use))}`);
  print(answer.why);
  if (answer.note !== undefined) print(answer.note);
  print();
  print(dim(`// ${answer.install}`));
  print(answer.code);
  print();
  print(`More: docs/${answer.page}`);
}

/** On stderr: stdout is for the answer. */
async function ask({ name, text, choices }: Question): Promise<string> {
  if (!process.stdin.isTTY || !process.stderr.isTTY)
    throw new Failure(
      `${text} There is no terminal to answer on: add --${name} with one of ${choices.map((each) => each.name).join(", ")}.`,
    );
  const width = Math.max(...choices.map((each) => each.name.length));
  const { bold, cyan } = colorsOf(process.stderr);
  process.stderr.write(`${bold(text)}\n`);
  for (const [i, choice] of choices.entries())
    process.stderr.write(
      `  ${String(i + 1).padStart(2)}  ${cyan(choice.name.padEnd(width))}  ${choice.text}\n`,
    );
  const reader = createInterface({ input: process.stdin, output: process.stderr });
  try {
    for (;;) {
      const found = meant(choices, await line(reader));
      if (found) {
        process.stderr.write("\n");
        return found.name;
      }
      note(`A number from 1 to ${choices.length}, or one of the names.`);
    }
  } finally {
    reader.close();
  }
}

function line(reader: ReturnType<typeof createInterface>): Promise<string> {
  const { promise, resolve, reject } = Promise.withResolvers<string>();
  // Ctrl-C and Ctrl-D.
  reader.once("close", () => reject(new Interrupted()));
  reader.question("> ", resolve);
  return promise;
}

/** By its number, its name, or as much of the name as only one of them begins with. */
function meant(choices: readonly Choice<string>[], text: string): Choice<string> | undefined {
  const typed = text.trim().toLowerCase();
  if (typed === "") return undefined;
  const exact = choices[Number(typed) - 1] ?? choices.find(({ name }) => name === typed);
  const begun = choices.filter(({ name }) => name.startsWith(typed));
  return exact ?? (begun.length === 1 ? begun[0] : undefined);
}
