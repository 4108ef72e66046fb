/** What an exploration came to, for programs and for people. */
import type { Isolation } from "../../seam/database.ts";
import { UsageError, message } from "../../seam/errors.ts";
import type { Anomaly, Diagnosis } from "./anomaly.ts";
import { type UnexploredPair, pairsText } from "./pairs.ts";
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
  /** The least of those without a fault, and those with one. */
  readonly coverage: Coverage;
  readonly runs: number;
  /** Of these, with a fault; and what was tried of the orders without one. */
  readonly faults?: { readonly runs: number; readonly coverage: Coverage; readonly without: Coverage };
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
  /**
   * Actors in another process with a lock of their session outside of a transaction: whether a pool there lends that connection to
   * somebody else is not tried. Absent: there were none.
   */
  readonly lent?: readonly string[];
  /**
   * Locks came out differently after the same order, or may, since they depend on deleted rows that the server still has. Absent: they
   * did not.
   */
  readonly unsettled?: boolean;
  /** Statements that came through a proxy when it was not clear whose they were. Absent: there were none. */
  readonly guessed?: readonly string[];
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
  /** What was seen and never interleaved, in none of the levels. Empty if every order was tried, and for a replay. */
  readonly unexplored: readonly UnexploredPair[];
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

/** Thrown where less was tried than `minCoverage` asks for. */
export class CoverageError extends UsageError {
  readonly unexplored: readonly UnexploredPair[];

  constructor(reason: string, unexplored: readonly UnexploredPair[]) {
    super([reason, ...(unexplored.length > 0 ? [pairsText(unexplored)] : [])].join(" "));
    this.unexplored = unexplored;
  }
}

interface Done {
  readonly name: string;
  readonly runs: number;
  readonly ms: number;
  readonly levels: readonly Level[];
  readonly unexplored: readonly UnexploredPair[];
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
    readonly deadlocks: number;
    readonly threw: Readonly<Record<string, string>>;
  },
): Exploration {
  const coverage = done.levels.map((level) => level.coverage).reduce((a, b) => (worth(b) < worth(a) ? b : a));
  const total = done.levels.length > 1 ? `${count(done.runs, "run")}: ` : "";
  const notes = [
    ...(done.unexplored.length > 0 ? [pairsText(done.unexplored)] : []),
    ...(done.deadlocks > 0 ? [`${count(done.deadlocks, "run")} with a deadlock`] : []),
    ...Object.entries(done.threw).map(([actor, why]) => `${actor} threw in some: ${why}`),
  ];
  const text = [
    `✓ ${done.name}: ${total}${done.levels.map((level) => levelText(level, done.seed)).join("; ")}`,
    ...notes,
  ].join("; ");
  return { ...done, ok: true, coverage, text };
}

function levelText(
  { isolation, coverage, runs, faults, random, impossible, ...why }: Level,
  seed: number,
): string {
  const at = isolation ? `${isolation.toUpperCase()} ` : "";
  const more = random > 0 ? `, of which ${random} at random (seed ${seed})` : "";
  if (impossible !== undefined) return `${at}this order is no longer possible: ${impossible}`;
  const doubts = doubtsOf(why);
  const without = faults?.without ?? coverage;
  const befell = faults
    ? `; of these ${count(faults.runs, "run")} with a fault, ${coverageText(faults.coverage)}`
    : "";
  return `${at}${count(runs, "run")}, ${coverageText(without)}${doubts.length > 0 ? `, since ${doubts.join(", and ")}` : ""}${more}${befell}`;
}

/** Why what was tried is not known to be everything. */
export function doubtsOf({
  slept,
  patient,
  unseen,
  lent = [],
  guessed = [],
  unsettled = false,
}: Pick<Level, "slept" | "patient" | "unseen" | "lent" | "guessed" | "unsettled">): string[] {
  const shown = ([first = ""]: readonly string[]) => `"${first.replaceAll(/\s+/g, " ").slice(0, 60)}"`;
  return [
    ...(slept.length > 0 ? [`${slept.join(", ")} waited for something that is not a statement`] : []),
    ...(patient.length > 0 ? [`${patient.join(", ")} tried again what was refused`] : []),
    ...(unseen.length > 0 ? [`others cannot come into ${shown(unseen)}`] : []),
    ...(lent.length > 0
      ? [`${lent.join(", ")} had a lock of the session on a connection that a pool could lend to others`]
      : []),
    ...(unsettled ? ["locks depend on deleted rows that the server still has"] : []),
    ...(guessed.length > 0 ? [`it was not known whose ${shown(guessed)} was`] : []),
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
  const { name, names, runs, ms, levels, unexplored, seed, run, error, isolation, diagnosis } = done;
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
    unexplored,
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
