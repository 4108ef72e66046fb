import { Argument, type Command } from "commander";
import { whole } from "../options.ts";
import { below, does, family } from "../patterns/verbs.ts";

const load = () => import("../patterns/strategy.ts");

export function strategy(program: Command): void {
  const command = family(program, "strategy", {
    description: "How locks of this database are kept: as advisory locks, or as rows of a table.",
    examples: `
Examples:
  holdfast strategy
  holdfast strategy set "lock row"
  holdfast strategy --json

It is written down at the first use, and all processes keep to it: one that is told otherwise is refused (HF_STRATEGY).`,
  });
  does(command, async (_, options) => (await load()).show(options));

  does(
    below(command, "set", {
      description: "Change how locks are kept, for everybody.",
      changes: true,
      examples: `
Examples:
  holdfast strategy set "lock row"
  holdfast strategy set "transaction advisory" --yes --note "the pooler is gone"

From the beginning nobody gets a lock: calls fail with HF_STRATEGY. After half a minute all processes know, and if nobody has a
lock of the old kind, it is done; else all is as before, and the exit code is 2. Instances without the option \`strategy\` go
on by themselves. If it was stopped in the middle, call it again: with the same strategy, or with the one before.`,
    })
      .addArgument(new Argument("<strategy>", "how").choices(["transaction advisory", "lock row"]))
      .option("--wait <ms>", "for those who have locks of the old kind", whole(0, 3_600_000), 5000),
    async ([to], options) => (await load()).set(to as string, options),
  );
}
