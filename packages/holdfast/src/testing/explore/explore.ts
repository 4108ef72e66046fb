/**
 * Finds the race in a test: runs the caller's own functions at the same time on a real server, holds every statement
 * back, and tries the orders in which they can be sent, those with the fewest switches first.
 */
import { ours } from "../../core/beside.ts";
import type { Connection, Database, Isolation } from "../../core/database.ts";
import { withConnection } from "../../core/errand.ts";
import { UnsupportedError, UsageError } from "../../core/errors.ts";
import type { Kept, Wire } from "../../core/wire.ts";
import type { Stage } from "./actor.ts";
import { diagnose } from "./anomaly.ts";
import { Equivalence } from "./equivalence.ts";
import { type Exploration, type Level, RaceError, failed, passed } from "./report.ts";
import { type Plan, type Run, perform } from "./schedule.ts";
import { Search, merged, randomOf } from "./search.ts";
import { Sockets } from "./sockets.ts";
import { ThreadActor, Threads } from "./threads.ts";
import { planOf } from "./timeline.ts";

export type Results = Readonly<Record<string, PromiseSettledResult<unknown>>>;
/** Throws if what is in the database, or what the actors returned, cannot be. */
export type Invariant = (results: Results) => unknown;

export interface ExploreOptions {
  /**
   * Brings the data back to where every run starts. By default what the actors wrote is undone: in the tables that they
   * wrote to, and nowhere else; and not at all while others are at work in this database.
   */
  readonly reset?: () => Promise<unknown>;
  /** At most so many switches away from an actor that could have gone on. Default 3. */
  readonly preemptions?: number;
  /** For everything, in milliseconds. Default 10,000. */
  readonly maxMs?: number;
  /** Tries all of it at each of these levels. By default the transactions run at their own. */
  readonly isolation?: Isolation | readonly Isolation[];
  /** False: also orders in which only statements that do not touch each other have changed places. Default true. */
  readonly prune?: boolean;
  /** Of the orders that are tried at random, in the time that is left. Default: another one each time. */
  readonly seed?: number;
  /** Only the schedule that a report named. */
  readonly replay?: string;
  /** Called before each run. */
  readonly onProgress?: (progress: Progress) => void;
}

export interface Scenario extends ExploreOptions {
  /** The database, as an adapter gives it: `fromPg(pool)`. Its server is asked who waits for whom. */
  readonly db: Database<never, Connection> | Database<any, any>;
  /** Your own functions, by name: each is called once in every run, all at the same time. */
  readonly actors: Readonly<Record<string, () => Promise<unknown>>>;
  readonly invariant: Invariant;
}

/** For databases that are files: each actor in a thread of its own, which stands for a process. */
export interface ThreadScenario extends Omit<ExploreOptions, "reset" | "isolation"> {
  /** Not asked: the threads tell who waits. */
  readonly db?: undefined;
  /** Functions of your own modules, by name: `inThread(new URL("./shop.ts", import.meta.url), "pay", 7)`. */
  readonly actors: Readonly<Record<string, ThreadActor>>;
  /** Brings the data back to where every run starts; with the client, and so the library, that the actors have. */
  readonly reset: () => unknown;
  readonly invariant: Invariant;
}

export interface Progress {
  readonly isolation: Isolation | undefined;
  readonly runs: number;
  /** Orders that are known and not tried yet. */
  readonly queued: number;
  /** Switches of the order that is tried now; undefined: at random. */
  readonly preemptions: number | undefined;
  readonly ms: number;
}

/** What belongs to the caller, and does not end. */
const callerMs = 30_000;

export function explore(name: string, scenario: Scenario): Promise<Exploration>;
/** The same with actors in threads of their own. */
export function explore(name: string, scenario: ThreadScenario): Promise<Exploration>;
export async function explore(name: string, scenario: Scenario | ThreadScenario): Promise<Exploration> {
  const names = namesOf(scenario.actors);
  return isThreaded(scenario) ? inThreads(name, scenario, names) : onSockets(name, scenario, names);
}

function isThreaded(scenario: Scenario | ThreadScenario): scenario is ThreadScenario {
  const actors: unknown[] = Object.values(scenario.actors);
  const threads = actors.filter((actor) => actor instanceof ThreadActor).length;
  if (threads > 0 && threads < actors.length)
    throw new UsageError("explore: either all actors are in threads of their own (inThread), or none is");
  return threads > 0;
}

