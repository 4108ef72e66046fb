/** What is measured, in one list: OpenTelemetry, Prometheus, the page and the dashboard have it from here. */
import type { Events } from "../events/events.ts";
import { within } from "../waiting/interrupt.ts";
import { hazardKinds } from "../context/section.ts";
import { type Candidate, type Made, allMade } from "../events/made.ts";
import { type CountedQueue, type MeasureOptions, listen } from "./listen.ts";

export interface Measure {
  /**
   * As OpenTelemetry has it. Its exporters make the same of it as `exposed`: all of them replace dots, and add `_total` to
   * counters; some add the unit, unless the name has it already, and the one for JavaScript does not.
   */
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
    "holdfast.transaction.duration.seconds",
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
    "holdfast.lock.wait.seconds",
    "kind outcome lock",
    short,
    "How long it took to get locks, or to be refused",
  ),
  lockRefused: counter("holdfast.locks.refused", "kind reason lock", "Locks that were not to be had"),
  lockHold: histogram("holdfast.lock.hold.seconds", "kind lock", long, "How long locks were held"),
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
  candidates: {
    name: "holdfast.leader.candidates",
    kind: "updown",
    help: "1 while this process leads, or would",
    labels: ["leader"],
  },
  stale: counter("holdfast.versions.stale", "table", "Versions that somebody else had changed"),
  replayed: counter("holdfast.once.replayed", "", "Calls of once that were answered from the record"),
  wrong: counter(
    "holdfast.connections.wrong",
    "",
    "Statements inside a transaction that went through the outer client",
  ),
  section: histogram(
    "holdfast.section.duration.seconds",
    "kind lock",
    short,
    "How long transactions held whatever they had locked, from the first lock to the end",
  ),
  slow: counter(
    "holdfast.sections.slow",
    "level lock",
    "Those of them that were suspect (100 ms, unless told otherwise) or broken (1 s)",
  ),
  hazards: counter(
    "holdfast.hazards",
    "kind",
    "Requests, timers, processes, … that transactions waited for while they held locks",
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
  jobDuration: histogram(
    "holdfast.queue.duration.seconds",
    "queue outcome",
    long,
    "How long handlers of jobs took",
  ),
  jobWait: histogram(
    "holdfast.queue.wait.seconds",
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
  runDuration: histogram(
    "holdfast.schedule.duration.seconds",
    "schedule outcome",
    long,
    "How long runs took",
  ),
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
  return kind === "counter" ? `${plain}_total` : plain;
}

export type Labels = Readonly<Record<string, string>>;

/** Where figures go. */
export interface MeasureBook {
  /** To a counter, or to one that also goes down. */
  add(measure: Measure, value: number, labels: Labels): void;
  /** Seconds, to a histogram. */
  record(measure: Measure, seconds: number, labels: Labels): void;
}

/** What a gauge says at this moment. */
export interface Sample {
  readonly value: number;
  readonly labels: Labels;
}

function beforeColon(name: string): string {
  const end = name.indexOf(":");
  return end < 0 ? name : name.slice(0, end);
}

const sharedMark = " (shared)";

const kinds = ["transaction", "session", "lease"] as const;
type Kind = (typeof kinds)[number] | "rows" | "table";

/** Of kinds and locks that begin with zero: an id that became a label must not eat the memory. */
const most = 300;

/** Keeps the book from now on. Returns what ends it. */
export function keep(book: MeasureBook, options: MeasureOptions): () => void {
  const { namespace = beforeColon, locks: known = [], queues = [] } = options;
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
  /**
   * A counter that is first seen as 1 has not increased, for whoever asks by how much: what may come is 0 as soon as
   * it is known that it may.
   */
  const begun = new Set<string>();
  const zero = (measure: Measure, labels: Labels) => book.add(measure, 0, labels);
  const expect = (kind: Kind, where: { lock?: string }) => {
    const name = `${kind} ${where.lock}`;
    if (begun.has(name) || begun.size >= most) return;
    begun.add(name);
    if (kind === "transaction") {
      for (const outcome of ["commit", "rollback"]) zero(measures.transactions, { outcome, ...where });
      for (const failure of ["deadlock", "serialization", "lost"])
        zero(measures.retries, { failure, ...where });
      if (where.lock === "none") return;
    }
    if (kind !== "session" && kind !== "lease")
      for (const level of ["suspect", "broken"]) zero(measures.slow, { level, ...where });
    for (const reason of ["busy", "timeout"]) zero(measures.lockRefused, { kind, reason, ...where });
    if (kind === "session" || kind === "lease") zero(measures.lockLost, { kind, ...where });
  };
  const waited = (
    kind: Kind,
    outcome: string,
    locks: readonly string[],
    { waitedMs }: { waitedMs: number },
  ) => {
    const where = spaces(locks);
    expect(kind, where);
    book.record(measures.lockWait, waitedMs / 1000, { kind, outcome, ...where });
    if (outcome !== "granted") book.add(measures.lockRefused, 1, { kind, reason: outcome, ...where });
  };
  /** Those whose beginning was seen, or who were there before. */
  const leading = new Set<string>();
  const lead = (leader: string, fence: number) => {
    leading.add(`${fence} ${leader}`);
    book.add(measures.leader, 1, { leader });
  };
  /** By name, how many there are in this process. */
  const candidates = new Map<string, number>();
  const stand = (leader: string, change: 1 | -1) => {
    const count = (candidates.get(leader) ?? 0) + change;
    if (count < 0) return;
    candidates.set(leader, count);
    book.add(measures.candidates, change, { leader });
  };
  const expectNamed = ({ kind, name, ...more }: Made | Candidate) => {
    switch (kind) {
      case "leader":
        stand(name, 1);
        zero(measures.leader, { leader: name });
        if ("fence" in more && more.fence !== undefined) lead(name, more.fence);
        return;
      case "queue":
        for (const outcome of ["done", "retry", "failed"]) zero(measures.jobs, { queue: name, outcome });
        return zero(measures.trouble, { queue: name });
      case "quota":
        for (const verdict of ["allowed", "denied", "replayed"])
          zero(measures.quota, { quota: name, verdict });
        return;
      case "schedule":
        for (const outcome of ["done", "retry", "failed"]) zero(measures.runs, { schedule: name, outcome });
        for (const each of [measures.skipped, measures.missed, measures.runLost])
          zero(each, { schedule: name });
        return;
      case "versioned":
        return zero(measures.stale, { table: name });
    }
  };
  /** Those whose beginning was seen: what began before that must not be taken off. */
  const held = new Map<number, Labels>();
  const begin = (kind: Kind, hold: number, locks: readonly string[]) => {
    const labels = { kind, ...spaces(locks) };
    held.set(hold, labels);
    book.add(measures.held, 1, labels);
  };
  const end = (
    kind: Kind,
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
  for (const each of [measures.replayed, measures.wrong, measures.recovered]) zero(each, {});
  for (const outcome of ["committed", "aborted", "unknown"]) zero(measures.commits, { outcome });
  for (const mode of ["open", "closed"]) zero(measures.quotaFailed, { mode });
  for (const kind of hazardKinds) zero(measures.hazards, { kind });
  for (const { name } of queues) zero(measures.unknown, { queue: name });
  expect("transaction", spaces([]));
  for (const kind of kinds) {
    if (namespace === false) expect(kind, {});
    else for (const lock of known) expect(kind, { lock });
  }
  for (const each of allMade()) expectNamed(each);
  return listen({
    "holdfast:made": expectNamed,
    "holdfast:transaction:begin": ({ locks }) => expect("transaction", spaces(locks)),
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
    "holdfast:lease:refused"(event) {
      // Of a candidate: somebody else leads, and it waits on.
      if (event.reason !== "timeout" || !candidates.get(event.lease))
        waited("lease", event.reason, [event.lease], event);
    },
    "holdfast:lease:released": ({ hold, lease, heldMs }) => end("lease", hold, [lease], heldMs),
    "holdfast:lease:lost": ({ hold, lease, heldMs }) => end("lease", hold, [lease], heldMs, true),
    "holdfast:leader:gained": ({ leader, fence }) => lead(leader, fence),
    "holdfast:leader:lost"({ leader, fence }) {
      if (leading.delete(`${fence} ${leader}`)) book.add(measures.leader, -1, { leader });
    },
    "holdfast:leader:withdrawn": ({ leader }) => stand(leader, -1),
    "holdfast:version:stale": ({ table }) => book.add(measures.stale, 1, { table }),
    "holdfast:once:replayed": () => book.add(measures.replayed, 1, {}),
    "holdfast:connection:wrong": () => book.add(measures.wrong, 1, {}),
    "holdfast:hazard": ({ kind }) => book.add(measures.hazards, 1, { kind }),
    "holdfast:section:end": ({ kind, locks, tables, heldMs }) =>
      book.record(measures.section, heldMs / 1000, { kind, ...spaces(locks.length > 0 ? locks : tables) }),
    "holdfast:section:slow": ({ level, locks, tables }) =>
      book.add(measures.slow, 1, { level, ...spaces(locks.length > 0 ? locks : tables) }),
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

/**
 * How full the queues are. One that does not answer is NaN, and counted: what is not said at all would stay what it was
 * where OpenTelemetry keeps it.
 */
export async function depths(queues: readonly CountedQueue[], book: MeasureBook): Promise<readonly Sample[]> {
  const ask = async (queue: CountedQueue): Promise<readonly Sample[]> => {
    const asked = Promise.resolve().then(() => queue.counts());
    const found = await within(patienceMs, asked).catch(() => undefined);
    if (!found) book.add(measures.unknown, 1, { queue: queue.name });
    return states.map((state) => ({
      value: found?.[state] ?? Number.NaN,
      labels: { queue: queue.name, state },
    }));
  };
  return (await Promise.all(queues.map(ask))).flat();
}
