import type { Command } from "commander";

/** `--yes` and `--note`, as every verb that changes something has them. */
export function changeOptions(command: Command): Command {
  return command
    .option("--yes", "do not ask")
    .option("--note <text>", "why, for the audit (no secrets: it is stored as it is)");
}
