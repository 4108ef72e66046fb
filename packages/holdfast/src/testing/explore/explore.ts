/**
 * Finds the race in a test: runs the caller's own functions at the same time on a real server, holds every statement
 * back, and tries the orders in which they can be sent, those with the fewest switches first.
 */
import { ours } from "../../core/beside.ts";
import type { Connection, Database } from "../../core/database.ts";
import { withConnection } from "../../core/errand.ts";
import { UnsupportedError, UsageError, message } from "../../core/errors.ts";
import { type Anomaly, anomalyOf } from "./anomaly.ts";
import { Gate } from "./gate.ts";
import { type Choice, type Run, perform } from "./schedule.ts";
import { planOf, replayOf, timeline } from "./timeline.ts";

export interface Scenario {
  /** The database, as an adapter gives it: `fromPg(pool)`. Its server is asked who waits for whom. */
  readonly db: Database<never, Connection> | Database<any, any>;
  /** Brings the data back to where every run starts. */
  readonly reset: () => Promise<unknown>;
  /** Your own functions, by name: each is called once in every run, all at the same time. */
  readonly actors: Readonly<Record<string, () => Promise<unknown>>>;
  /** Throws if what is in the database, or what the actors returned, cannot be. */
  readonly invariant: (results: Readonly<Record<string, PromiseSettledResult<unknown>>>) => unknown;
  /** At most so many switches away from an actor that could have gone on. Default 3. */
  readonly preemptions?: number;
  /** Milliseconds. Default 10,000. */
  readonly maxMs?: number;
  /** Only the schedule that a report named. */
  readonly replay?: string;
}

export interface Exploration {
  readonly ok: boolean;
  /** Every order was tried: `exhaustive`. Else all with so many switches: `bounded`. Else as many as there was time for. */
  readonly coverage: "exhaustive" | { readonly bounded: number } | { readonly runs: number };
  readonly runs: number;
  /** What the invariant threw. */
  readonly error?: unknown;
  readonly replay?: string;
  readonly preemptions?: number;
  readonly anomaly?: Anomaly;
  /** For people. */
  readonly text: string;
}

interface Plan {
  readonly order: readonly number[];
  readonly preemptions: number;
}

export async function explore(name: string, scenario: Scenario): Promise<Exploration> {
  const { db, reset, actors, invariant, preemptions: most = 3, maxMs = 10_000 } = scenario;
  const database = db as Database<unknown, Connection>;
  const { wire } = database.engine;
  if (!wire)
    throw new UnsupportedError(`explore: statements cannot be held back on ${database.engine.name} yet`);
  const names = Object.keys(actors);
  if (names.length < 2 || names.length > 26)
    throw new UsageError("explore: a race takes at least two actors, and at most 26 can be named");
  const cast = names.map((each) => ({ name: each, run: actors[each] as () => Promise<unknown> }));
  const gate = new Gate(wire);
  const waiting = (ports: readonly number[]) =>
    ours(() => withConnection({ database }, (connection) => wire.waiting(connection, ports)));
  // What is asked once must not be asked within a run.
  await waiting([0]);
  const once = async (order: readonly number[]): Promise<{ run: Run; error?: unknown }> => {
    await reset();
    gate.open();
    let run: Run;
    try {
      run = await perform(gate, waiting, cast, order);
    } finally {
      gate.close();
    }
    try {
      await invariant(Object.fromEntries(names.map((each, i) => [each, run.results[i]])) as never);
      return { run };
    } catch (error) {
      return { run, error };
    }
  };

  const until = performance.now() + maxMs;
  const queue: Plan[] = [
    { order: scenario.replay === undefined ? [] : planOf(scenario.replay), preemptions: 0 },
  ];
  let runs = 0;
  let beyond = false;
  let bounded = -1;
  for (let plan = queue.shift(); plan; plan = queue.shift()) {
    if (performance.now() > until) return passed(name, runs, bounded < 0 ? { runs } : { bounded });
    bounded = Math.max(bounded, plan.preemptions - 1);
    const { run, error } = await once(plan.order);
    runs++;
    if (run.strayed)
      throw new UsageError(
        `explore "${name}": the same order came out differently (${run.strayed}). Something else than the schedule decides: a timer, a random number, a cache, work left over from the last run.`,
      );
    if (error !== undefined) return failed(name, names, runs, run, error);
    if (scenario.replay !== undefined) break;
    for (const next of alternatives(run.choices, plan.order.length)) {
      if (next.preemptions > most) beyond = true;
      else insert(queue, next);
    }
  }
  if (scenario.replay !== undefined) return passed(name, runs, { runs });
  return passed(name, runs, beyond ? { bounded: most } : "exhaustive");
}

/** Other turns that could have been taken after what was planned. */
function alternatives(choices: readonly Choice[], from: number): Plan[] {
  const plans: Plan[] = [];
  for (let i = from; i < choices.length; i++) {
    const { enabled, chosen } = choices[i] as Choice;
    const before = choices[i - 1];
    for (const other of enabled) {
      if (other === chosen) continue;
      const switches = before && before.chosen !== other && enabled.includes(before.chosen) ? 1 : 0;
      plans.push({
        order: [...choices.slice(0, i).map((choice) => choice.chosen), other],
        preemptions: (before?.preemptions ?? 0) + switches,
      });
    }
  }
  return plans;
}

/** Those with the fewest switches first; among these, as they came. */
function insert(queue: Plan[], plan: Plan): void {
  const at = queue.findIndex(({ preemptions }) => preemptions > plan.preemptions);
  if (at < 0) queue.push(plan);
  else queue.splice(at, 0, plan);
}

function passed(name: string, runs: number, coverage: Exploration["coverage"]): Exploration {
  const how =
    coverage === "exhaustive"
      ? "exhaustive"
      : "bounded" in coverage
        ? `bounded ≤ ${coverage.bounded}`
        : `${coverage.runs} runs, then out of time`;
  return { ok: true, coverage, runs, text: `✓ ${name}: ${runs} ${runs === 1 ? "run" : "runs"}, ${how}` };
}

function failed(name: string, names: readonly string[], runs: number, run: Run, error: unknown): Exploration {
  const preemptions = run.choices.at(-1)?.preemptions ?? 0;
  const replay = replayOf(run);
  const { kind, table, fix } = anomalyOf(run);
  const text = [
    `✗ ${name}      run ${runs} · ${preemptions} ${preemptions === 1 ? "preemption" : "preemptions"}`,
    timeline(run, names),
    message(error),
    `${kind[0]?.toUpperCase()}${kind.slice(1)}${table ? ` on ${table}` : ""}. ${fix}`,
    `Replay: '${replay}'`,
  ].join("\n");
  return { ok: false, coverage: { runs }, runs, error, replay, preemptions, anomaly: kind, text };
}

/** Throws, with the schedule, if the actors can get in each other's way. */
export async function expectNoRace(scenario: Scenario & { readonly name?: string }): Promise<Exploration> {
  const report = await explore(scenario.name ?? Object.keys(scenario.actors).join(" and "), scenario);
  if (!report.ok) throw new Error(report.text, { cause: report.error });
  return report;
}
