/**
 * Finds the race in a test: runs the caller's own functions at the same time on a real server, holds every statement
 * back, and tries the orders in which they can be sent, those with the fewest switches first.
 */
import { ours } from "../../context/ours.ts";
import type { Connection, Database, Isolation } from "../../seam/database.ts";
import { withConnection } from "../../transaction/one-shot.ts";
import { UnsupportedError, UsageError } from "../../seam/errors.ts";
import type { KeptStatement, Protocol } from "../../seam/protocol-reader.ts";
import type { ActorStage } from "./actor.ts";
import { diagnose } from "./anomaly.ts";
import { Equivalence } from "./equivalence.ts";
import { holdsBetween, notGivenBack } from "./evidence.ts";
import { type FaultKind, faultKinds, faultPlans } from "./faults.ts";
import {
  type Coverage,
  type Exploration,
  type Level,
  RaceError,
  coverageText,
  failed,
  passed,
  worth,
} from "./report.ts";
import { type Limits, type ExplorePlan, type ExploreRun, TimeOver, perform } from "./schedule.ts";
import { ScheduleSearch, merged, randomOf } from "./search.ts";
import { SeenTable } from "./seen.ts";
import { type Server, Sockets } from "./sockets.ts";
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
  /** For everything, in milliseconds. Default 3,500, so that it ends before a test runner's 5 s do. */
  readonly maxMs?: number;
  /**
   * Fails if less was tried: `"exhaustive"`, or all orders with so many switches. By default all orders with one switch, at least
   * of each two actors.
   */
  readonly minCoverage?: "exhaustive" | number;
  /** Ends it: that of a test, which its runner aborts when its time is over. */
  readonly signal?: AbortSignal;
  /**
   * What may befall an actor, tried at each of its statements: `crash`, `lost commit`, `twice`, `expired lease`, `pause`. Then one
   * actor is enough.
   */
  readonly faults?: readonly FaultKind[];
  /** That of the actors' instances, if they have chosen one: where the leases are that run out. */
  readonly schema?: string;
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
  /**
   * Not asked who waits, which the threads tell. Only for the faults `expired lease` and `pause`: the same file, as an adapter gives
   * it, so that leases can be made to run out.
   */
  readonly db?: Scenario["db"];
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

const importMs = 30_000;
/** Below the 5 s of test runners. Who gives tests more, on a machine that is busy with others, can say so for all of them. */
const defaultMs = Number(process.env["HOLDFAST_EXPLORE_MS"]) || 3500;
/** What a run is given, however little time there is. */
const leastMs = 2000;

/** One at a time in a process: others wait for it. */
let last: Promise<unknown> = Promise.resolve();

export function explore(name: string, scenario: Scenario): Promise<Exploration>;
/** The same with actors in threads of their own. */
export function explore(name: string, scenario: ThreadScenario): Promise<Exploration>;
export async function explore(name: string, scenario: Scenario | ThreadScenario): Promise<Exploration> {
  const names = namesOf(scenario.actors, scenario.faults ? 1 : 2);
  check(scenario);
  if (isThreaded(scenario)) return inThreads(name, scenario, names);
  const before = last;
  const mine = before.then(() => onSockets(name, scenario, names));
  last = mine.catch(() => {});
  return mine;
}

function check({
  minCoverage,
  maxMs,
  faults = [],
}: Pick<ExploreOptions, "minCoverage" | "maxMs" | "faults">): void {
  const unknown = faults.find((each) => !faultKinds.includes(each));
  if (unknown !== undefined)
    throw new UsageError(
      `explore: there is no fault ${JSON.stringify(unknown)}; there are ${faultKinds.map((kind) => `"${kind}"`).join(", ")}`,
    );
  const whole = typeof minCoverage === "number" && Number.isInteger(minCoverage) && minCoverage >= 0;
  if (minCoverage !== undefined && minCoverage !== "exhaustive" && !whole)
    throw new UsageError('explore: `minCoverage` is "exhaustive" or a number of switches');
  if (maxMs !== undefined && !(maxMs >= 0))
    throw new UsageError("explore: `maxMs` is a number of milliseconds");
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
  const { reset, actors, prune, faults = [], db } = scenario;
  if (faults.includes("lost commit"))
    throw new UsageError(
      'explore: there is no "lost commit" for actors in threads of their own: COMMIT is a call there, which returns in the process that called it, or the process has ended ("crash")',
    );
  const leased = faults.find((each) => each === "expired lease" || each === "pause");
  if (leased && !db)
    throw new UsageError(
      `explore: the fault "${leased}" lets leases run out, for which actors in threads of their own need \`db\`: the same file, as an adapter gives it`,
    );
  if ((scenario as ExploreOptions).isolation !== undefined)
    throw new UsageError("explore: `isolation` cannot be chosen for actors in threads of their own");
  if (typeof (reset as unknown) !== "function")
    throw new UsageError("explore: actors in threads of their own need `reset`, which brings the data back");
  const threads = new Threads(
    names,
    names.map((each) => actors[each] as ThreadActor),
    db && (() => expired(db as Database<unknown, Connection>, scenario)),
  );
  try {
    await ends(threads.ready(), "the import of the actors' modules", importMs);
    const explorer = new Explorer(name, { ...scenario, reset: async () => reset() }, names, threads, {
      equivalence: new Equivalence(prune === false ? undefined : [], { whole: true }),
      whole: true,
    });
    return await explorer.levels(() => {});
  } finally {
    await threads.end();
  }
}

