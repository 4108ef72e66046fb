/** What an exploration came to, for programs and for people. */
import type { Isolation } from "../../core/database.ts";
import { message } from "../../core/errors.ts";
import type { Anomaly, Diagnosis } from "./anomaly.ts";
import type { Run } from "./schedule.ts";
import { type Turn, replayOf, timeline, turns } from "./timeline.ts";

/** Every order was tried: `exhaustive`. Else all with so many switches: `bounded`. Else as many as there was time for. */
export type Coverage = "exhaustive" | { readonly bounded: number } | { readonly runs: number };

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
  /** What actors threw in it, by name. */
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

const worth = (coverage: Coverage) =>
  coverage === "exhaustive" ? Infinity : "bounded" in coverage ? coverage.bounded : -1;

export function passed(done: Done): Exploration {
  const coverage = done.levels.map((level) => level.coverage).reduce((a, b) => (worth(b) < worth(a) ? b : a));
  const total = done.levels.length > 1 ? `${count(done.runs, "run")}: ` : "";
  const text = `✓ ${done.name}: ${total}${done.levels.map((level) => levelText(level, done.seed)).join("; ")}`;
  return { ...done, ok: true, coverage, text };
}

function levelText({ isolation, coverage, runs, random, slept, impossible }: Level, seed: number): string {
  const at = isolation ? `${isolation.toUpperCase()} ` : "";
  const how =
    coverage === "exhaustive"
      ? "exhaustive"
      : "bounded" in coverage
        ? `bounded ≤ ${coverage.bounded}`
        : "not exhaustive";
  const more = random > 0 ? `, of which ${random} at random (seed ${seed})` : "";
  const asleep =
    slept.length > 0 ? `, since ${slept.join(", ")} waited for something that is not a statement` : "";
  if (impossible !== undefined) return `${at}this order is no longer possible: ${impossible}`;
  return `${at}${count(runs, "run")}, ${how}${asleep}${more}`;
}

const count = (n: number, what: string) => `${n} ${what}${n === 1 ? "" : "s"}`;

export function failed(
  done: Done & {
    readonly names: readonly string[];
    readonly isolation: Isolation | undefined;
    readonly run: Run;
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
