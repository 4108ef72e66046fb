import { type Command, Option } from "commander";

/** `--yes` and `--note`, as every verb that changes something has them. */
export function changeOptions(command: Command): Command {
  return command
    .option("--yes", "do not ask")
    .option("--note <text>", "why, for the audit (no secrets: it is stored as it is)");
}

/** Of repairs: which of both is right. */
export function trustOption(): Option {
  return new Option("--trust <which>", "with --repair: what is right, the ledger or what is counted")
    .choices(["ledger", "levels"])
    .default("ledger");
}
