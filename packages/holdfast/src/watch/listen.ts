/** Subscriptions to what Holdfast tells, ended together. */
import { subscribe, tracingChannel, unsubscribe } from "node:diagnostics_channel";
import { UsageError, message } from "../seam/errors.ts";
import type { Events, Traced, Traces } from "../events/events.ts";

export type Listeners = { readonly [K in keyof Events]?: (event: Events[K]) => void };

export interface Tracer<M> {
  start(message: M): void;
  end(message: M): void;
}

export type Tracers = { readonly [K in keyof Traces]?: Tracer<Traces[K] & Traced> };

/** What a listener throws would be an uncaught exception: nobody's application is to end for its metrics. */
function harmless(listener: (argument: unknown) => void): (argument: unknown) => void {
  let warned = false;
  return (argument) => {
    try {
      listener(argument);
    } catch (error) {
      if (!warned) process.emitWarning(`Metrics of Holdfast: ${message(error)}`, "HoldfastWarning");
      warned = true;
    }
  };
}

/** Returns what ends them. */
export function listen(listeners: Listeners): () => void {
  const ends = Object.entries(listeners).map(([name, listener]) => {
    const told = harmless(listener as (event: unknown) => void);
    subscribe(name, told);
    return () => unsubscribe(name, told);
  });
  return () => {
    for (const end of ends) end();
  };
}

export function trace(tracers: Tracers): () => void {
  const ends = Object.entries(tracers).map(([name, tracer]) => {
    const { start, asyncEnd } = tracingChannel(name);
    const { start: starts, end: ended } = tracer as Tracer<unknown>;
    const [started, over] = [harmless(starts), harmless(ended)];
    start.subscribe(started);
    asyncEnd.subscribe(over);
    return () => {
      start.unsubscribe(started);
      asyncEnd.unsubscribe(over);
    };
  });
  return () => {
    for (const end of ends) end();
  };
}

/** As much of a queue as is asked how full it is. */
export interface CountedQueue {
  readonly name: string;
  counts(): Promise<{
    readonly waiting: number;
    readonly delayed: number;
    readonly running: number;
    readonly failed: number;
  }>;
}

export interface MeasureOptions {
  /**
   * What the label `lock` says, given the name of a lock as events show it. Default: what comes before the first colon,
   * so `image-upload` of `image-upload:42`. Each answer is a series of its own: never an id. `false`: no such label.
   */
  readonly namespace?: ((name: string) => string | undefined) | false;
  /** Queues that are asked how full they are, each time that somebody looks. */
  readonly queues?: readonly CountedQueue[];
  /**
   * What the label `lock` will say, as far as it is known: these begin with zero when the process starts. Others do when
   * a lock is first taken; what is refused or lost before anybody has looked seems never to have increased.
   */
  readonly locks?: readonly string[];
}

export const measureOptions = ["namespace", "queues", "locks"] as const;

export function checkMeasures(call: string, { namespace, queues = [], locks = [] }: MeasureOptions): void {
  if (namespace !== undefined && namespace !== false && typeof namespace !== "function")
    throw new UsageError(`${call}: namespace must be a function of a lock's name, or false`);
  if (!Array.isArray(queues) || !queues.every((each) => typeof each?.counts === "function"))
    throw new UsageError(`${call}: queues must be a list of what queue(hf, name) returns`);
  if (!Array.isArray(locks) || !locks.every((each) => typeof each === "string"))
    throw new UsageError(`${call}: locks must be a list of what the label \`lock\` says`);
}
