/** A job to be enqueued, checked. */
import { shown } from "../seam/shown.ts";
import type { CallOptions } from "../batch/calls.ts";
import { UsageError } from "../seam/errors.ts";
import { checkJson, checkMoment, checkText, checkUnchanged, checkWhole } from "../input/values.ts";
import { largest, longestMs, longestName } from "./limits.ts";
import type { Payloads } from "./payload.ts";
import type { NewJob } from "./store.ts";
import type { EnqueueOptions } from "./types.ts";

/** Options of one job. */
export type JobOptions = Omit<EnqueueOptions, keyof CallOptions>;

export const jobNames: readonly string[] = ["key", "onDuplicate", "runAt", "delayMs", "priority", "group"];

export async function newJob<Input>(
  queue: string,
  payloads: Payloads<Input, unknown>,
  payload: Input,
  options: JobOptions,
): Promise<NewJob> {
  checkOptions(options);
  const { key, group, priority = 0, runAt, delayMs, onDuplicate } = options;
  // A schema may make of the text what the type says.
  if (payloads.hasSchema) await payloads.check(payload);
  else checkUnchanged("enqueue", "the payload", payload);
  const json = checkJson("enqueue", "the payload", payload);
  // A character has up to three bytes.
  const bytes = json.length * 3 > largest ? Buffer.byteLength(json) : 0;
  if (bytes > largest)
    throw new UsageError(
      `enqueue: the payload for queue ${JSON.stringify(queue)} is ${bytes} bytes of JSON, and ${largest} are the most: keep it elsewhere, and enqueue where it is`,
    );
  return {
    payload: json,
    priority,
    group,
    key,
    replace: onDuplicate === "replace",
    // Whatever is past is due now; the server's calendar does not go back as far as a Date does.
    runAt: runAt ? Math.max(0, runAt.getTime()) : undefined,
    delayMs,
  };
}

function checkOptions(options: JobOptions): void {
  const { key, group, priority = 0, runAt, delayMs, onDuplicate = "ignore" } = options;
  if (onDuplicate !== "ignore" && onDuplicate !== "replace")
    throw new UsageError('enqueue: onDuplicate must be "ignore" or "replace"');
  checkWhole("enqueue", "priority", priority, -32_767, 32_767);
  if (runAt !== undefined) checkMoment("enqueue", "runAt", runAt);
  if (runAt !== undefined && delayMs !== undefined) throw new UsageError("enqueue: either runAt or delayMs");
  if (delayMs !== undefined && !(typeof delayMs === "number" && delayMs >= 0 && delayMs <= longestMs))
    throw new UsageError(
      `enqueue: delayMs must be a number of milliseconds from 0 to ${longestMs}, not ${shown(delayMs)}`,
    );
  for (const [what, text] of Object.entries({ key, group }))
    if (text !== undefined) checkText("enqueue", what, text, { most: longestName });
}
