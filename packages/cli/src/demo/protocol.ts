/** What the demo and its processes tell each other. */
import type { RaceName, WayName } from "./names.ts";

/** What a process needs to know before it can take orders. */
export interface Setting {
  readonly url: string;
  readonly processes: number;
  readonly callers: number;
  /** Which of the processes it is, from 0. */
  readonly index: number;
}

/** Of a process beyond one per caller: queues and schedules keep some. */
export const spareConnections = 3;

export type ToWorker =
  | { readonly kind: "set-up"; readonly setting: Setting }
  | { readonly kind: "run"; readonly race: RaceName; readonly way: WayName };

/** How calls ended, as the callers saw it. */
export interface Tally {
  granted: number;
  refused: number;
  /** By SQLSTATE, or the error's own code or name. */
  failed: Record<string, number>;
  /** Transactions that Holdfast began again. */
  retried: number;
}

export type FromWorker =
  | { readonly kind: "ready" }
  | { readonly kind: "progress"; readonly finished: number }
  | { readonly kind: "done"; readonly tally: Tally; readonly latenciesMs: readonly number[] }
  | { readonly kind: "error"; readonly message: string };
