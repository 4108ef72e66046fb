/** How things are measured next to each other: for `holdfast bench`, and for the project's own benchmarks. */
import { cpus, totalmem } from "node:os";

export interface Machine {
  readonly cpus: number;
  readonly model: string;
  readonly memoryGb: number;
  readonly node: string;
}

/** The one that this process runs on. */
export function machine(): Machine {
  const cores = cpus();
  return {
    cpus: cores.length,
    model: cores[0]?.model ?? "unknown",
    memoryGb: Math.round(totalmem() / 2 ** 30),
    node: process.version,
  };
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

/** How long, and who is told of it. */
export interface Timing {
  /** How long each contestant is measured, over all its rounds. */
  readonly seconds: number;
  /** Even, so that everybody is first as often as last. */
  readonly rounds?: number;
  readonly signal?: AbortSignal;
  /** After each round of each contestant, the one that does not count too. */
  readonly onRound?: () => void;
}

export interface Alternation extends Timing {
  readonly contestants: readonly Contestant[];
  readonly callers: number;
  /** Brings the data back to where every round starts. */
  readonly reset: () => Promise<void>;
}

export const roundCount = 6;

/** All entries in turn, in rounds ABBA…: whatever drifts (a cache that warms, a neighbour on the machine) falls on all. */
export async function inTurns<T, R>(
  entries: readonly T[],
  count: number,
  run: (entry: T) => Promise<R>,
): Promise<Map<T, R[]>> {
  const results = new Map(entries.map((entry) => [entry, [] as R[]]));
  for (let round = 0; round < count; round++)
    for (const entry of round % 2 === 0 ? entries : entries.toReversed())
      results.get(entry)?.push(await run(entry));
  return results;
}

/**
 * Measures contestants in turn. Before that everybody runs for half of the time without being counted: a service is
 * warm.
 */
export async function alternate(alternation: Alternation): Promise<Measured[]> {
  const { contestants, callers, seconds, reset, rounds = roundCount, signal, onRound } = alternation;
  const run = async ({ call }: Contestant, ms: number): Promise<Round> => {
    await reset();
    // One contestant's garbage is not to be collected on another's time.
    globalThis.gc?.();
    const round = await closedLoop(call, callers, ms, signal);
    onRound?.();
    return round;
  };
  for (const contestant of contestants.toReversed()) await run(contestant, seconds * 500);
  const results = await inTurns(contestants, rounds, (contestant) =>
    run(contestant, (seconds * 1000) / rounds),
  );
  return contestants.map((contestant) => medians(contestant.name, results.get(contestant) ?? []));
}

export function medians(name: string, rounds: readonly Round[]): Measured {
  const opsPerSecond = rounds.map((round) => round.opsPerSecond);
  return {
    name,
    opsPerSecond: median(opsPerSecond),
    p50Ms: median(rounds.map(({ latenciesMs }) => percentile(latenciesMs, 0.5))),
    p99Ms: median(rounds.map(({ latenciesMs }) => percentile(latenciesMs, 0.99))),
    rounds: opsPerSecond,
  };
}

/** Callers that each start the next operation when the last has ended. */
export async function closedLoop(
  call: Contestant["call"],
  callers: number,
  ms: number,
  signal?: AbortSignal,
): Promise<Round> {
  const latenciesMs: number[] = [];
  const started = performance.now();
  let turn = 0;
  const caller = async (): Promise<void> => {
    for (let since = performance.now(); since - started < ms;) {
      signal?.throwIfAborted();
      await call(turn++);
      const now = performance.now();
      latenciesMs.push(now - since);
      since = now;
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  return { latenciesMs, opsPerSecond: (latenciesMs.length / (performance.now() - started)) * 1000 };
}

/** What a round trip takes, in milliseconds. A server that is far away is asked less often. */
export async function roundTrip(send: () => Promise<unknown>, times = 300, mostMs = 2000): Promise<number> {
  const took: number[] = [];
  const started = performance.now();
  while (took.length < times && performance.now() - started < mostMs) {
    const since = performance.now();
    await send();
    took.push(performance.now() - since);
  }
  return median(took);
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