/** Ends all leases, as if nobody had renewed them. Undefined: there are none. */
function expiry(
  { engine }: Database<unknown, Connection>,
  { schema }: Pick<ExploreOptions, "schema">,
): ((connection: Connection) => Promise<void>) | undefined {
  const chosen = schema === undefined ? undefined : engine.named?.(schema);
  const { leases } = chosen?.engine ?? engine;
  return (
    leases &&
    (async (given) => {
      const connection = chosen ? chosen.on(given) : given;
      for (const lease of await leases.list(connection, {})) await leases.release(connection, lease, 0);
    })
  );
}

async function expired(
  database: Database<unknown, Connection>,
  options: Pick<ExploreOptions, "schema">,
): Promise<void> {
  const expire = expiry(database, options);
  if (expire) await ours(() => withConnection({ database }, expire));
}

async function onSockets(name: string, scenario: Scenario, names: readonly string[]): Promise<Exploration> {
  const database = scenario.db as Database<unknown, Connection>;
  const { protocol } = database.engine;
  const expire = expiry(database, scenario);
  if (!protocol)
    throw new UnsupportedError(`explore: statements cannot be held back on ${database.engine.name}`);
  return onServer(database, async (onServerOnce) => {
    const related = await onServerOnce((connection) => protocol.related(connection));
    const server: Server = {
      protocol,
      active: new Set(related.filter((group) => group.includes("*")).flat()),
      writers: await onServerOnce((connection) => protocol.autocommit.writers(connection)),
      waiting: (sessions) => onServerOnce((connection) => protocol.waiting(connection, sessions)),
      describe: (sessions) => onServerOnce((connection) => protocol.describe(connection, sessions)),
      cancel: (sessions) => onServerOnce((connection) => protocol.cancel(connection, sessions)),
      ...(expire && { expire: () => onServerOnce(expire) }),
      marked: (mark) => onServerOnce(async (connection) => protocol.autocommit.marked?.(connection, mark)),
    };
    const work = names.map((each) => scenario.actors[each] as () => Promise<unknown>);
    const sockets = new Sockets(server, work);
    const exploring = async (reset: () => Promise<unknown>) => {
      const explorer = new Explorer(name, { ...scenario, reset }, names, sockets, {
        equivalence: new Equivalence(scenario.prune === false ? undefined : related),
      });
      try {
        return await explorer.levels((level) => (sockets.level = level));
      } finally {
        await sockets.end();
      }
    };
    if (scenario.reset) return exploring(scenario.reset);
    const kept = await keep(database, protocol, onServerOnce).catch(async (error: unknown) => {
      await sockets.end();
      throw error;
    });
    return bringingBack(kept, () => kept.restore(sockets.written, sockets.sessions), exploring);
  });
}

