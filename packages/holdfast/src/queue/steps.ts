/** Calls that may have much to do: in steps, each of which is kept. */
import type { Connection } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { checkSignal } from "../input/options.ts";
import { checkWhole } from "../input/values.ts";
import type { How, QueueStep } from "./store.ts";
import type { StepOptions } from "./types.ts";

/** Of jobs at a time: what takes longer than ten seconds is given up, and one step does not. */
const perStep = 1000;

export const stepNames: readonly string[] = ["signal", "onProgress"];

/** Where a step begins. */
interface From {
  readonly after: number;
  readonly upTo: number | undefined;
  readonly most: number;
}

/** Asks one database about one queue. */
export type QueueCall = <T>(
  work: (connection: Connection, number: number, how: How) => Promise<T>,
) => Promise<T>;

export interface Progress {
  readonly done: number;
  add(count: number): void;
}

export function progressOf({ signal, onProgress }: StepOptions): Progress {
  checkSignal(signal);
  if (onProgress !== undefined && typeof onProgress !== "function")
    throw new UsageError("onProgress must be a function");
  signal?.throwIfAborted();
  let done = 0;
  return {
    get done() {
      return done;
    },
    add(count) {
      done += count;
      onProgress?.(done);
      signal?.throwIfAborted();
    },
  };
}

export function idsOf(call: string, ids: number | readonly number[]): readonly number[] {
  return [ids].flat().map((id) => checkWhole(call, "id", id));
}

/** By their ids, from the first to the last. Resolves to how many. */
export async function inSteps(
  call: QueueCall,
  progress: Progress,
  one: (connection: Connection, number: number, from: From, how: How) => Promise<QueueStep & Partial<From>>,
): Promise<number> {
  const before = progress.done;
  for (let from: From | undefined = { after: 0, upTo: undefined, most: perStep }; from;) {
    const now: From = from;
    const step: QueueStep & Partial<From> = await call((connection, number, how) =>
      one(connection, number, now, how),
    );
    progress.add(step.count);
    from = step.last === undefined ? undefined : { after: step.last, upTo: step.upTo, most: perStep };
  }
  return progress.done - before;
}

/** Of these ids, some at a time. Resolves to how many there are so far. */
export async function inChunks(
  call: QueueCall,
  ids: readonly number[],
  progress: Progress,
  step: (connection: Connection, number: number, some: readonly number[], how: How) => Promise<number>,
): Promise<number> {
  for (let from = 0; from < ids.length; from += perStep)
    progress.add(
      await call((connection, number, how) => step(connection, number, ids.slice(from, from + perStep), how)),
    );
  return progress.done;
}
