import type { Command } from "commander";
import { whole } from "../options.ts";
import { urlOption } from "../url.ts";

export interface AuditOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly limit: number;
  readonly before?: number;
  readonly target?: string;
  readonly json?: true;
}

const examples = `
Whatever holdfast queue, schedule, quota, stock, lease, kill and migrate change is written down before it is done, and
what became of it after. A line that stays "begun" is one of a process that died.

Examples:
  holdfast audit
  holdfast audit --target queue:emails --limit 20
  holdfast audit --json | jq '.lines[] | select(.outcome == "failed")'`;

export function audit(program: Command): void {
  urlOption(program.command("audit"))
    .description("What was changed by hand, by whom, and what became of it.")
    .option("--limit <n>", "how many lines, the newest first", whole(1, 10_000), 50)
    .option("--before <id>", "only lines before this one", whole(1))
    .option("--target <target>", "only of this, as it is shown, e.g. queue:emails")
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast audit --help` lists the options.")
    .action(async (options: AuditOptions) => {
      const { showTrail } = await import("../patterns/audit.ts");
      await showTrail(options);
    });
}
