import { type Command, Option } from "commander";
import { milliseconds } from "../options.ts";
import { changeOptions } from "../patterns/options.ts";
import { urlOption } from "../url.ts";
import type { KillOptions } from "../locks/kill.ts";

const examples = `
It shows what each session holds and who waits for it, and asks. Then the session's statement is cancelled; if it
still holds on after --patience, or if it has no statement to cancel, the session is terminated. Who did that to whom
is written to the audit, where one is kept (holdfast audit); it is done also if that fails.

A transaction of Holdfast's that is terminated is not run again (HF_KILLED) if its client notices within a few seconds, and
who takes what it held, within --watch, is named.

Examples:
  holdfast kill 4711
  holdfast kill 4711 4712 --yes --patience 500
  holdfast kill 4711 --cancel
  holdfast kill 4711 --terminate --yes --json --note "ticket 4711"

The exit code is 0 if each of them let go, 1 if one did not or nothing was done, 2 if one could not be ended.`;

export function kill(program: Command): void {
  changeOptions(urlOption(program.command("kill")))
    .description("End a session that is in the way: cancel its statement, then terminate it.")
    .argument("<session...>", "numbers of sessions, as holdfast locks shows them")
    .addOption(new Option("--cancel", "only cancel the statement").conflicts("terminate"))
    .addOption(new Option("--terminate", "terminate at once"))
    .option("--patience <ms>", "how long a cancelled session may hold on", milliseconds(0), 2000)
    .option(
      "--watch <ms>",
      "how long to look whether what a terminated session held is taken again",
      milliseconds(0),
      3000,
    )
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast kill --help` lists the options.")
    .action(async (sessions: string[], options: KillOptions) => {
      const { killSessions } = await import("../locks/kill.ts");
      await killSessions(sessions, options);
    });
}
