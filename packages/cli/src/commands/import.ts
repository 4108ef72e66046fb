import { type Command } from "commander";
import { whole } from "../options.ts";
import { changeOptions } from "../patterns/options.ts";
import { urlOption } from "../url.ts";
import type { ImportOptions } from "../import/run.ts";

const examples = `
Jobs that wait, are scheduled or will be retried are moved into queues of Holdfast in the same database, in one
transaction, while workers of both run: a job that a worker of theirs fetches at that moment is run there or moved, never
both. What their workers have is left to them. Schedules are printed as code, not moved.

Examples:
  holdfast import pg-boss --dry-run
  holdfast import pg-boss --queue emails reports=nightly-reports
  holdfast import graphile-worker --yes --wait 60
  holdfast import pg-boss --peer-schema jobs --json | jq .moved

With --wait it moves again what comes back, until their workers have none of these jobs any more; the exit code is 1 if
some are left then. It is 1 as well if the answer was no, 2 if it could not be done (then nothing was moved), and 130 if
it was stopped.`;

export function importJobs(program: Command): void {
  changeOptions(
    urlOption(
      program
        .command("import")
        .description("Move jobs of pg-boss or graphile-worker into queues, while workers run.")
        .argument("<peer>", "pg-boss or graphile-worker"),
    ),
  )
    .option("--queue <name...>", "only these; emails=mails moves emails to the queue mails (default: all)")
    .option("--peer-schema <name>", "where its tables are (default: pgboss, graphile_worker)")
    .option("--dry-run", "only show what would be moved")
    .option("--wait <seconds>", "go on for up to so long, until nothing is left there", whole(1, 86_400))
    .option("--deadline <seconds>", "how long the transaction may take", whole(1, 86_400), 600)
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast import --help` lists the options.")
    .action(async (peer: string, options: ImportOptions) => {
      const { runImport } = await import("../import/run.ts");
      await runImport(peer, options);
    });
}
