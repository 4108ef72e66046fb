/** What is told in the end, to people and to programs. */
import type { Machine } from "./measure.ts";
import type { OwnKind } from "../own-database.ts";
import { type Figures, type Suite, type Trial, byHand, naive, ours } from "./suite.ts";

export interface ResultRow {
  readonly cell: string;
  readonly contestant: string;
  readonly opsPerSecond: number;
  /** Null: there is no latency of a single operation. */
  readonly p50Ms: number | null;
  readonly p99Ms: number | null;
  readonly rounds: readonly number[];
  /** Calls that had to be made again: a lock was not to be had in time, or there was a deadlock. */
  readonly again: number;
  /** Its operations per second over those by hand. */
  readonly ratio: number;
}

export interface TrialResult extends Trial {
  readonly contestant: string;
  /** One of Holdfast's. */
  readonly own: boolean;
  readonly exact: boolean;
}

export interface SuiteResult {
  readonly suite: string;
  readonly about: string;
  readonly rows: readonly ResultRow[];
  readonly trials: readonly TrialResult[];
  /** Of Holdfast over by hand, by cell: above 1, Holdfast is faster. */
  readonly ratios: Readonly<Record<string, number>>;
  readonly meaning: string;
}

export interface BenchResult {
  readonly server: {
    readonly kind: string;
    readonly version: string;
    /** Undefined: one of its own. */
    readonly address?: string;
  };
  readonly roundTripMs: number;
  readonly place: { readonly what: OwnKind; readonly name: string };
  readonly connections: number;
  readonly seconds: number;
  /** The one that the callers ran on. */
  readonly machine: Machine;
  readonly suites: readonly SuiteResult[];
  readonly leftOut: readonly { readonly suite: string; readonly why: string }[];
  /** Whether all was exact with Holdfast. */
  readonly exact: boolean;
  /** Of runs that had been killed. */
  readonly removed: readonly string[];
  /** What could not be removed. */
  readonly left: readonly string[];
}

const finite = (value: number): number | null => (Number.isFinite(value) ? value : null);
const rounded = (value: number): number => Number(value.toFixed(3));

export function suiteResult(
  { name, about, own }: Pick<Suite, "name" | "about" | "own">,
  measured: readonly (readonly [cell: string, contestants: readonly Figures[]])[],
  trials: readonly (readonly [contestant: string, trial: Trial])[],
): SuiteResult {
  const rows = measured.flatMap(([cell, contestants]) => {
    const base = contestants.find((each) => each.name === byHand)?.opsPerSecond ?? Number.NaN;
    return contestants.map(
      ({ name: contestant, opsPerSecond, p50Ms, p99Ms, rounds, again = 0 }): ResultRow => ({
        cell,
        contestant,
        opsPerSecond,
        p50Ms: finite(p50Ms),
        p99Ms: finite(p99Ms),
        rounds,
        again,
        ratio: rounded(opsPerSecond / base),
      }),
    );
  });
  const told = trials.map(([contestant, trial]) => ({
    contestant,
    own: own.includes(contestant),
    exact: trial.counted === trial.expected && trial.text === "exact",
    ...trial,
  }));
  const ratios = Object.fromEntries(
    rows.filter(({ contestant }) => contestant === ours).map(({ cell, ratio }) => [cell, ratio]),
  );
  return { suite: name, about, rows, trials: told, ratios, meaning: meaningOf(ratios, told) };
}

/** 1.31 → "1.31 times as many", 0.98 → "as many". */
function compared(ratio: number): string {
  if (ratio > 0.95 && ratio < 1.05) return "as many";
  return `${ratio >= 10 ? Math.round(ratio) : ratio.toFixed(2)} times as many`;
}

function meaningOf(ratios: Readonly<Record<string, number>>, trials: readonly TrialResult[]): string {
  const [first = "", ...others] = Object.entries(ratios).map(
    ([cell, ratio]) => `${compared(ratio)} (${cell})`,
  );
  const speed = [first.replace(" (", " operations per second as by hand ("), ...others].join(", ");
  const wrong = trials.filter(({ own, exact }) => own && !exact);
  const leaks = trials.find(({ contestant }) => contestant === naive);
  const exactness =
    wrong.length === 0
      ? "With Holdfast it is exact"
      : `With Holdfast it is NOT exact (${wrong.map(({ contestant, text }) => `${contestant}: ${text}`).join("; ")}), which it must always be: please report it`;
  const contrast =
    leaks === undefined
      ? ""
      : leaks.exact
        ? "; the naive way was too, by luck"
        : `; the naive way is not: ${leaks.text}`;
  return `Holdfast does ${speed}. ${exactness}${contrast}.`;
}
