/** What a suite tells. How it is measured is shared with `holdfast bench`. */
import { type Machine as Computer, machine as computer } from "../../packages/cli/src/bench/measure.ts";

export interface Machine extends Computer {
  readonly postgres: string;
}

export function machine(postgres: string): Machine {
  return { ...computer(), postgres };
}

export interface SuiteOptions {
  /** How long each contestant of a cell is measured, over all its rounds. */
  readonly seconds: number;
  /** Parts of the suite, by its own names for them, where it has some. Empty: all. */
  readonly only: readonly string[];
  /** Tells people how far it is. */
  readonly note: (text: string) => void;
}

export interface BenchRow {
  readonly cell: string;
  readonly contestant: string;
  readonly opsPerSecond: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly [detail: string]: unknown;
}

export interface Report {
  readonly suite: string;
  readonly machine: Machine;
  readonly rows: readonly BenchRow[];
  /** Ours over the other: above 1, ours is better. */
  readonly ratios: Readonly<Record<string, number>>;
  /** What a reader has to know to judge the figures. */
  readonly notes?: readonly string[];
}
