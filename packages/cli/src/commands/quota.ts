import { type Command, Option } from "commander";
import { whole } from "../options.ts";
import { moment, wholeOrNone } from "../patterns/parse.ts";
import { trustOption } from "../patterns/options.ts";
import { below, does, family } from "../patterns/verbs.ts";

const load = () => import("../patterns/quota.ts");

/** As the code has it: the database does not know. */
function definition(command: Command): Command {
  return command
    .option("--limit <n>", "the limit that the code has for it", whole(0))
    .option("--per <period>", 'its window: day, "15 minutes", or milliseconds')
    .addOption(
      new Option("--window <kind>", "how time gives back (default: fixed)").choices([
        "fixed",
        "sliding-log",
        "sliding-parts",
        "refill",
      ]),
    )
    .option("--parts <n>", "of sliding-parts", whole(1, 1000))
    .option("--time-zone <zone>", "whose days, weeks and months (default: UTC)");
}

const amendment = (command: Command): Command =>
  definition(command)
    .argument("<name>", "of the quota")
    .argument("<subject>", "as holdfast quota show lists them")
    .option("--id <id>", "the same id is applied once (default: another one each time)");

const made = (command: Command): Command =>
  command.option("--new", "the subject, or the quota, has never been used: make it");

export function quota(program: Command): void {
  const command = family(program, "quota", {
    description: "Quotas, credits and their ledger: look, grant, revoke, limit, refund, reconcile.",
    examples: `
Examples:
  holdfast quota
  holdfast quota show uploads
  holdfast quota show uploads ada --limit 100 --per day
  holdfast quota grant uploads ada 50 --expires 30d --note "ticket 4711"
  holdfast quota revoke uploads ada ticket-4711
  holdfast quota reconcile uploads

A subject of several dimensions is written as it is stored: '{"model":"large","org":"acme"}'.
Windows and limits are defined in your code. Name them (--limit, --per, --window, --time-zone) where it matters
what time has given back; without them, what the last entry left is shown and changed.
Changes are asked for, unless --yes is given, and written to the audit (holdfast audit).`,
  });
  does(command, async (_, options) => (await load()).list(options));

  does(
    definition(
      below(command, "show", {
        description: "The subjects of a quota; or how one of them stands, and its last entries.",
        examples: `
Examples:
  holdfast quota show uploads
  holdfast quota show uploads --after mary --page 500
  holdfast quota show uploads ada
  holdfast quota show uploads ada --limit 100 --per day --time-zone Europe/Madrid`,
      }),
    )
      .argument("<name>", "of the quota")
      .argument("[subject]")
      .option("--after <subject>", "subjects after this one")
      .option("--page <n>", "how many subjects, or entries", whole(1, 10_000)),
    async ([name, subject], options) =>
      (await load()).show(name as string, subject as string | undefined, options),
  );

  does(
    below(command, "history", {
      description: "The ledger of a subject, newest first.",
      examples: `
Examples:
  holdfast quota history uploads ada
  holdfast quota history uploads ada --page 1000 --json | jq '.entries[] | select(.kind == "grant")'`,
    })
      .argument("<name>", "of the quota")
      .argument("<subject>")
      .option("--before <version>", "entries before this version", whole(1))
      .option("--page <n>", "how many entries", whole(1, 10_000), 50),
    async ([name, subject], options) => (await load()).history(name as string, subject as string, options),
  );

  does(
    made(
      amendment(
        below(command, "grant", {
          description: "Credits on top of the limit, used when the limit is reached.",
          changes: true,
          examples: `
Examples:
  holdfast quota grant uploads ada 50
  holdfast quota grant uploads ada 50 --expires 2026-12-31 --priority -1 --id ticket-4711 --yes`,
        }),
      ).argument("<amount>", "how many", whole(1)),
    )
      .option("--expires <date>", "a date, or a span from now: 30d", moment(1))
      .option("--priority <n>", "lower ones are used first", whole(-1_000_000, 1_000_000)),
    async ([name, subject, amount], options) =>
      (await load()).grant(name as string, subject as string, amount as number, options),
  );

  does(
    below(command, "grants", {
      description: "The credits of a subject, in the order in which they are used.",
      examples: `
Examples:
  holdfast quota grants uploads ada
  holdfast quota grants uploads ada --json | jq '.grants[] | select(.left > 0)'`,
    })
      .argument("<name>", "of the quota")
      .argument("<subject>"),
    async ([name, subject], options) => (await load()).grants(name as string, subject as string, options),
  );

  does(
    definition(
      below(command, "revoke", {
        description: "Take back what is left of a grant; what was used of it stays used.",
        changes: true,
        examples: `
Examples:
  holdfast quota revoke uploads ada ticket-4711 --note "granted twice"

Grants are named by their ids, see holdfast quota grants.`,
      }),
    )
      .argument("<name>", "of the quota")
      .argument("<subject>", "as holdfast quota show lists them")
      .argument("<grant>", "its id"),
    async ([name, subject, id], options) =>
      (await load()).revoke(name as string, subject as string, id as string, options),
  );

  does(
    made(
      amendment(
        below(command, "limit", {
          description: "A limit of its own for a subject, or none: the quota's again.",
          changes: true,
          examples: `
Examples:
  holdfast quota limit uploads ada 500
  holdfast quota limit uploads ada none`,
        }),
      ).argument("<n>", 'a whole number, or "none"', wholeOrNone),
    ),
    async ([name, subject, n], options) =>
      (await load()).limit(name as string, subject as string, n as number | "none", options),
  );

  does(
    made(
      amendment(
        below(command, "plan", {
          description: "The plan of a subject, or none: the default one again.",
          changes: true,
          examples: `
Examples:
  holdfast quota plan uploads ada pro
  holdfast quota plan uploads ada none

Plans are defined in your code: one that it does not know counts as the default.`,
        }),
      ).argument("<plan>", 'its name, or "none"'),
    ),
    async ([name, subject, plan], options) =>
      (await load()).plan(name as string, subject as string, plan as string, options),
  );

  does(
    amendment(
      below(command, "reset", {
        description: "Nothing is used any more; holds and credits stay.",
        changes: true,
        examples: `
Examples:
  holdfast quota reset uploads ada`,
      }),
    ),
    async ([name, subject], options) => (await load()).reset(name as string, subject as string, options),
  );

  does(
    amendment(
      below(command, "refund", {
        description: "Give back what an entry used, or a part of it.",
        changes: true,
        examples: `
Examples:
  holdfast quota refund uploads ada request-17 --per day
  holdfast quota refund uploads ada request-17 2 --per hour --window sliding-parts

Entries are named by their ids, see holdfast quota history. A quota with a window needs it here, as the code has it:
only what the window still counts is given back.`,
      }),
    )
      .argument("<entry>", "the id of what used something")
      .argument("[amount]", "how much (default: all that is left of it)", whole(1)),
    async ([name, subject, entry, amount], options) =>
      (await load()).refund(
        name as string,
        subject as string,
        entry as string,
        amount as number | undefined,
        options,
      ),
  );

  does(
    below(command, "reconcile", {
      description: "Whether the ledger adds up to what is counted: of a subject, or of all.",
      changes: true,
      examples: `
Examples:
  holdfast quota reconcile uploads
  holdfast quota reconcile uploads ada --repair
  holdfast quota reconcile uploads ada --repair --trust levels

The exit code is 1 if something does not add up. --repair sets what is counted to what the ledger says, and asks
before. With --trust levels what is counted stays, and the ledger gets an entry that says so; of windows that slide, only
the ledger can be trusted.`,
    })
      .argument("<name>", "of the quota")
      .argument("[subject]")
      .option("--repair", "make both agree")
      .addOption(trustOption()),
    async ([name, subject], options) =>
      (await load()).reconcile(name as string, subject as string | undefined, options),
  );
}
