/** What is measured, in one list: OpenTelemetry, Prometheus, the page and the dashboard have it from here. */
import type { Events } from "../core/events.ts";
import { within } from "../core/interrupt.ts";
import { type CountedQueue, type MeasureOptions, listen } from "./listen.ts";

export interface Measure {
  /** As OpenTelemetry has it. Its exporters make of it, of unit and kind, the same name as `exposed`. */
  readonly name: string;
  readonly kind: "counter" | "updown" | "gauge" | "histogram";
  readonly help: string;
  readonly labels: readonly string[];
  /** Of histograms, in seconds. */
  readonly buckets?: readonly number[];
}

/** A lock that is free takes a millisecond; a wait ends after 5 s, and a transaction after 60, unless told otherwise. */
const short = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60];
/** Leases, jobs and nightly reports. */
const long = [0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14_400];

function counter(name: string, labels: string, help: string): Measure {
  return { name, kind: "counter", help, labels: labels.split(" ").filter(Boolean) };
}

function histogram(name: string, labels: string, buckets: readonly number[], help: string): Measure {
  return { name, kind: "histogram", help, labels: labels.split(" "), buckets };
}

export const measures = {
  transactions: counter(
    "holdfast.transactions",
    "outcome lock",
    "Attempts at transactions that have ended, by commit or rollback",
  ),
  transactionDuration: histogram(
    "holdfast.transaction.duration",
    "outcome lock",
    short,
    "How long attempts took, with the wait for a connection and for locks",
  ),
  retries: counter(
    "holdfast.transaction.retries",
    "failure lock",
    "Attempts that failed and were followed by another",
  ),
  commits: counter(
    "holdfast.commits.resolved",
    "outcome",
    "COMMITs whose answer was lost, by what the server told of them",
  ),
  lockWait: histogram(
    "holdfast.lock.wait",
    "kind outcome lock",
    short,
    "How long it took to get locks, or to be refused",
  ),
  lockRefused: counter("holdfast.locks.refused", "kind reason lock", "Locks that were not to be had"),
  lockHold: histogram("holdfast.lock.hold", "kind lock", long, "How long locks were held"),
  lockLost: counter("holdfast.locks.lost", "kind lock", "Locks and leases that were lost while held"),
  held: {
    name: "holdfast.locks.held",
    kind: "updown",
    help: "Locks of sessions and leases that this process holds",
    labels: ["kind", "lock"],
  },
  leader: {
    name: "holdfast.leader",
    kind: "updown",
    help: "1 while this process leads",
    labels: ["leader"],
  },
  stale: counter("holdfast.versions.stale", "table", "Versions that somebody else had changed"),
  replayed: counter("holdfast.once.replayed", "", "Calls of once that were answered from the record"),
  wrong: counter(
    "holdfast.connections.wrong",
    "",
    "Statements inside a transaction that went through the outer client",
  ),
  quota: counter(
    "holdfast.quota.decisions",
    "quota verdict",
    "Uses of quotas, by allowed, replayed or denied",
  ),
  quotaFailed: counter(
    "holdfast.quota.failures",
    "mode",
    "Requests that were let in (open) or turned away (closed) because the quota could not be asked",
  ),
  jobs: counter("holdfast.queue.jobs", "queue outcome", "Runs of jobs, by done, retry or failed"),
  jobDuration: histogram("holdfast.queue.duration", "queue outcome", long, "How long handlers of jobs took"),
  jobWait: histogram(
    "holdfast.queue.wait",
    "queue",
    long,
    "From when a job was enqueued until it ran for the first time",
  ),
  depth: {
    name: "holdfast.queue.depth",
    kind: "gauge",
    help: "Jobs in the database, by waiting, delayed, running or failed",
    labels: ["queue", "state"],
  },
  unknown: counter("holdfast.queue.unknown", "queue", "Times that a queue could not be asked for its depth"),
  recovered: counter("holdfast.queue.recovered", "", "Jobs of dead workers that were given to others"),
  trouble: counter("holdfast.queue.troubles", "queue", "Failures of workers, not of handlers"),
  runs: counter("holdfast.schedule.runs", "schedule outcome", "Runs of ticks, by done, retry or failed"),
  runDuration: histogram("holdfast.schedule.duration", "schedule outcome", long, "How long runs took"),
  skipped: counter(
    "holdfast.schedule.skipped",
    "schedule",
    "Ticks that were skipped because another run was not over",
  ),
  missed: counter("holdfast.schedule.missed", "schedule", "Times that ticks were passed over"),
  runLost: counter("holdfast.schedule.lost", "schedule", "Runs that were no longer this process's"),
} as const satisfies Readonly<Record<string, Measure>>;

