import type { Command } from "commander";
import { whole } from "../options.ts";
import { below, does, family } from "../patterns/verbs.ts";

const load = () => import("../patterns/lease.ts");

const which = (command: Command): Command =>
  command
    .argument("[name]", "of the lease, as holdfast lease shows it")
    .option("--fence <n>", "its number, if several have that name, or instead of the name", whole(1));

export function lease(program: Command): void {
  const command = family(program, "lease", {
    description: "Leases and permits: who has them, and taking one away.",
    examples: `
Examples:
  holdfast lease
  holdfast lease show export:42
  holdfast lease end export:42 --note "web-3 is gone for good"
  holdfast lease end --fence 31 --yes
  holdfast lease --json | jq '.leases[] | select(.over) | .name'

Those that ran out and were never given back are shown too: whoever wants them gets them.
Changes are asked for, unless --yes is given, and written to the audit where one is kept (holdfast audit).`,
  });
  command.option("--limit <n>", "how many", whole(1, 1_000_000), 1000);
  does(command, async (_, options) => (await load()).list(options));

  does(
    which(
      below(command, "show", {
        description: "Who has a lease, since when and for how long, and who stands in line.",
        examples: `
Examples:
  holdfast lease show export:42
  holdfast lease show --fence 31 --json

The exit code is 2 if nobody has it.`,
      }),
    ),
    async ([name], options) => (await load()).show(name as string | undefined, options),
  );

  does(
    which(
      below(command, "end", {
        description: "Take a lease away from whoever has it: the next one in line gets it at once.",
        changes: true,
        examples: `
Examples:
  holdfast lease end export:42
  holdfast lease end --fence 31 --yes --note "its process hangs"

Its holder learns of it with its next renewal. Until then it may go on with what it does: fenced(tx, lease) refuses what
it writes to this database, other systems know nothing of it. The exit code is 2 if
nobody has it, and 1 if it was given back meanwhile.`,
      }),
    ),
    async ([name], options) => (await load()).end(name as string | undefined, options),
  );
}