/** Also at the end. If that fails, whatever failed before it says more. */
async function bringingBack<T>(
  kept: KeptStatement,
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

function namesOf(actors: object, least: number): string[] {
  const names = Object.keys(actors);
  if (names.length < least || names.length > 26)
    throw new UsageError("explore: a race takes at least two actors, and at most 26 can be named");
  return names;
}

type ActorErrand = <T>(onServerOnce: (connection: Connection) => Promise<T>) => Promise<T>;

/** One connection for all questions, where the client lends one for as long as that. */
function onServer<T>(
  database: Database<unknown, Connection>,
  work: (onServerOnce: ActorErrand) => Promise<T>,
): Promise<T> {
  if (!database.connect)
    return work((onServerOnce) => ours(() => withConnection({ database }, onServerOnce)));
  const hour = 3_600_000;
  return ours(() =>
    withConnection(
      { database },
      (connection) => work((onServerOnce) => ours(() => onServerOnce(connection))),
      hour,
    ),
  );
}

async function keep(
  database: Database<unknown, Connection>,
  protocol: Protocol<Connection>,
  onServerOnce: ActorErrand,
): Promise<KeptStatement> {
  const { keep: kept } = protocol;
  if (!database.connect || !kept)
    throw new UsageError(
      "explore: say with `reset` how the data is brought back; through this client it cannot be kept",
    );
  return onServerOnce(kept);
}

async function ends<T>(work: Promise<T>, what: string, ms: number): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  const timer = setTimeout(
    () =>
      reject(
        new UsageError(
          `explore: ${what} does not end for ${(ms / 1000).toLocaleString("en", { maximumFractionDigits: 1 })} s. Does an actor leave its transaction open, or is there no connection left in the pool?`,
        ),
      ),
    ms,
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
  readonly #stage: ActorStage;
  readonly #engine: {
    readonly equivalence: Equivalence;
    readonly whole?: boolean;
  };
  #begun = performance.now();
  readonly #limits: Limits;
  readonly #seed: number;
  readonly #seen: SeenTable;
  #runs = 0;
  /** Of these, with a fault. */
  #faulted = 0;
  /** What everybody did when the time was over in the middle of a run. */
  #cut: string | undefined;
  /** Actors that have done nothing for a while, again and again. */
  readonly #sleepers = new Set<number>();

  constructor(
    name: string,
    scenario: ExploreOptions & { reset: () => Promise<unknown>; invariant: Invariant },
    names: readonly string[],
    stage: ActorStage,
    engine: { readonly equivalence: Equivalence; readonly whole?: boolean },
  ) {
    this.#name = name;
    this.#scenario = scenario;
    this.#names = names;
    this.#stage = stage;
    this.#engine = engine;
    this.#seed = scenario.seed ?? Math.floor(Math.random() * 2 ** 31);
    this.#seen = new SeenTable(names);
    const { maxMs = defaultMs, signal } = scenario;
    const ms = Math.max(maxMs, leastMs);
    const until = performance.now() + ms;
    this.#limits = {
      idleMs: Math.min(ms / 2, 10_000),
      get until() {
        return signal?.aborted ? 0 : until;
      },
    };
  }

  /** Of all the time, what is left for something of the caller's. */
  get #left(): number {
    return Math.max(this.#limits.until - performance.now(), leastMs / 4);
  }

  /** All of it at each level. */
  async levels(set: (level: Isolation | undefined) => void): Promise<Exploration> {
    const { isolation, maxMs = defaultMs, replay } = this.#scenario;
    const wanted = isolation === undefined ? [undefined] : [isolation].flat();
    const done: Level[] = [];
    if (replay !== undefined) planOf(replay, this.#names);
    // Opens connections and fills caches, so that these are not a part of the runs.
    await ends(this.#scenario.reset(), "the reset", this.#left);
    const warm = await this.#inTime(() => this.#perform({ order: [], victim: undefined }));
    if (warm) this.#seen.add(warm);
    this.#begun = performance.now();
    for (const [i, level] of wanted.entries()) {
      set(level);
      const runs = this.#runs;
      const until = Math.min(this.#begun + (maxMs * (i + 1)) / wanted.length, this.#limits.until);
      let found = await this.#level(level, until);
      // A connection that took its time to open kept them apart; now it is there.
      if (replay === undefined && !("run" in found) && this.#seen.nothing() !== undefined)
        found = await this.#level(level, until);
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
    if (replay === undefined) this.#refuse(this.#seen.nothing());
    return passed({
      name: this.#name,
      runs: this.#runs,
      ms: this.#ms,
      levels: done,
      seed: this.#seed,
      faults: this.#faulted,
      ...this.#seen.noted,
    });
  }

  #refuse(why: string | undefined): void {
    if (why !== undefined) throw new UsageError(`explore "${this.#name}": ${why}`);
  }

  get #ms(): number {
    return performance.now() - this.#begun;
  }

  async #perform(plan: ExplorePlan): Promise<ExploreRun> {
    try {
      return await perform(this.#stage, this.#names, plan, this.#limits);
    } catch (error) {
      this.#scenario.signal?.throwIfAborted();
      if (error instanceof UsageError) this.#refuse(error.message);
      throw error;
    }
  }

  async #level(
    level: Isolation | undefined,
    until: number,
  ): Promise<Omit<Level, "runs"> | { run: ExploreRun; error: unknown }> {
    const { preemptions: most = 3, replay } = this.#scenario;
    const { equivalence } = this.#engine;
    if (replay !== undefined) {
      this.#progress(level, 0, undefined);
      return this.#replay(planOf(replay, this.#names));
    }
    // What it is like is known from the run before the first.
    equivalence.all ||= this.#stage.certified ?? false;
    const search = new ScheduleSearch(equivalence, most, this.#stage.victims);
    const slept = new Set<number>();
    const patient = new Set<number>();
    // What is tried then is not known to be everything.
    let uncertain = false;
    let random = 0;
    let stopped = false;
    const runs = this.#runs;
    for (let plan = search.next(); plan; plan = search.next()) {
      stopped = performance.now() > until;
      if (stopped) break;
      this.#progress(level, search.queued, plan.preemptions);
      const found = await this.#inTime(() => this.#once(plan as ExplorePlan, search));
      stopped = found === undefined;
      if (!found) break;
      const { run, error, strange } = found;
      for (const each of run.slept) slept.add(each);
      for (const each of run.patient) patient.add(each);
      if (error !== undefined) return { run, error };
      // It was wrong to leave something out: from the beginning, without that.
      const doubted = strange !== undefined || (this.#stage.certified ?? false);
      if (doubted && !equivalence.all) {
        equivalence.all = true;
        search.restart();
        continue;
      }
      uncertain ||= run.diverted || strange !== undefined;
      if (plan.order.length === 0) {
        const broken = (await this.#lent(run)) ?? (await this.#faults(run, until));
        if (broken) return broken;
      }
      if (run.strayed === undefined) search.learn(plan, run);
    }
    if (stopped) search.putBack();
    else if (search.beyond && most > 0) {
      const found = await this.#atRandom(level, until);
      if ("run" in found) return found;
      ({ random } = found);
    }
    const unseen = this.#stage.unseen ?? new Set<string>();
    uncertain ||= slept.size > 0 || patient.size > 0 || unseen.size > 0;
    const exhausted = !stopped && !search.beyond;
    const { all, pairs } = search.complete;
    const coverage: Coverage = uncertain
      ? { runs: this.#runs - runs }
      : exhausted
        ? "exhaustive"
        : all < 1 && pairs > all
          ? { pairs }
          : all < 0
            ? { runs: this.#runs - runs }
            : { bounded: all };
    this.#refuse(this.#tooLittle(coverage, exhausted ? Infinity : Math.max(all, pairs), this.#runs - runs));
    return {
      coverage,
      random,
      slept: this.#called(slept),
      patient: this.#called(patient),
      unseen: [...unseen],
    };
  }

  /**
   * Whoever has a lock of a session while its connection is back in the pool: another one begins just then, and gets that
   * connection, for which the lock is its own.
   */
  async #lent(serial: ExploreRun): Promise<{ run: ExploreRun; error: unknown } | undefined> {
    if (!this.#stage.answered) return undefined;
    let left: { run: ExploreRun; error: unknown } | undefined;
    for (const [a] of this.#names.entries())
      for (const own of holdsBetween(serial, a))
        for (const [b] of this.#names.entries()) {
          if (a === b) continue;
          const order = [...Array.from({ length: own + 1 }, () => a), b];
          const run = await this.#inTime(() =>
            this.#try({ order, victim: undefined, late: { actor: b, after: own }, lenient: true }),
          );
          if (!run) return left;
          const error = await this.#judge(run);
          await this.#stage.unlock?.();
          if (error !== undefined) return { run, error };
          if (!notGivenBack(serial)) left ??= leftBehind(run);
        }
    return left;
  }

  /** Each fault at each moment, one in a run. */
  async #faults(serial: ExploreRun, until: number): Promise<{ run: ExploreRun; error: unknown } | undefined> {
    const { faults = [] } = this.#scenario;
    for (const plan of faultPlans(faults, serial, this.#names.length)) {
      if (performance.now() > until) this.#refuse("there was no time for all faults: give `maxMs` more");
      const run = await this.#inTime(() => this.#try({ ...plan, victim: undefined, lenient: true }));
      if (!run) return this.#refuse("there was no time for all faults: give `maxMs` more") as undefined;
      this.#faulted++;
      const error = await this.#judge(run);
      if (error !== undefined) return { run, error };
    }
    return undefined;
  }

  /** After a change of the code it may not be possible any more: then that is the answer, whatever else comes of it. */
  async #replay(plan: ExplorePlan): Promise<Omit<Level, "runs"> | { run: ExploreRun; error: unknown }> {
    for (let again = 0; ; again++) {
      const run = await this.#awake(plan);
      // Where the server decides whom it ends, it may take some trying; and so may a connection that is opened anew.
      if ((run.diverted || run.strayed) && again < 2) {
        this.#runs--;
        continue;
      }
      const error = await this.#judge(run);
      if (plan.late) await this.#stage.unlock?.();
      if (error !== undefined) return { run, error };
      const left = plan.late && leftBehind(run);
      if (left) return left;
      const level = { coverage: { runs: 1 }, random: 0, slept: [], patient: [], unseen: [] };
      return run.strayed === undefined ? level : { ...level, impossible: run.strayed };
    }
  }

  #tooLittle(coverage: Coverage, reached: number, runs: number): string | undefined {
    const { minCoverage, preemptions: most = 3, maxMs = defaultMs } = this.#scenario;
    const enough =
      minCoverage === 0 ||
      (minCoverage === undefined
        ? reached >= Math.min(1, most)
        : worth(coverage) >= (minCoverage === "exhaustive" ? Infinity : minCoverage));
    if (enough) return undefined;
    const ms = Math.max(maxMs, leastMs);
    const wanted =
      minCoverage === undefined
        ? "one switch between each two actors were tried"
        : minCoverage === "exhaustive"
          ? "any number of switches were tried, or it is not known whether they were"
          : `up to ${minCoverage} switches were tried, or it is not known whether they were`;
    return `after ${runs} runs in ${ms} ms not all orders with ${wanted} (${coverageText(coverage)}). It says nothing yet: give \`maxMs\` more, or take fewer actors or statements.${this.#cut === undefined ? "" : ` When the time was over: ${this.#cut}.`}`;
  }

  #progress(isolation: Isolation | undefined, queued: number, preemptions: number | undefined): void {
    this.#scenario.onProgress?.({ isolation, runs: this.#runs, queued, preemptions, ms: this.#ms });
  }

  /** Undefined: the time was over in the middle of it. One that had time enough is told, since something is in its way. */
  async #inTime<T>(work: () => Promise<T>): Promise<T | undefined> {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof TimeOver)) throw error;
      if (error.ms > leastMs / 2) this.#refuse(`a run did not end in time: ${error.message}`);
      this.#cut = error.message;
      return undefined;
    }
  }

  #called(actors: Iterable<number>): string[] {
    return [...actors].map((index) => this.#names[index] ?? "");
  }

  async #atRandom(
    level: Isolation | undefined,
    until: number,
  ): Promise<{ random: number } | { run: ExploreRun; error: unknown }> {
    const random = randomOf(this.#seed);
    let tried = 0;
    while (performance.now() < until) {
      this.#progress(level, 0, undefined);
      const pick = (enabled: readonly number[]) => enabled[Math.floor(random() * enabled.length)] as number;
      const found = await this.#inTime(() => this.#once({ order: [], victim: undefined, pick }));
      if (!found) break;
      tried++;
      if (found.error !== undefined) return this.#smaller(found.run, found.error);
    }
    return { random: tried };
  }

  /** The same failure with fewer switches, if there is one near. */
  async #smaller(run: ExploreRun, error: unknown): Promise<{ run: ExploreRun; error: unknown }> {
    let best = { run, error };
    const until = Math.min(performance.now() + 2000, this.#limits.until);
    for (let better = true; better && performance.now() < until;) {
      better = false;
      for (const order of merged(best.run.choices.map(({ chosen }) => chosen))) {
        if (performance.now() > until) break;
        const next = await this.#inTime(() => this.#once({ order, victim: undefined, lenient: true }));
        if (!next) return best;
        if (next.error === undefined || switches(next.run) >= switches(best.run)) continue;
        best = { run: next.run, error: next.error };
        better = true;
        break;
      }
    }
    return best;
  }

  async #once(
    plan: ExplorePlan,
    search?: ScheduleSearch,
  ): Promise<{ run: ExploreRun; error?: unknown; strange?: string }> {
    for (let again = 0; ; again++) {
      const run = await this.#awake(plan);
      // Where the server decides whom it ends, it may take some trying.
      if (run.diverted && again < 4) continue;
      const found =
        run.strayed === undefined ? search?.strange(run, this.#names) : { what: run.strayed, same: true };
      const strange = found?.what;
      // A connection that the pool opened anew says more than one that was there before: twice is a habit.
      if (strange !== undefined && again < 2) continue;
      // Left out too much, or judged by what is read besides: then it is not the caller's.
      const ours = this.#stage.certified || found?.same === false;
      if (strange !== undefined && !ours)
        throw new UsageError(
          `explore "${this.#name}": the same order came out differently: ${strange}. Something else than the order of statements decides: a timer, a random number, a cache, work left over from the last run.`,
        );
      this.#seen.add(run);
      const error = await this.#judge(run);
      return {
        run,
        ...(strange === undefined ? {} : { strange }),
        ...(error === undefined ? {} : { error }),
      };
    }
  }

  /** A machine that stands still for a moment looks like an actor that does: thrice is a habit. */
  async #awake(plan: ExplorePlan): Promise<ExploreRun> {
    for (let again = 0; ; again++) {
      const run = await this.#try(plan);
      const asleep = [...run.slept];
      if (again < 2 && asleep.some((actor) => !this.#sleepers.has(actor))) {
        // Nobody learns anything of it.
        this.#runs--;
        continue;
      }
      for (const actor of asleep) this.#sleepers.add(actor);
      return run;
    }
  }

  async #try(plan: ExplorePlan): Promise<ExploreRun> {
    await ends(this.#scenario.reset(), "the reset", this.#left);
    const run = await this.#perform(plan);
    this.#runs++;
    return run;
  }

  /** What the invariant says against it. */
  async #judge(run: ExploreRun): Promise<unknown> {
    try {
      const results = Object.fromEntries(this.#names.map((each, i) => [each, run.results[i]])) as Results;
      const judge = async () => this.#scenario.invariant(results);
      const said = await ends(this.#stage.judge?.(judge) ?? judge(), "the invariant", this.#left);
      return said === false ? new Error("the invariant returned false") : undefined;
    } catch (error) {
      return error ?? new Error("the invariant threw nothing");
    }
  }
}

/** Nothing is wrong with the data yet; but whoever wants that lock next waits for ever. */
function leftBehind(run: ExploreRun): { run: ExploreRun; error: Error } | undefined {
  return notGivenBack(run)
    ? { run, error: new Error("a lock of a session was not given back, and stays") }
    : undefined;
}

const switches = ({ choices }: ExploreRun) => choices.at(-1)?.preemptions ?? 0;

export interface ExpectOptions {
  readonly name?: string;
  /** Is told what was tried if there is no race; by default it is logged. */
  readonly report?: (text: string) => void;
}

/** Throws, with the schedule, if the actors can get in each other's way. */
export function expectNoRace(scenario: Scenario & ExpectOptions): Promise<Exploration>;
/** The same with actors in threads of their own. */
export function expectNoRace(scenario: ThreadScenario & ExpectOptions): Promise<Exploration>;
/** Two or more functions that run at the same time, and what must hold after them. */
export function expectNoRace(
  db: Scenario["db"],
  actors: readonly (() => Promise<unknown>)[],
  invariant: Invariant,
  options?: ExploreOptions & ExpectOptions,
): Promise<Exploration>;
export async function expectNoRace(
  first: ((Scenario | ThreadScenario) & ExpectOptions) | Scenario["db"],
  actors?: readonly (() => Promise<unknown>)[],
  invariant?: Invariant,
  options?: ExploreOptions & ExpectOptions,
): Promise<Exploration> {
  const scenario: (Scenario | ThreadScenario) & ExpectOptions =
    actors && invariant
      ? {
          ...options,
          db: first as Scenario["db"],
          actors: Object.fromEntries(actors.map((each, i) => [String.fromCharCode(65 + i), each])),
          invariant,
        }
      : (first as (Scenario | ThreadScenario) & ExpectOptions);
  const report = await explore(scenario.name ?? titleOf(scenario.actors), scenario as Scenario);
  if (!report.ok) throw new RaceError(report);
  // oxlint-disable-next-line no-console -- what was tried is to be seen, since green alone does not say it.
  (scenario.report ?? console.info)(report.text);
  return report;
}

function titleOf(actors: (Scenario | ThreadScenario)["actors"]): string {
  return Object.entries<{ readonly name: string }>(actors)
    .map(([name, { name: called }]) => called || name)
    .join(" and ");
}
