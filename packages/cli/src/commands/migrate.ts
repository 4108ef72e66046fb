import { type Command, Option } from "commander";
import { changeOptions } from "../patterns/options.ts";
import { whole } from "../options.ts";
import { refuseUnknown } from "../patterns/verbs.ts";
import { urlOption } from "../url.ts";
import type { MigrateOptions } from "../patterns/migrate.ts";

const examples = `
Examples:
  holdfast migrate --url postgres://localhost/shop
  holdfast migrate --yes
  holdfast migrate status
  holdfast migrate print --engine postgres | psql shop
  holdfast migrate grants --role app --engine postgres | psql shop
  holdfast migrate --citus --places 6

Several processes may migrate at once: one does it, the others wait.`;

const statusExamples = `
Examples:
  holdfast migrate status
  holdfast migrate status --json | jq '.migrations[] | select(.state == "missing")'

Routines (functions, procedures, views) are outdated if their text is not that of this version.

The exit code is 0 if all of them are applied, 1 if some are missing or outdated, and 2 if it could not be found out.`;

const printExamples = `
It needs no database. The SQL also writes down what was applied, so that holdfast migrate has nothing left to do.
Tables are numbered, and come once. Routines follow them, all of them, and can be run again with each new version.

Examples:
  holdfast migrate print --engine postgres > migrations/holdfast.sql
  holdfast migrate print --engine postgres --from 9
  holdfast migrate print --engine postgres --only routines > migrations/R__holdfast.sql
  holdfast migrate print --engine mysql | mysql shop`;

const grantsExamples = `
It needs no database. The role gets what every pattern and lock needs, and cannot migrate. Run the SQL as the owner of the tables, and again
after each migrate that has made something.

Examples:
  holdfast migrate grants --role app --engine postgres | psql shop
  holdfast migrate grants --role app@10.0.0.% --engine mysql | mysql shop
  holdfast migrate grants --role app --engine postgres --citus --places 6 | psql shop

On MySQL and MariaDB, app is the same as app@% (on MariaDB also a role), and what follows the last @ is the host.`;

const engines = ["postgres", "mysql", "mariadb", "sqlite"];
const engineOption = () => new Option("--engine <engine>", "of which database (default: that of --url)");

const citusOptions = (command: Command) =>
  command
    .option("--citus", "in schemas that Citus keeps on its nodes, for places(…) of holdfast/citus")
    .option("--places <count>", "with --citus: how many schemas (default: 8)", whole(1, 1024));

export function migrate(program: Command): void {
  const command = citusOptions(changeOptions(urlOption(program.command("migrate"))))
    .description(
      "Make or update Holdfast's own tables and routines; say what is missing; print the SQL, and grants.",
    )
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast migrate --help` lists the options.")
    // What follows the name of a subcommand is the subcommand's.
    .enablePositionalOptions()
    .allowExcessArguments()
    .action(async (options: MigrateOptions, self: Command) => {
      refuseUnknown(self);
      const { migrate: run } = await import("../patterns/migrate.ts");
      await run(options);
    });

  urlOption(command.command("status"))
    .description("Which migrations are applied, and which are missing or outdated; changes nothing.")
    .option("--json", "print one JSON document")
    .addHelpText("after", statusExamples)
    .action(async (_, sub: Command) => {
      const { status } = await import("../patterns/migrate.ts");
      await status(sub.optsWithGlobals());
    });

  urlOption(command.command("print"))
    .description("The SQL, for psql or your own migration tool.")
    .addOption(engineOption().choices(engines))
    .option("--from <id>", "only from this migration on", whole(1), 1)
    .addOption(
      new Option("--only <part>", "without the other part (default: both)").choices(["tables", "routines"]),
    )
    .option("--json", "print one JSON document")
    .addHelpText("after", printExamples)
    .action(async (_, sub: Command) => {
      const { printSql } = await import("../patterns/migrate.ts");
      await printSql(sub.optsWithGlobals());
    });

  citusOptions(urlOption(command.command("grants")))
    .description("The SQL that lets a role use every pattern and lock, and no more.")
    .requiredOption("--role <role>", "who gets the rights")
    .addOption(engineOption().choices([...engines, "duckdb"]))
    .option("--json", "print one JSON document")
    .addHelpText("after", grantsExamples)
    .action(async (_, sub: Command) => {
      const { printGrants } = await import("../patterns/migrate.ts");
      await printGrants(sub.optsWithGlobals());
    });
}
