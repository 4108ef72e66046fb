import type { Command } from "commander";
import { complain } from "../failure.ts";
import { milliseconds } from "../options.ts";
import { urlOption } from "../url.ts";

export interface HoldOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly shared?: true;
  readonly wait?: number;
  readonly lease?: true;
  readonly ttl?: number;
  readonly json?: true;
}

const examples = `
Examples:
  holdfast hold migrations
  holdfast hold image-upload:42 --wait 5000
  holdfast hold price-list --shared

It says when it has the lock and who comes to wait for it, until Ctrl-C or SIGTERM. The exit code is 0 then, 75 if it was
not free within --wait, and 70 if the lock was lost.`;

export function hold(program: Command): void {
  urlOption(program.command("hold"))
    .description("Hold a lock until Ctrl-C, for maintenance.")
    .argument("<key>", "as holdfast locks shows it, e.g. image-upload:42")
    .option("--shared", "let others share it")
    .option("--wait <ms>", "wait at most so long (default: for ever)", milliseconds(0))
    .option("--lease", "a lease besides the lock; on SQLite a lease alone")
    .option("--ttl <ms>", "how long a lease lasts unless it is renewed (default: 30000)", milliseconds(100))
    .option("--json", "print one JSON document when it is released")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast hold --help` lists the options.")
    .action(async (key: string, options: HoldOptions) => {
      const { holdKey } = await import("../exec/hold.ts");
      await holdKey(key, options).catch(complain);
      // A look that is not answered would keep the process alive.
      process.exit();
    });
}