export const allMeasures: readonly Measure[] = Object.values(measures);

/** Its name in Prometheus. */
export function exposed({ name, kind }: Measure): string {
  const plain = name.replaceAll(".", "_");
  return kind === "counter" ? `${plain}_total` : kind === "histogram" ? `${plain}_seconds` : plain;
}

export type Labels = Readonly<Record<string, string>>;

/** Where figures go. */
export interface Book {
  /** To a counter, or to one that also goes down. */
  add(measure: Measure, value: number, labels: Labels): void;
  /** Seconds, to a histogram. */
  record(measure: Measure, seconds: number, labels: Labels): void;
}

function beforeColon(name: string): string {
  const end = name.indexOf(":");
  return end < 0 ? name : name.slice(0, end);
}

const sharedMark = " (shared)";

/** Keeps the book from now on. Returns what ends it. */
export function keep(book: Book, { namespace = beforeColon }: MeasureOptions): () => void {
  const of = (name: string): string => {
    const plain = name.endsWith(sharedMark) ? name.slice(0, -sharedMark.length) : name;
    return namespace === false ? "" : (namespace(plain) ?? "none");
  };
  // Not called `namespace`: scraped from Kubernetes, everything has a label of that name already.
  const spaces = (names: readonly string[]): { lock?: string } => {
    if (namespace === false) return {};
    const [first, ...others] = names;
    if (first === undefined) return { lock: "none" };
    const lock = of(first);
    return { lock: others.every((each) => of(each) === lock) ? lock : "several" };
  };
  const waited = (
    kind: string,
    outcome: string,
    locks: readonly string[],
    { waitedMs }: { waitedMs: number },
  ) => {
    const where = spaces(locks);
    book.record(measures.lockWait, waitedMs / 1000, { kind, outcome, ...where });
    if (outcome !== "granted") book.add(measures.lockRefused, 1, { kind, reason: outcome, ...where });
  };
  /** Those whose beginning was seen: what began before that must not be taken off. */
  const held = new Map<number, Labels>();
  const leading = new Set<string>();
  const begin = (kind: string, hold: number, locks: readonly string[]) => {
    const labels = { kind, ...spaces(locks) };
    held.set(hold, labels);
    book.add(measures.held, 1, labels);
  };
  const end = (
    kind: string,
    hold: number,
    locks: readonly string[],
    heldMs: number | undefined,
    lost = false,
  ) => {
    const seen = held.get(hold);
    if (seen) book.add(measures.held, -1, seen);
    held.delete(hold);
    const labels = { kind, ...spaces(locks) };
    if (heldMs !== undefined) book.record(measures.lockHold, heldMs / 1000, labels);
    if (lost) book.add(measures.lockLost, 1, labels);
  };
  const job = (
    event: Pick<Events["holdfast:queue:failed"], "queue" | "attempt" | "waitedMs" | "durationMs">,
    outcome: string,
  ) => {
    const { queue, attempt, waitedMs, durationMs } = event;
    book.add(measures.jobs, 1, { queue, outcome });
    if (durationMs !== undefined) book.record(measures.jobDuration, durationMs / 1000, { queue, outcome });
    if (waitedMs !== undefined && attempt === 1) book.record(measures.jobWait, waitedMs / 1000, { queue });
  };
  return listen({
    "holdfast:transaction:end"({ locks, outcome, durationMs, heldMs }) {
      const where = spaces(locks);
      book.add(measures.transactions, 1, { outcome, ...where });
      book.record(measures.transactionDuration, durationMs / 1000, { outcome, ...where });
      if (heldMs !== undefined)
        book.record(measures.lockHold, heldMs / 1000, { kind: "transaction", ...where });
    },
    "holdfast:transaction:retry"({ locks, failure }) {
      book.add(measures.retries, 1, { failure, ...spaces(locks) });
    },
    "holdfast:commit:resolved": ({ outcome }) => book.add(measures.commits, 1, { outcome }),
    "holdfast:lock:granted": (event) => waited("transaction", "granted", event.locks, event),
    "holdfast:lock:refused": (event) => waited("transaction", event.reason, event.locks, event),
    "holdfast:rows:locked": (event) => waited("rows", "granted", [event.table], event),
    "holdfast:rows:refused": (event) => waited("rows", event.reason, [event.table], event),
    "holdfast:table:locked": (event) => waited("table", "granted", [event.table], event),
    "holdfast:table:refused": (event) => waited("table", event.reason, [event.table], event),
    "holdfast:session:held"(event) {
      waited("session", "granted", event.locks, event);
      begin("session", event.hold, event.locks);
    },
    "holdfast:session:refused": (event) => waited("session", event.reason, event.locks, event),
    "holdfast:session:released": ({ hold, locks, heldMs }) => end("session", hold, locks, heldMs),
    "holdfast:session:lost": ({ hold, locks, heldMs }) => end("session", hold, locks, heldMs, true),
    "holdfast:lease:granted"(event) {
      waited("lease", "granted", [event.lease], event);
      begin("lease", event.hold, [event.lease]);
    },
    "holdfast:lease:refused": (event) => waited("lease", event.reason, [event.lease], event),
    "holdfast:lease:released": ({ hold, lease, heldMs }) => end("lease", hold, [lease], heldMs),
    "holdfast:lease:lost": ({ hold, lease, heldMs }) => end("lease", hold, [lease], heldMs, true),
    "holdfast:leader:gained"({ leader, fence }) {
      leading.add(`${fence} ${leader}`);
      book.add(measures.leader, 1, { leader });
    },
    "holdfast:leader:lost"({ leader, fence }) {
      if (leading.delete(`${fence} ${leader}`)) book.add(measures.leader, -1, { leader });
    },
    "holdfast:version:stale": ({ table }) => book.add(measures.stale, 1, { table }),
    "holdfast:once:replayed": () => book.add(measures.replayed, 1, {}),
    "holdfast:connection:wrong": () => book.add(measures.wrong, 1, {}),
    "holdfast:quota:decided"({ quota, granted, replayed }) {
      book.add(measures.quota, 1, {
        quota,
        verdict: !granted ? "denied" : replayed ? "replayed" : "allowed",
      });
    },
    "holdfast:quota:failed": ({ failed }) => book.add(measures.quotaFailed, 1, { mode: failed }),
    "holdfast:queue:done": (event) => job(event, "done"),
    "holdfast:queue:failed": (event) => job(event, event.again === undefined ? "failed" : "retry"),
    "holdfast:queue:recovered": ({ jobs }) => book.add(measures.recovered, jobs, {}),
    "holdfast:queue:trouble": ({ queue }) => book.add(measures.trouble, 1, { queue }),
    "holdfast:schedule:done"({ schedule, durationMs }) {
      book.add(measures.runs, 1, { schedule, outcome: "done" });
      book.record(measures.runDuration, durationMs / 1000, { schedule, outcome: "done" });
    },
    "holdfast:schedule:failed"({ schedule, retryInMs, durationMs }) {
      const outcome = retryInMs === undefined ? "failed" : "retry";
      book.add(measures.runs, 1, { schedule, outcome });
      if (durationMs !== undefined)
        book.record(measures.runDuration, durationMs / 1000, { schedule, outcome });
    },
    "holdfast:schedule:skipped": ({ schedule }) => book.add(measures.skipped, 1, { schedule }),
    "holdfast:schedule:missed": ({ schedule }) => book.add(measures.missed, 1, { schedule }),
    "holdfast:schedule:lost": ({ schedule }) => book.add(measures.runLost, 1, { schedule }),
  });
}

/** A scrape is given up after 10 s by default, and the other figures are worth having. */
const patienceMs = 3000;
const states = ["waiting", "delayed", "running", "failed"] as const;

/** How full the queues are; of one that does not answer nothing, which is counted. */
export async function depths(
  queues: readonly CountedQueue[],
  book: Book,
  tell: (value: number, labels: Labels) => void,
): Promise<void> {
  const ask = async (queue: CountedQueue): Promise<void> => {
    try {
      const found = await within(patienceMs, queue.counts());
      for (const state of states) tell(found[state], { queue: queue.name, state });
    } catch {
      book.add(measures.unknown, 1, { queue: queue.name });
    }
  };
  await Promise.all(queues.map(ask));
}
