/** What becomes of output that cannot be written. The work of a verb does not depend on who reads about it. */
import { exitCodes } from "./failure.ts";

/** Nobody reads any more: `| head`, a terminal that was closed, a log collector that died. */
const gone = new Set<string | undefined>(["EPIPE", "EIO", "ECONNRESET", "ERR_STREAM_DESTROYED"]);

let listening = false;

/**
 * Lets verbs finish when their output cannot be written. A reader that has gone is no failure: the exit code is that of the
 * work. A full disk is one (exit code 2), since whoever opens the file later would take half of it for all.
 */
export function keepGoingWithoutReaders(): void {
  if (listening) return;
  listening = true;
  // Without a listener, Node ends the process with a stack, in the middle of the work.
  process.stderr.on("error", () => {});
  let told = false;
  process.stdout.on("error", (error: NodeJS.ErrnoException) => {
    if (told || gone.has(error.code)) return;
    told = true;
    process.stderr.write(`holdfast: Could not write all of the output: ${error.message}.\n`);
    process.once("exit", (code) => {
      if (code < exitCodes.failed) process.exitCode = exitCodes.failed;
    });
  });
}
