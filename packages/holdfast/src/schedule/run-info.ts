import type { RunRow } from "./store.ts";
import type { RunInfo } from "./types.ts";

/** A run as people read it. */
export function asInfo({
  tick,
  state,
  attempt,
  fence,
  manual,
  holder,
  started,
  until,
  ended,
  error,
}: RunRow): RunInfo {
  return {
    tick: new Date(tick),
    state,
    attempt,
    fence,
    manual,
    holder,
    startedAt: new Date(started),
    until: new Date(until),
    endedAt: ended === undefined ? undefined : new Date(ended),
    error,
  };
}
