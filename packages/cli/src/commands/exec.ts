import { type Command, Option } from "commander";
import { milliseconds } from "../options.ts";
import { urlOption } from "../url.ts";
import type { ExecOptions } from "../exec/run.ts";

const examples = `
KEY is a name as holdfast locks shows it: image-upload:42 is key("image-upload", "42").

Examples:
  holdfast exec --lock migrations --follow -- npx prisma migrate deploy
  holdfast exec --lock nightly-report --skip -- node report.js
  holdfast exec --lock backup --wait 60000 -- sh -c 'pg_dump shop > shop.sql'
  holdfast exec --lock import:42 --lease --ttl 60000 -- ./import.sh

The command gets HOLDFAST_LOCK and, with --lease, HOLDFAST_FENCE in its environment. Its exit code is passed on, 128+n
after a signal; with --follow, that of the run that was followed. 75: not free within --wait. 70: the lock was lost, and
the command was ended; or the run that was followed was cut off. 126, 127: it could not be started. 2: the lock could
not be asked for.`;

export function exec(program: Command): void {
  const command = urlOption(program.command("exec"))
    .description("Run a command under a lock.")
    .argument("<command...>", "what to run, after --")
    .requiredOption(
      "--lock <key>",
      "the key; several are taken in one order",
      (value: string, before: readonly string[] | undefined) => [...(before ?? []), value],
    )
    .addOption(
      new Option("--wait <ms>", "wait at most so long (default: for ever)").argParser(milliseconds(0)),
    )
    .addOption(
      new Option("--skip", "if it is busy, do not run, and exit with 0").conflicts(["wait", "follow"]),
    )
    .addOption(
      new Option(
        "--follow",
        "if it is busy, wait until it has ended, do not run, and exit as it did",
      ).conflicts(["wait"]),
    )
    .option("--lease", "a lease besides the lock, with a fence; on SQLite a lease alone")
    .option("--ttl <ms>", "how long a lease lasts unless it is renewed (default: 30000)", milliseconds(100))
    .option("--shared", "let others share it")
    .option("--keep-going", "if the lock is lost, only warn")
    .option("--grace <ms>", "from SIGTERM to SIGKILL, if the lock is lost", milliseconds(0), 5000)
    .option("--quiet", "say nothing unless something is wrong")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast exec --help` lists the options.");
  // What follows the command's name is the command's.
  program.enablePositionalOptions();
  command.passThroughOptions();
  command.action(async (words: string[], options: ExecOptions) => {
    const { execute } = await import("../exec/run.ts");
    // A server that has fallen silent would keep the process alive.
    process.exit(await execute(words, options));
  });
}
