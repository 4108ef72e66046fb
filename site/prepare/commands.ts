/** A page for each verb of the command: what its own `--help` says. */
import { program } from "../../packages/cli/src/program.ts";
import { read } from "./places.ts";

export interface Verb {
  readonly name: string;
  readonly page: string;
}

/** As the terminal shows it, at a width that fits a page. */
function help(command: typeof program): string {
  let text = "";
  command.configureOutput({ writeOut: (part) => (text += part), getOutHelpWidth: () => 74 });
  command.outputHelp();
  return text.trimEnd();
}

/** Those that `--help` lists. */
const shown = (command: typeof program) =>
  command
    .createHelp()
    .visibleCommands(command)
    .filter((sub) => sub.name() !== "help");

const block = (text: string) => `\`\`\`text\n${text}\n\`\`\``;

/** What docs/command.md links to for a verb. */
function guidesOf(verb: string): string {
  const row = read("docs/command.md")
    .split("\n")
    .find((line) => line.startsWith("| `") && (line.split("|")[1] ?? "").includes(`\`${verb}\``));
  const links = [...(row ?? "").matchAll(/\[([^\]]+)\]\(([^)#]+(?:#[^)]*)?)\)/g)].map(
    ([, text, target]) => `[${text}](${target})`,
  );
  return ["[the command](command.md)", ...links].join(", ");
}

export function verbs(): Verb[] {
  return shown(program).map((command) => ({
    name: command.name(),
    page: [
      `# holdfast ${command.name()}`,
      command.description(),
      block(help(command)),
      ...shown(command).flatMap((sub) => [
        `## ${command.name()} ${sub.name()}`,
        sub.description(),
        block(help(sub)),
      ]),
      `More: ${guidesOf(command.name())}.`,
      "",
    ].join("\n\n"),
  }));
}
