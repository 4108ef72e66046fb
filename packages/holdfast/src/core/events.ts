import { channel } from "node:diagnostics_channel";

/**
 * What happens inside, for whoever subscribes through `node:diagnostics_channel`. Payloads carry names of keys
 * (as `names` shows them) and figures, never values of statements.
 */
export interface Events {
  "holdfast:transaction:begin": { attempt: number; locks: readonly string[]; isolation: string };
  "holdfast:transaction:end": {
    attempt: number;
    locks: readonly string[];
    outcome: "commit" | "rollback";
    durationMs: number;
    error?: unknown;
  };
  "holdfast:transaction:retry": {
    attempt: number;
    locks: readonly string[];
    failure: string;
    delayMs: number;
  };
  "holdfast:lock:granted": { locks: readonly string[]; waitedMs: number };
  "holdfast:lock:refused": { locks: readonly string[]; waitedMs: number; reason: "busy" | "timeout" };
  "holdfast:commit:resolved": { outcome: string };
  "holdfast:session:held": { locks: readonly string[]; waitedMs: number };
  "holdfast:session:released": { locks: readonly string[] };
  "holdfast:session:lost": { locks: readonly string[]; error: unknown };
  "holdfast:rows:locked": { table: string; rows: number; waitedMs: number };
  "holdfast:rows:refused": { table: string; waitedMs: number; reason: "busy" | "timeout" };
  "holdfast:table:locked": { table: string; mode: string; waitedMs: number };
  "holdfast:lease:granted": { lease: string; fence: number; waitedMs: number };
  "holdfast:lease:refused": { lease: string; waitedMs: number; reason: "busy" | "timeout" };
  "holdfast:lease:renewed": { lease: string; fence: number };
  "holdfast:lease:released": { lease: string; fence: number };
  "holdfast:lease:lost": { lease: string; fence: number; error: unknown };
  "holdfast:version:stale": { table: string; attempt: number };
  "holdfast:once:replayed": { id: string };
  "holdfast:connection:wrong": { query: string | undefined; transaction: string | undefined };
  "holdfast:quota:failed": { quotas: readonly string[]; failed: "closed" | "open"; error: unknown };
  "holdfast:leader:gained": { leader: string; fence: number };
  "holdfast:leader:lost": { leader: string; fence: number; error?: unknown };
  "holdfast:schedule:started": { schedule: string; tick: Date; fence: number; attempt: number };
  "holdfast:schedule:done": {
    schedule: string;
    tick: Date;
    fence: number;
    attempt: number;
    durationMs: number;
  };
  "holdfast:schedule:failed": {
    schedule: string;
    tick: Date;
    attempt: number;
    retryInMs: number | undefined;
    error: unknown;
  };
  "holdfast:schedule:skipped": { schedule: string; tick: Date };
  "holdfast:schedule:missed": { schedule: string; first: Date; before: Date };
  "holdfast:schedule:lost": { schedule: string; tick: Date; fence: number; error: unknown };
  /** `again`: milliseconds until it runs again; undefined: it has failed for good. */
  "holdfast:queue:failed": {
    queue: string;
    job: number;
    attempt: number;
    again: number | undefined;
    error: unknown;
  };
  /** A worker was given up for dead, and its jobs went to others. */
  "holdfast:queue:lost": { queue: string; worker: number };
  "holdfast:queue:recovered": { jobs: number; queues: readonly string[] };
  "holdfast:queue:trouble": { queue: string; error: unknown };
  "holdfast:migrated": { id: number; name: string };
}

const channels = new Map<string, ReturnType<typeof channel>>();

export function emit<K extends keyof Events>(name: K, payload: () => Events[K]): void {
  let found = channels.get(name);
  if (!found) channels.set(name, (found = channel(name)));
  // The payload is built only for somebody.
  if (found.hasSubscribers) found.publish(payload());
}
