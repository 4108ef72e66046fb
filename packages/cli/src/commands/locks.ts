import type { Command } from "commander";
import { urlOption } from "../url.ts";

export interface LocksOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly blocked?: true;
  readonly json?: true;
}

const examples = `
Examples:
  holdfast locks --url postgres://localhost/shop
  holdfast locks --blocked
  holdfast locks --json | jq '.waiters[] | {lock: .name, session: .session.id, for: .blockedBy}'

holdfast top shows the same all the time; holdfast kill ends a session that is in the way.`;

export function locks(program: Command): void {
  urlOption(program.command("locks"))
    .description("Who holds which lock or lease, who waits, and for whom.")
    .option("--blocked", "only those who wait, and who is in their way")
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast locks --help` lists the options.")
    .action(async (options: LocksOptions) => {
      const { showLocks } = await import("../locks/show.ts");
      await showLocks(options);
    });
}
