import type { Command } from "commander";
import { whole } from "../options.ts";
import { moment } from "../patterns/parse.ts";
import { trustOption } from "../patterns/options.ts";
import { below, does, family } from "../patterns/verbs.ts";

const load = () => import("../patterns/stock.ts");

/** Where it is kept, as the code has it. */
function place(command: Command): Command {
  return command
    .option("--name <name>", "of the stock, if your code gives it one (default: stock)")
    .option("--table <table>", "your own table, if on-hand quantities are kept there: [schema.]table")
    .option("--sku-column <column>", "of that table")
    .option("--on-hand-column <column>", "of that table")
    .option("--location-column <column>", "of that table, if it has one")
    .option("--min-column <column>", "of that table, if it has one");
}

const spot = (command: Command): Command =>
  place(command).argument("<sku>").option("--location <location>", "where (default: main)");

const span = (command: Command): Command =>
  command
    .option("--from <date>", "a date, or so long ago: 30d", moment(-1))
    .option("--to <date>", "before this date", moment(-1));

export function stock(program: Command): void {
  const command = place(
    family(program, "stock", {
      description: "Stock: levels, movements, corrections.",
      examples: `
Examples:
  holdfast stock
  holdfast stock --sku CAP HAT --location warehouse
  holdfast stock --below 5
  holdfast stock history CAP
  holdfast stock adjust CAP 12 --note "counted on Friday"
  holdfast stock reconcile

Changes are movements. They are asked for, unless --yes is given, and written to the audit too (holdfast audit).`,
    }),
  )
    .option("--sku <sku...>", "only these")
    .option("--location <location>", "only there")
    .option("--below <n>", "only where less than this is available", whole(-Number.MAX_SAFE_INTEGER))
    .option("--limit <n>", "how many", whole(1), 100)
    .option("--after <spot...>", "after this SKU and location");
  does(command, async (_, options) => (await load()).list(options));

  does(
    span(
      place(
        below(command, "history", {
          description: "Movements, newest first: of one SKU, or all.",
          examples: `
Examples:
  holdfast stock history CAP
  holdfast stock history CAP --location warehouse --from 7d
  holdfast stock history --source ORDER --page 1000 --json`,
        }),
      ).argument("[sku]"),
    )
      .option("--location <location>", "only there")
      .option("--source <source>", "only from there, e.g. ORDER")
      .option("--page <n>", "how many", whole(1, 10_000), 50)
      .option("--next <place>", "what the page before named"),
    async ([sku], options) => (await load()).history(sku as string | undefined, options),
  );

  does(
    spot(
      below(command, "adjust", {
        description: "What was counted: a movement of the difference to what was on hand.",
        changes: true,
        examples: `
Examples:
  holdfast stock adjust CAP 12 --note "counted on Friday"
  holdfast stock adjust CAP 0 --location warehouse --yes`,
      }),
    )
      .argument("<count>", "how many are there", whole(-Number.MAX_SAFE_INTEGER))
      .option("--new", "there has never been any of it: make the level")
      .option("--id <id>", "the same id is applied once"),
    async ([sku, n], options) => (await load()).adjust(sku as string, n as number, options),
  );

  for (const [verb, description] of [
    ["add", "Put some in: a movement."],
    ["take", "Take some out, if it is there: a movement."],
  ] as const) {
    const made = spot(
      below(command, verb, {
        description,
        changes: true,
        examples: `
Examples:
  holdfast stock ${verb} CAP 3 --note "${verb === "add" ? "found behind the shelf" : "broken"}"`,
      }),
    )
      .argument("<quantity>", "how many", whole(1))
      .option("--id <id>", "the same id is applied once");
    if (verb === "add") made.option("--new", "there has never been any of it: make the level");
    does(made, async ([sku, n], options) => (await load()).move(sku as string, verb, n as number, options));
  }

  does(
    place(
      below(command, "reconcile", {
        description: "Whether movements add up to what is on hand, and reservations to what is reserved.",
        changes: true,
        examples: `
Examples:
  holdfast stock reconcile
  holdfast stock reconcile CAP --location warehouse --repair
  holdfast stock reconcile CAP --repair --trust levels --note "counted on Friday"

The exit code is 1 if something does not add up. --repair sets what is on hand to what the movements come to, and asks
before. With --trust levels what is on hand stays, and a movement of the difference is written. Either way the history
says so.`,
      }),
    )
      .argument("[sku]")
      .option("--location <location>", "only there")
      .option("--repair", "make both agree")
      .addOption(trustOption()),
    async ([sku], options) => (await load()).reconcile(sku as string | undefined, options),
  );

  does(
    span(
      place(
        below(command, "channels", {
          description: "What came from where: orders, returns, by hand, …",
          examples: `
Examples:
  holdfast stock channels
  holdfast stock channels CAP --from 2026-05-01 --to 2026-06-01`,
        }),
      ).argument("[sku]"),
    ).option("--location <location>", "only there"),
    async ([sku], options) => (await load()).channels(sku as string | undefined, options),
  );
}
