import { cpus, totalmem } from "node:os";
import Table from "cli-table3";

export interface Machine {
  readonly cpus: number;
  readonly model: string;
  readonly memoryGb: number;
  readonly node: string;
  readonly postgres: string;
}

export function machine(postgres: string): Machine {
  const cores = cpus();
  return {
    cpus: cores.length,
    model: cores[0]?.model ?? "unknown",
    memoryGb: Math.round(totalmem() / 2 ** 30),
    node: process.version,
    postgres,
  };
}

export interface SuiteOptions {
  /** How long each contestant of a cell is measured, over all its rounds. */
  readonly seconds: number;
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

export interface Contestant {
  readonly name: string;
  /** One operation. The number is that of the caller's turn, the same for all contestants. */
  readonly call: (turn: number) => Promise<void>;
}

export interface Round {
  readonly opsPerSecond: number;
  readonly latenciesMs: readonly number[];
}

export interface Measured {
  readonly name: string;
  /** Medians over the rounds. */
  readonly opsPerSecond: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly rounds: readonly number[];
}

export interface Alternation {
  readonly contestants: readonly Contestant[];
  readonly callers: number;
  readonly seconds: number;
  /** Brings the data back to where every round starts. */
  readonly reset: () => Promise<void>;
}

/** Even, so that everybody is first as often as last. */
export const roundCount = 6;

/**
 * Measures contestants in turn, in rounds ABBA…: whatever drifts (a cache that warms, a neighbour on the machine)
 * falls on all of them. Before that everybody runs for half of the time without being counted: a service is warm.
 */
export async function alternate({ contestants, callers, seconds, reset }: Alternation): Promise<Measured[]> {
  const results = new Map(contestants.map(({ name }) => [name, [] as Round[]]));
  for (let round = -1; round < roundCount; round++) {
    const order = round % 2 === 0 ? contestants : contestants.toReversed();
    for (const { name, call } of order) {
      await reset();
      // One contestant's garbage is not to be collected on another's time.
      globalThis.gc?.();
      const result = await closedLoop(
        call,
        callers,
        round < 0 ? seconds * 500 : (seconds * 1000) / roundCount,
      );
      if (round >= 0) results.get(name)?.push(result);
    }
  }
  return contestants.map(({ name }) => {
    const rounds = results.get(name) ?? [];
    const opsPerSecond = rounds.map((round) => round.opsPerSecond);
    return {
      name,
      opsPerSecond: median(opsPerSecond),
      p50Ms: median(rounds.map(({ latenciesMs }) => percentile(latenciesMs, 0.5))),
      p99Ms: median(rounds.map(({ latenciesMs }) => percentile(latenciesMs, 0.99))),
      rounds: opsPerSecond,
    };
  });
}

/** Callers that each start the next operation when the last has ended. */
async function closedLoop(call: Contestant["call"], callers: number, ms: number): Promise<Round> {
  const latenciesMs: number[] = [];
  const started = performance.now();
  let turn = 0;
  const caller = async (): Promise<void> => {
    for (let since = performance.now(); since - started < ms;) {
      await call(turn++);
      const now = performance.now();
      latenciesMs.push(now - since);
      since = now;
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  return { latenciesMs, opsPerSecond: (latenciesMs.length / (performance.now() - started)) * 1000 };
}

export function percentile(values: readonly number[], share: number): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? Number.NaN;
}

export function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  const half = sorted.length / 2;
  return ((sorted[Math.ceil(half) - 1] ?? Number.NaN) + (sorted[Math.floor(half)] ?? Number.NaN)) / 2;
}

/** The same numbers from 0 to below 1 in every run: whom a turn is for is not a matter of luck. */
export function scatter(turn: number): number {
  let x = Math.imul(turn + 1, 0x9e3779b1);
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return ((x ^ (x >>> 16)) >>> 0) / 2 ** 32;
}

export function table(head: readonly string[], rows: readonly (readonly unknown[])[]): string {
  const result = new Table({
    head: [...head],
    colAligns: head.map((_, i) => (rows.every((row) => typeof row[i] === "number") ? "right" : "left")),
    style: { head: [], border: [], compact: true },
  });
  for (const row of rows)
    result.push(row.map((cell) => (typeof cell === "number" ? figure(cell) : String(cell))));
  return result.toString();
}

function figure(value: number): string {
  if (Number.isInteger(value)) return String(value);
  return value >= 100 ? String(Math.round(value)) : value.toFixed(2);
}
