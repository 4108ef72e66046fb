import { type Command, Option } from "commander";
import { whole } from "../options.ts";
import { ids, older } from "../patterns/parse.ts";
import { below, does, family } from "../patterns/verbs.ts";

const load = () => import("../patterns/queue.ts");

export function queue(program: Command): void {
  const command = family(program, "queue", {
    description: "Queues and their jobs: look, retry, discard, pause.",
    examples: `
Examples:
  holdfast queue
  holdfast queue show emails
  holdfast queue jobs emails --state running
  holdfast queue retry emails --all
  holdfast queue pause emails --note "the provider is down"
  holdfast queue --json | jq '.queues[] | select(.failed > 0)'

Changes are asked for, unless --yes is given, and written to the audit (holdfast audit).`,
  });
  does(command, async (_, options) => (await load()).list(options));

  does(
    below(command, "show", {
      description: "How a queue stands, and its failed jobs.",
      examples: `
Examples:
  holdfast queue show emails
  holdfast queue show emails --limit 100 --after 4711
  holdfast queue show emails --json | jq -r '.failed[].error'`,
    })
      .argument("<name>")
      .option("--limit <n>", "how many failed jobs", whole(1, 100_000), 20)
      .option("--after <id>", "failed jobs after this one", whole(0)),
    async ([name], options) => (await load()).show(name as string, options),
  );

  does(
    below(command, "jobs", {
      description: "Jobs that run, wait, are delayed or have failed: state, age, key, group, worker.",
      examples: `
Examples:
  holdfast queue jobs emails
  holdfast queue jobs emails --state running
  holdfast queue jobs emails --state waiting --limit 500 --json | jq '.jobs[] | select(.ageMs > 60000) | .id'

In the order in which they are begun, groups by their names. When a job that runs was begun is not stored.`,
    })
      .argument("<name>")
      .addOption(
        new Option("--state <state>", "only these").choices(["waiting", "delayed", "running", "failed"]),
      )
      .option("--limit <n>", "how many, of each state", whole(1, 10_000), 50)
      .option("--after <place>", "what the page before named"),
    async ([name], options) => (await load()).showJobs(name as string, options),
  );

  does(
    below(command, "job", {
      description: "Where a job is, and how it stands.",
      examples: `
Examples:
  holdfast queue job emails 4711

Of one that was retried by hand it also tells why it had failed before. The exit code is 1 if there is no such job: it was done, or never there.`,
    })
      .argument("<name>")
      .argument("<id>", "of the job", whole(1)),
    async ([name, id], options) => (await load()).job(name as string, id as number, options),
  );

  does(
    below(command, "retry", {
      description: "Let failed jobs begin anew.",
      changes: true,
      examples: `
Examples:
  holdfast queue retry emails 4711 4712
  holdfast queue retry emails --all --yes

Why they had failed is kept in the audit, and told by holdfast queue job.`,
    })
      .argument("<name>")
      .argument("[id...]", "of failed jobs", ids)
      .option("--all", "all that have failed"),
    async ([name, some], options) =>
      (await load()).retry(name as string, (some ?? []) as readonly number[], options),
  );

  does(
    below(command, "discard", {
      description: "Remove jobs that have failed or wait; what runs goes on.",
      changes: true,
      examples: `
Examples:
  holdfast queue discard emails 4711 4712
  holdfast queue discard emails 4711 --yes --json | jq '.discarded[].payload'

What was in them is printed with --json, and kept in the audit: holdfast audit --target queue:emails --json`,
    })
      .argument("<name>")
      .argument("<id...>", "of jobs", ids),
    async ([name, some], options) =>
      (await load()).discard(name as string, some as readonly number[], options),
  );

  does(
    below(command, "prune", {
      description: "Forget jobs that failed long ago.",
      changes: true,
      examples: `
Examples:
  holdfast queue prune emails --before 30d
  holdfast queue prune emails --before 2026-01-01 --yes`,
    })
      .argument("<name>")
      .requiredOption("--before <date>", "that failed before this date, or so long ago: 30d, 12h", older),
    async ([name], options) => (await load()).prune(name as string, options),
  );

  for (const [verb, description] of [
    ["pause", "Let no worker claim a job; what runs goes on."],
    ["resume", "Let workers claim jobs again."],
  ] as const)
    does(
      below(command, verb, {
        description,
        changes: true,
        examples: `
Examples:
  holdfast queue ${verb} emails
  holdfast queue ${verb} emails --yes --note "maintenance"`,
      }).argument("<name>"),
      async ([name], options) => (await load()).pause(name as string, verb === "pause", options),
    );
}
