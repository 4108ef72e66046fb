/** What an exploration came to, for programs and for people. */
import type { Isolation } from "../../seam/database.ts";
import { message } from "../../seam/errors.ts";
import type { Anomaly, Diagnosis } from "./anomaly.ts";
import type { ExploreRun } from "./schedule.ts";
import { type Turn, replayOf, timeline, turns } from "./timeline.ts";

/**
 * Every order was tried: `exhaustive`. Else all with so many switches: `bounded`; or these of each two actors, with the others
 * after them: `pairs`. Else as many as there was time for.
 */
export type Coverage =
  "exhaustive" | { readonly bounded: number } | { readonly pairs: number } | { readonly runs: number };

export interface Level {
  /** Absent: the transactions' own. */
  readonly isolation?: Isolation;
  readonly coverage: Coverage;
  readonly runs: number;
  /** Of these, at random: orders with more switches. */
  readonly random: number;
  /** Actors that waited for something that is not a statement: what is tried then is not known to be everything. */
  readonly slept: readonly string[];
  /** Of a replay: where the order could not be kept. */
  readonly impossible?: string;
  /** Actors that tried again what was refused: they are given the turn when somebody else has ended something, as if they paused. */
  readonly patient: readonly string[];
  /** Statements in which others can come in between where nothing can be held back: a procedure, several in one message. */
  readonly unseen: readonly string[];
}

export interface Exploration {
  readonly name: string;
  readonly ok: boolean;
  readonly runs: number;
  readonly ms: number;
  /** The least of all levels. */
  readonly coverage: Coverage;
  /** What was tried without finding anything. */
  readonly levels: readonly Level[];
  /** Of the orders at random. */
  readonly seed: number;
  /** Runs in which there was a deadlock, if none of them broke the rule. */
  readonly deadlocks?: number;
  /** What the invariant threw. */
  readonly error?: unknown;
  readonly replay?: string;
  /** The level at which it failed. */
  readonly isolation?: Isolation;
  readonly preemptions?: number;
  readonly anomaly?: Anomaly;
  readonly table?: string;
  readonly fix?: string;
  /** The schedule that failed. */
  readonly turns?: readonly Turn[];
  readonly actors?: readonly string[];
  /** What actors threw in it, by name; if there is none, in any of the runs. */
  readonly threw?: Readonly<Record<string, string>>;
  /** For people. */
  readonly text: string;
}

/** Thrown by `expectNoRace`: its message is the schedule. */
export class RaceError extends Error {
  readonly report: Exploration;

  constructor(report: Exploration) {
    super(report.text, { cause: report.error });
    this.name = "RaceError";
    this.report = report;
  }
}

interface Done {
  readonly name: string;
  readonly runs: number;
  readonly ms: number;
  readonly levels: readonly Level[];
  readonly seed: number;
}

export const worth = (coverage: Coverage): number => {
  if (coverage === "exhaustive") return Infinity;
  if ("bounded" in coverage) return coverage.bounded;
  return "pairs" in coverage ? 0.5 : -1;
};

export function coverageText(coverage: Coverage): string {
  if (coverage === "exhaustive") return "exhaustive";
  if ("bounded" in coverage) return `bounded ≤ ${coverage.bounded}`;
  return "pairs" in coverage ? `bounded ≤ ${coverage.pairs} for each two` : "not exhaustive";
}

export function passed(
  done: Done & {
    readonly faults: number;
    readonly deadlocks: number;
    readonly threw: Readonly<Record<string, string>>;
  },
): Exploration {
  const coverage = done.levels.map((level) => level.coverage).reduce((a, b) => (worth(b) < worth(a) ? b : a));
  const total = done.levels.length > 1 ? `${count(done.runs, "run")}: ` : "";
  const notes = [
    ...(done.faults > 0 ? [`${count(done.faults, "run")} with a fault`] : []),
    ...(done.deadlocks > 0 ? [`${count(done.deadlocks, "run")} with a deadlock`] : []),
    ...Object.entries(done.threw).map(([actor, why]) => `${actor} threw in some: ${why}`),
  ];
  const text = [
    `✓ ${done.name}: ${total}${done.levels.map((level) => levelText(level, done.seed)).join("; ")}`,
    ...notes,
  ].join("; ");
  return { ...done, ok: true, coverage, text };
}

function levelText({ isolation, coverage, runs, random, impossible, ...why }: Level, seed: number): string {
  const at = isolation ? `${isolation.toUpperCase()} ` : "";
  const more = random > 0 ? `, of which ${random} at random (seed ${seed})` : "";
  if (impossible !== undefined) return `${at}this order is no longer possible: ${impossible}`;
  const doubts = doubtsOf(why);
  return `${at}${count(runs, "run")}, ${coverageText(coverage)}${doubts.length > 0 ? `, since ${doubts.join(", and ")}` : ""}${more}`;
}

/** Why what was tried is not known to be everything. */
export function doubtsOf({ slept, patient, unseen }: Pick<Level, "slept" | "patient" | "unseen">): string[] {
  const [first = ""] = unseen;
  return [
    ...(slept.length > 0 ? [`${slept.join(", ")} waited for something that is not a statement`] : []),
    ...(patient.length > 0 ? [`${patient.join(", ")} tried again what was refused`] : []),
    ...(unseen.length > 0 ? [`others cannot come into "${first.replaceAll(/\s+/g, " ").slice(0, 60)}"`] : []),
  ];
}

const count = (n: number, what: string) => `${n} ${what}${n === 1 ? "" : "s"}`;

export function failed(
  done: Done & {
    readonly names: readonly string[];
    readonly isolation: Isolation | undefined;
    readonly run: ExploreRun;
    readonly error: unknown;
    readonly diagnosis: Diagnosis;
  },
): Exploration {
  const { name, names, runs, ms, levels, seed, run, error, isolation, diagnosis } = done;
  const { kind, table, fix } = diagnosis;
  const preemptions = run.choices.at(-1)?.preemptions ?? 0;
  const replay = replayOf(run);
  const all = turns(run, names, diagnosis);
  const head = [
    `run ${runs}`,
    count(preemptions, "preemption"),
    ...(isolation ? [isolation.toUpperCase()] : []),
  ];
  const threw = Object.fromEntries(
    run.results.flatMap((result, i) =>
      result.status === "rejected" ? [[names[i] ?? "", message(result.reason)] as const] : [],
    ),
  );
  const text = [
    `✗ ${name}      ${head.join(" · ")}`,
    timeline(all, names),
    ...Object.entries(threw).map(([actor, why]) => `${actor} threw: ${why}`),
    message(error),
    `${kind[0]?.toUpperCase()}${kind.slice(1)}${table ? ` on ${table}` : ""}. ${fix}`,
    `Replay: '${replay}'`,
  ].join("\n");
  return {
    name,
    ok: false,
    runs,
    ms,
    coverage: { runs },
    levels,
    seed,
    error,
    replay,
    ...(isolation ? { isolation } : {}),
    preemptions,
    anomaly: kind,
    ...(table ? { table } : {}),
    fix,
    turns: all,
    actors: names,
    threw,
    text,
  };
}
