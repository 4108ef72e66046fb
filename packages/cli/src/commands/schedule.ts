import type { Command } from "commander";
import { whole } from "../options.ts";
import { below, does, family } from "../patterns/verbs.ts";

const load = () => import("../patterns/schedule.ts");

export function schedule(program: Command): void {
  const command = family(program, "schedule", {
    description: "Schedules and their runs.",
    examples: `
Examples:
  holdfast schedule
  holdfast schedule show nightly-report
  holdfast schedule pause nightly-report
  holdfast schedule --json | jq '.schedules[] | select(.lastRun.state == "failed") | .name'

When a schedule is due is defined in your code; the database knows what has become of its ticks.`,
  });
  does(command, async (_, options) => (await load()).list(options));
  does(
    below(command, "show", {
      description: "The last runs of a schedule: when, how long, and what went wrong.",
      examples: `
Examples:
  holdfast schedule show nightly-report
  holdfast schedule show nightly-report --limit 5 --json`,
    })
      .argument("<name>")
      .option("--limit <n>", "how many runs, the newest first", whole(1, 1_000_000), 20),
    async ([name], options) => (await load()).show(name as string, options),
  );
  for (const [verb, description] of [
    ["pause", "Let no process begin a tick; what runs goes on."],
    ["resume", "Let ticks be begun again."],
  ] as const)
    does(
      below(command, verb, {
        description,
        changes: true,
        examples: `
Examples:
  holdfast schedule ${verb} nightly-report
  holdfast schedule ${verb} nightly-report --yes --note "maintenance"`,
      }).argument("<name>"),
      async ([name], options) => (await load()).pause(name as string, verb === "pause", options),
    );
}
