/** What brute force finds of a program, what the explorer says, and whether these agree. */
import { type Exploration, type Results, type Scenario, explore } from "holdfast/testing";
import type { Ground } from "./ground.ts";
import type { Program } from "./program.ts";
import { type Outcome, type Result, Stepper, TooLarge, Unstable, outcomeOf, resultOf } from "./stepper.ts";

export interface Truth {
  /** With an interleaving that leads there. */
  readonly outcomes: ReadonlyMap<Outcome, string>;
  /** Those of serial orders. */
  readonly allowed: ReadonlySet<Outcome>;
  /** Those that no serial order has. */
  readonly races: readonly Outcome[];
  readonly runs: number;
}

/** Or why the program is no good for a test. */
export async function truthOf(ground: Ground, program: Program, mostRuns: number): Promise<Truth | string> {
  const stepper = new Stepper(ground, program);
  try {
    const allowed = await stepper.serial();
    const outcomes = await stepper.all(mostRuns);
    const everyoneRefused = [...outcomes.keys(), ...allowed].every((outcome) =>
      Object.values((JSON.parse(outcome) as { results: Record<string, Result> }).results).every(
        ({ refused }) => refused !== undefined,
      ),
    );
    // The explorer says that nothing was tested.
    if (everyoneRefused) return "everybody is refused";
    const races = [...outcomes.keys()].filter((outcome) => !allowed.has(outcome));
    return { outcomes, allowed, races, runs: stepper.runs };
  } catch (error) {
    if (error instanceof TooLarge) return "too large";
    if (error instanceof Unstable) return "came out differently by brute force";
    throw error;
  } finally {
    await stepper.close();
  }
}

export interface Explored {
  readonly report: Exploration | undefined;
  readonly error: unknown;
  readonly outcomes: ReadonlySet<Outcome>;
}

interface HowToExplore {
  readonly prune?: boolean;
  readonly replay?: string;
  readonly maxMs?: number;
}

/** `allowed`: other outcomes break the invariant; absent: nothing does, and all of them are collected. */
export async function explored(
  ground: Ground,
  program: Program,
  allowed: ReadonlySet<Outcome> | undefined,
  how: HowToExplore = {},
): Promise<Explored> {
  const outcomes = new Set<Outcome>();
  const invariant = async (results: Results) => {
    const told = Object.fromEntries(Object.entries(results).map(([name, each]) => [name, resultOf(each)]));
    const outcome = outcomeOf(told, await ground.rows(program));
    outcomes.add(outcome);
    if (allowed && !allowed.has(outcome)) throw new Error(`no serial order ends with ${outcome}`);
  };
  const actors = Object.entries(program.actors).map(([name, actor]) => [name, ground.actor(actor)] as const);
  const scenario = {
    ...(ground.db && { db: ground.db }),
    actors: Object.fromEntries(actors),
    reset: async () => ground.reset(program),
    invariant,
    preemptions: 100,
    maxMs: 60_000,
    ...(program.faults.length > 0 && { faults: program.faults }),
    ...how,
  } as Scenario;
  try {
    return { report: await explore(`program ${program.index}`, scenario), error: undefined, outcomes };
  } catch (error) {
    return { report: undefined, error, outcomes };
  }
}

export interface Judgement {
  readonly wrong?: string;
  /** Why a green report does not say "exhaustive". */
  readonly doubt?: string;
}

/** What is wrong with what the explorer says. */
export function judge(
  { outcomes, races }: Pick<Truth, "outcomes" | "races">,
  { report, error, outcomes: seen }: Explored,
): Judgement {
  const lines = (some: readonly Outcome[]) =>
    some.map((each) => `  ${each}\n    ${outcomes.get(each) ?? ""}`).join("\n");
  if (!report) return { wrong: `error: ${error instanceof Error ? error.message : String(error)}` };
  const unknown = [...seen].filter((outcome) => !outcomes.has(outcome));
  if (unknown.length > 0) return { wrong: `brute force does not know\n${lines(unknown)}\n${report.text}` };
  if (!report.ok && races.length === 0) return { wrong: `false alarm\n${report.text}` };
  if (report.anomaly === "not a race") return { wrong: `called not a race\n${report.text}` };
  if (!report.ok) return {};
  if (report.coverage !== "exhaustive") return { doubt: doubtOf(report) };
  if (races.length > 0) return { wrong: `false green\n${lines(races)}\n${report.text}` };
  const missed = [...outcomes.keys()].filter((outcome) => !seen.has(outcome));
  return missed.length > 0 ? { wrong: `missed\n${lines(missed)}\n${report.text}` } : {};
}

function doubtOf({ text }: Exploration): string {
  const why =
    /, since ([^;]*)/.exec(text)?.[1] ?? /of these \d+ runs (with a fault, .*?)(;|$)/.exec(text)?.[1];
  return (why ?? text).replaceAll(/"[^"]*"/g, "a statement").replaceAll(/\b[ABC]\b(?:, [ABC])*/g, "an actor");
}
