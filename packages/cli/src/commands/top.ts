import type { Command } from "commander";
import { urlOption } from "../url.ts";

export interface TopOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly blocked?: true;
}

const examples = `
Keys: ↑ ↓ or j k select, x (or K) ends the selected session and asks before, b shows blocked only, q quits.

Examples:
  holdfast top --url postgres://localhost/shop
  holdfast top --blocked

It looks at most once a second, and less often if the server takes long to answer. Without a terminal:
holdfast locks.`;

export function top(program: Command): void {
  urlOption(program.command("top"))
    .description("Who holds and who waits, live on the full screen.")
    .option("--blocked", "begin with those who wait, and who is in their way")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast top --help` lists the options.")
    .action(async (options: TopOptions) => {
      const { runTop } = await import("../locks/top.ts");
      await runTop(options);
    });
}