async function inThreads(
  name: string,
  scenario: ThreadScenario,
  names: readonly string[],
): Promise<Exploration> {
  const { reset, actors, prune } = scenario;
  if ((scenario as ExploreOptions).isolation !== undefined)
    throw new UsageError("explore: `isolation` cannot be chosen for actors in threads of their own");
  if (typeof (reset as unknown) !== "function")
    throw new UsageError("explore: actors in threads of their own need `reset`, which brings the data back");
  const threads = new Threads(
    names,
    names.map((each) => actors[each] as ThreadActor),
  );
  try {
    await ends(threads.ready(), "the import of the actors' modules");
    const explorer = new Explorer(name, { ...scenario, reset: async () => reset() }, names, threads, {
      equivalence: new Equivalence(prune === false ? undefined : [], { whole: true }),
      victims: true,
      whole: true,
    });
    return await explorer.levels(() => {});
  } finally {
    await threads.end();
  }
}

async function onSockets(name: string, scenario: Scenario, names: readonly string[]): Promise<Exploration> {
  const database = scenario.db as Database<unknown, Connection>;
  const { wire } = database.engine;
  if (!wire) throw new UnsupportedError(`explore: statements cannot be held back on ${database.engine.name}`);
  return onServer(database, async (errand) => {
    const related =
      scenario.prune === false ? undefined : await errand((connection) => wire.related(connection));
    const ask = (ports: readonly number[]) => errand((connection) => wire.waiting(connection, ports));
    const work = names.map((each) => scenario.actors[each] as () => Promise<unknown>);
    const sockets = new Sockets(wire, ask, work);
    const exploring = async (reset: () => Promise<unknown>) => {
      const explorer = new Explorer(name, { ...scenario, reset }, names, sockets, {
        equivalence: new Equivalence(related),
        victims: wire.patience !== undefined,
      });
      try {
        return await explorer.levels((level) => (sockets.level = level));
      } finally {
        await sockets.end();
      }
    };
    if (scenario.reset) return exploring(scenario.reset);
    const kept = await keep(database, wire, errand).catch(async (error: unknown) => {
      await sockets.end();
      throw error;
    });
    return bringingBack(kept, () => kept.restore(sockets.written, sockets.sessions), exploring);
  });
}

/** Also at the end. If that fails, whatever failed before it says more. */
async function bringingBack<T>(
  kept: Kept,
  restore: () => Promise<void>,
  work: (restore: () => Promise<void>) => Promise<T>,
): Promise<T> {
  try {
    const [result] = await Promise.allSettled([work(restore)]);
    const [restored] = await Promise.allSettled([restore()]);
    if (result.status === "rejected") throw result.reason;
    if (restored.status === "rejected") throw restored.reason;
    return result.value;
  } finally {
    await kept.forget();
  }
}

function namesOf(actors: object): string[] {
  const names = Object.keys(actors);
  if (names.length < 2 || names.length > 26)
    throw new UsageError("explore: a race takes at least two actors, and at most 26 can be named");
  return names;
}

type Errand = <T>(errand: (connection: Connection) => Promise<T>) => Promise<T>;

/** One connection for all questions, where the client lends one for as long as that. */
function onServer<T>(
  database: Database<unknown, Connection>,
  work: (errand: Errand) => Promise<T>,
): Promise<T> {
  if (!database.connect) return work((errand) => ours(() => withConnection({ database }, errand)));
  const hour = 3_600_000;
  return ours(() =>
    withConnection({ database }, (connection) => work((errand) => ours(() => errand(connection))), hour),
  );
}

async function keep(
  database: Database<unknown, Connection>,
  wire: Wire<Connection>,
  errand: Errand,
): Promise<Kept> {
  const { keep: kept } = wire;
  if (!database.connect || !kept)
    throw new UsageError(
      "explore: say with `reset` how the data is brought back; through this client it cannot be kept",
    );
  return errand(kept);
}

async function ends<T>(work: Promise<T>, what: string): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  const timer = setTimeout(
    () =>
      reject(
        new Error(
          `explore: ${what} does not end for ${callerMs / 1000} s. Does an actor leave its transaction open, or is there no connection left in the pool?`,
        ),
      ),
    callerMs,
  );
  try {
    return await Promise.race([work, promise]);
  } finally {
    clearTimeout(timer);
  }
}

