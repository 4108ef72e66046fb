/** How the cells of `patterns` are measured: contestants in turns, each for so long. */
import {
  type Contestant,
  type Round,
  closedLoop,
  inTurns,
  median,
  medians,
  roundCount,
} from "../../../packages/cli/src/bench/measure.ts";
import type { BenchRow } from "../report.ts";
import { cpuMs } from "../server-cpu.ts";

/** So many requests are under way at a time. */
export const callers = 64;
export const textbook = "textbook";

export interface RacerRound extends Round {
  /** Processor time of an operation, in microseconds: of this process, its server and all others that it has started. */
  readonly cpuUs: number;
  /** Statements that the server was sent for an operation, where it counts them. */
  readonly statements?: number;
}

/** One who takes part in a cell. */
export interface Racer {
  readonly name: string;
  /** About so long. */
  round(ms: number): Promise<RacerRound>;
}

/** Ours over the best of these, round by round. */
export interface Ratio {
  readonly name: string;
  readonly others: readonly string[];
  /** What was aimed at. */
  readonly wanted?: number;
}

export interface PatternCell {
  readonly name: string;
  readonly ratios: readonly Ratio[];
  /** Ours is the last. */
  open(): Promise<readonly Racer[]>;
}

/** One engine, with its server or file. */
export interface PatternGround extends AsyncDisposable {
  readonly name: string;
  /** Its version, and how it was set up. */
  readonly about: string;
  readonly cells: readonly PatternCell[];
  /** Throws if something was lost on either side. */
  check(): Promise<void>;
}

/** What a server has been sent so far. */
export type CountStatements = () => Promise<number>;

/** Work, and what it took of the server and of processors. */
export async function counting(
  operations: (round: Round) => number,
  sent: CountStatements | undefined,
  work: () => Promise<Round>,
): Promise<RacerRound> {
  const before = await sent?.();
  const began = cpuMs(process.pid);
  const round = await work();
  const cpuUs = ((cpuMs(process.pid) - began) * 1000) / operations(round);
  if (before === undefined || !sent) return { ...round, cpuUs };
  // The question itself is one of them.
  return { ...round, cpuUs, statements: ((await sent()) - before - 1) / operations(round) };
}

export const callsOf = ({ latenciesMs }: Round): number => latenciesMs.length;

/** As many callers as there are, in this process. */
export function looping(contestant: Contestant, callersHere = callers, sent?: CountStatements): Racer {
  return {
    name: contestant.name,
    round: (ms) => counting(callsOf, sent, () => closedLoop(contestant.call, callersHere, ms)),
  };
}

export interface CellResult {
  readonly rows: readonly BenchRow[];
  readonly ratios: Readonly<Record<string, number>>;
  readonly short: readonly string[];
}

/** Everybody runs for half of the time first, without being counted: a service is warm. */
export async function race(where: string, cell: PatternCell, seconds: number): Promise<CellResult> {
  const racers = await cell.open();
  const run = (racer: Racer, ms: number) => {
    // One contestant's garbage is not to be collected on another's time.
    globalThis.gc?.();
    return racer.round(ms);
  };
  for (const racer of racers.toReversed()) await run(racer, seconds * 500);
  const results = await inTurns(racers, roundCount, (racer) => run(racer, (seconds * 1000) / roundCount));
  const rows = racers.map((racer): BenchRow => {
    const rounds = results.get(racer) ?? [];
    const { name, ...figures } = medians(racer.name, rounds);
    const counts = rounds.flatMap(({ statements }) => statements ?? []);
    return {
      cell: `${where}: ${cell.name}`,
      contestant: name,
      ...figures,
      cpuUs: Math.round(median(rounds.map(({ cpuUs }) => cpuUs))),
      statements: counts.length > 0 ? Number(median(counts).toFixed(2)) : "",
    };
  });
  const ours = results.get(racers.at(-1) as Racer) ?? [];
  const ratios = cell.ratios.map(({ name, others, wanted }) => {
    const theirs = racers.filter((racer) => others.includes(racer.name));
    const each = ours.map(({ opsPerSecond }, round) => {
      const rates = theirs.map((racer) => results.get(racer)?.[round]?.opsPerSecond ?? Number.NaN);
      return opsPerSecond / Math.max(...rates);
    });
    return { name, wanted, found: Number(median(each).toFixed(2)) };
  });
  return {
    rows,
    ratios: Object.fromEntries(ratios.map(({ name, found }) => [name, found])),
    short: ratios.flatMap(({ name, found, wanted }) =>
      wanted !== undefined && !(found >= wanted) ? `${name} is ${found}, and ${wanted} was wanted.` : [],
    ),
  };
}