export class Explorer {
  readonly #name: string;
  readonly #scenario: ExploreOptions & { reset: () => Promise<unknown>; invariant: Invariant };
  readonly #names: readonly string[];
  readonly #stage: Stage;
  readonly #engine: {
    readonly equivalence: Equivalence;
    readonly victims: boolean;
    readonly whole?: boolean;
  };
  #begun = performance.now();
  readonly #seed: number;
  #runs = 0;

  constructor(
    name: string,
    scenario: ExploreOptions & { reset: () => Promise<unknown>; invariant: Invariant },
    names: readonly string[],
    stage: Stage,
    engine: { readonly equivalence: Equivalence; readonly victims: boolean; readonly whole?: boolean },
  ) {
    this.#name = name;
    this.#scenario = scenario;
    this.#names = names;
    this.#stage = stage;
    this.#engine = engine;
    this.#seed = scenario.seed ?? Math.floor(Math.random() * 2 ** 31);
  }

  /** All of it at each level. */
  async levels(set: (level: Isolation | undefined) => void): Promise<Exploration> {
    const { isolation, maxMs = 10_000 } = this.#scenario;
    const wanted = isolation === undefined ? [undefined] : [isolation].flat();
    const done: Level[] = [];
    // Opens connections and fills caches, so that these are not a part of the runs.
    await ends(this.#scenario.reset(), "the reset");
    await perform(this.#stage, this.#names, { order: [], victim: undefined });
    this.#begun = performance.now();
    for (const [i, level] of wanted.entries()) {
      set(level);
      const runs = this.#runs;
      const found = await this.#level(level, this.#begun + (maxMs * (i + 1)) / wanted.length);
      if ("run" in found)
        return failed({
          name: this.#name,
          names: this.#names,
          runs: this.#runs,
          ms: this.#ms,
          levels: done,
          isolation: level,
          seed: this.#seed,
          ...found,
          diagnosis: diagnose(found.run, level, this.#engine.whole),
        });
      done.push({ ...found, runs: this.#runs - runs, ...(level === undefined ? {} : { isolation: level }) });
    }
    return passed({ name: this.#name, runs: this.#runs, ms: this.#ms, levels: done, seed: this.#seed });
  }

  get #ms(): number {
    return performance.now() - this.#begun;
  }

  async #level(
    level: Isolation | undefined,
    until: number,
  ): Promise<Omit<Level, "runs"> | { run: Run; error: unknown }> {
    const { preemptions: most = 3, replay } = this.#scenario;
    const search = new Search(this.#engine.equivalence, most, this.#engine.victims);
    const progress = (preemptions: number | undefined) =>
      this.#scenario.onProgress?.({
        isolation: level,
        runs: this.#runs,
        queued: search.queued,
        preemptions,
        ms: this.#ms,
      });
    if (replay !== undefined) {
      progress(undefined);
      return this.#replay(planOf(replay, this.#names));
    }
    const slept = new Set<number>();
    // What is tried then is not known to be everything.
    let uncertain = false;
    let complete = -1;
    for (let plan = search.next(); plan; plan = search.next()) {
      if (performance.now() > until)
        return {
          coverage: complete < 0 || uncertain ? { runs: this.#runs } : { bounded: complete },
          random: 0,
          slept: this.#called(slept),
        };
      complete = Math.max(complete, plan.preemptions - 1);
      progress(plan.preemptions);
      const { run, error } = await this.#once(plan, search);
      for (const each of run.slept) slept.add(each);
      uncertain ||= run.diverted || run.slept.size > 0;
      if (error !== undefined) return { run, error };
      search.learn(plan, run);
    }
    if (!search.beyond)
      return {
        coverage: uncertain ? { runs: this.#runs } : "exhaustive",
        random: 0,
        slept: this.#called(slept),
      };
    const found = await this.#atRandom(until, () => progress(undefined));
    if ("run" in found) return found;
    return {
      coverage: uncertain ? { runs: this.#runs } : { bounded: most },
      random: found.random,
      slept: this.#called(slept),
    };
  }

  /** After a change of the code it may not be possible any more: then that is the answer, whatever else comes of it. */
  async #replay(plan: Plan): Promise<Omit<Level, "runs"> | { run: Run; error: unknown }> {
    for (let again = 0; ; again++) {
      const { run, error } = await this.#try(plan);
      // Where the server decides whom it ends, it may take some trying; and so may a connection that is opened anew.
      if ((run.diverted || run.strayed) && again < 2) continue;
      if (error !== undefined) return { run, error };
      return {
        coverage: { runs: 1 },
        random: 0,
        slept: [],
        ...(run.strayed === undefined ? {} : { impossible: run.strayed }),
      };
    }
  }

  #called(actors: Iterable<number>): string[] {
    return [...actors].map((index) => this.#names[index] ?? "");
  }

  async #atRandom(
    until: number,
    progress: () => void,
  ): Promise<{ random: number } | { run: Run; error: unknown }> {
    const random = randomOf(this.#seed);
    let tried = 0;
    while (performance.now() < until) {
      progress();
      const pick = (enabled: readonly number[]) => enabled[Math.floor(random() * enabled.length)] as number;
      const { run, error } = await this.#once({ order: [], victim: undefined, pick });
      tried++;
      if (error !== undefined) return this.#smaller(run, error);
    }
    return { random: tried };
  }

  /** The same failure with fewer switches, if there is one near. */
  async #smaller(run: Run, error: unknown): Promise<{ run: Run; error: unknown }> {
    let best = { run, error };
    const until = performance.now() + 2000;
    for (let better = true; better && performance.now() < until;) {
      better = false;
      for (const order of merged(best.run.choices.map(({ chosen }) => chosen))) {
        if (performance.now() > until) break;
        const next = await this.#once({ order, victim: undefined, lenient: true });
        if (next.error === undefined || switches(next.run) >= switches(best.run)) continue;
        best = { run: next.run, error: next.error };
        better = true;
        break;
      }
    }
    return best;
  }

  async #once(plan: Plan, search?: Search): Promise<{ run: Run; error?: unknown }> {
    for (let again = 0; ; again++) {
      const { run, ...judged } = await this.#try(plan);
      // Where the server decides whom it ends, it may take some trying.
      if (run.diverted && again < 4) continue;
      const strayed = run.strayed ?? search?.strange(run, this.#names);
      if (strayed) {
        // A connection that the pool opened anew says more than one that was there before: twice is a habit.
        if (again < 2) continue;
        throw new UsageError(
          `explore "${this.#name}": the same order came out differently: ${strayed}. Something else than the order of statements decides: a timer, a random number, a cache, work left over from the last run.`,
        );
      }
      return { run, ...judged };
    }
  }

  async #try(plan: Plan): Promise<{ run: Run; error?: unknown }> {
    await ends(this.#scenario.reset(), "the reset");
    const run = await perform(this.#stage, this.#names, plan);
    this.#runs++;
    try {
      const results = Object.fromEntries(this.#names.map((each, i) => [each, run.results[i]])) as Results;
      const judge = async () => this.#scenario.invariant(results);
      await ends(this.#stage.judge?.(judge) ?? judge(), "the invariant");
      return { run };
    } catch (error) {
      return { run, error: error ?? new Error("the invariant threw nothing") };
    }
  }
}

const switches = ({ choices }: Run) => choices.at(-1)?.preemptions ?? 0;

/** Throws, with the schedule, if the actors can get in each other's way. */
export function expectNoRace(scenario: Scenario & { readonly name?: string }): Promise<Exploration>;
/** The same with actors in threads of their own. */
export function expectNoRace(scenario: ThreadScenario & { readonly name?: string }): Promise<Exploration>;
/** Two or more functions that run at the same time, and what must hold after them. */
export function expectNoRace(
  db: Scenario["db"],
  actors: readonly (() => Promise<unknown>)[],
  invariant: Invariant,
  options?: ExploreOptions & { readonly name?: string },
): Promise<Exploration>;
export async function expectNoRace(
  first: ((Scenario | ThreadScenario) & { readonly name?: string }) | Scenario["db"],
  actors?: readonly (() => Promise<unknown>)[],
  invariant?: Invariant,
  options?: ExploreOptions & { readonly name?: string },
): Promise<Exploration> {
  const scenario: (Scenario | ThreadScenario) & { readonly name?: string } =
    actors && invariant
      ? {
          ...options,
          db: first as Scenario["db"],
          actors: Object.fromEntries(actors.map((each, i) => [String.fromCharCode(65 + i), each])),
          invariant,
        }
      : (first as (Scenario | ThreadScenario) & { readonly name?: string });
  const report = await explore(scenario.name ?? titleOf(scenario.actors), scenario as Scenario);
  if (!report.ok) throw new RaceError(report);
  return report;
}

function titleOf(actors: (Scenario | ThreadScenario)["actors"]): string {
  return Object.entries<{ readonly name: string }>(actors)
    .map(([name, { name: called }]) => called || name)
    .join(" and ");
}
