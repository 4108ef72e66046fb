/**
 * Finds the race in a test: runs the caller's own functions at the same time on a real server, holds every statement
 * back, and tries the orders in which they can be sent, those with the fewest switches first.
 */
import { ours } from "../../context/ours.ts";
import type { Connection, Database, Isolation } from "../../seam/database.ts";
import { withConnection } from "../../transaction/one-shot.ts";
import { SchemaMissingError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import type { KeptStatement, Protocol } from "../../seam/protocol-reader.ts";
import type { ActorStage } from "./actor.ts";
import { type EngineTraits, diagnose } from "./anomaly.ts";
import { Equivalence } from "./equivalence.ts";
import { holdsBetween, notGivenBack } from "./evidence.ts";
import { type FaultKind, faultKinds, faultsIn } from "./faults.ts";
import {
  type Coverage,
  type Exploration,
  CoverageError,
  type Level,
  RaceError,
  coverageText,
  doubtsOf,
  failed,
  passed,
  worth,
} from "./report.ts";
import { type Limits, type ExplorePlan, type ExploreRun, TimeOver, perform } from "./schedule.ts";
import { ScheduleSearch, hasWaited, merged, randomOf } from "./search.ts";
import { SeenTable } from "./seen.ts";
import { footprint, learnRoutines, locksRows } from "./statement.ts";
import { SeenTables } from "./seen-tables.ts";
import type { Proxy } from "./proxy.ts";
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
  /** Through which an application in another process has its connections (see `proxied`), where actors are requests to it. */
  readonly proxy?: Proxy;
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
export interface ThreadScenario extends Omit<ExploreOptions, "reset" | "isolation" | "proxy"> {
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
/** So often in a row the server has not forgotten them: somebody keeps it from that. */
const enoughUnsettled = 3;
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
  proxy,
}: Pick<ExploreOptions, "minCoverage" | "maxMs" | "faults" | "proxy">): void {
  const unknown = faults.find((each) => !faultKinds.includes(each));
  if (unknown !== undefined)
    throw new UsageError(
      `explore: there is no fault ${JSON.stringify(unknown)}; there are ${faultKinds.map((kind) => `"${kind}"`).join(", ")}`,
    );
  if (proxy && faults.includes("crash"))
    throw new UsageError(
      'explore: an application that is reached through a proxy cannot be made to crash; "lost commit" ends its connection',
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
      const all = await leases.list(connection, {}).catch((error: unknown) => {
        // Without our tables nobody has a lease.
        if (error instanceof SchemaMissingError) return [];
        throw error;
      });
      for (const lease of all) await leases.release(connection, lease, 0);
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
    const effects = await onServerOnce((connection) => protocol.effects(connection));
    const known = await onServerOnce((connection) => protocol.related(connection));
    learnRoutines(
      await onServerOnce(async (connection) => (await protocol.routines?.(connection)) ?? new Map()),
    );
    const { lateSnapshot = false } = protocol;
    const tables = new SeenTables(effects, known, { lateSnapshot });
    const reaching = effects.filter(({ kind }) => ["acts", "acts when read", "decides"].includes(kind));
    const related = [...known, ...reaching.map(({ table }) => [table, "*"])];
    const server: Server = {
      protocol,
      tables,
      writers: await onServerOnce((connection) => protocol.autocommit.writers(connection)),
      waiting: (sessions) => onServerOnce((connection) => protocol.waiting(connection, sessions)),
      describe: (sessions) => onServerOnce((connection) => protocol.describe(connection, sessions)),
      cancel: (sessions) => onServerOnce((connection) => protocol.cancel(connection, sessions)),
      ...(protocol.settle && {
        settle: () => onServerOnce(async (connection) => (await protocol.settle?.(connection)) ?? false),
      }),
      ...(expire && { expire: () => onServerOnce(expire) }),
      marked: (mark) => onServerOnce(async (connection) => protocol.autocommit.marked?.(connection, mark)),
    };
    const work = names.map((each) => scenario.actors[each] as () => Promise<unknown>);
    const sockets = new Sockets(server, work, scenario.proxy);
    const exploring = async (reset: () => Promise<unknown>) => {
      const explorer = new Explorer(name, { ...scenario, reset }, names, sockets, {
        equivalence: new Equivalence(scenario.prune === false ? undefined : related, {
          lateSnapshot,
          times: tables,
        }),
        ...(lateSnapshot && { lateSnapshot }),
      });
      try {
        return await explorer.levels((level) => {
          sockets.level = level;
          tables.runsAt(level ?? "");
        });
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
  readonly #engine: { readonly equivalence: Equivalence } & EngineTraits;
  #begun = performance.now();
  readonly #limits: Limits;
  readonly #seed: number;
  readonly #seen: SeenTable;
  #runs = 0;
  /** Some actor's calls may be sent with those of another one. */
  #borrows = false;
  /** Of these, with a fault. */
  #faulted = 0;
  /** What everybody did when the time was over in the middle of a run. */
  #cut: string | undefined;
  /** Before each run the server forgets deleted rows, since somebody locks what is not there; what that has come to. */
  #settles = false;
  #unsettled = 0;
  /** Actors that have done nothing for a while, again and again. */
  readonly #sleepers = new Set<number>();

  constructor(
    name: string,
    scenario: ExploreOptions & { reset: () => Promise<unknown>; invariant: Invariant },
    names: readonly string[],
    stage: ActorStage,
    engine: { readonly equivalence: Equivalence } & EngineTraits,
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
    // What was asked for after the others may have been sent together with theirs.
    const silent = warm && replay === undefined ? this.#seen.silent : [];
    this.#borrows = silent.length > 0;
    for (const first of silent) {
      await ends(this.#scenario.reset(), "the reset", this.#left);
      const run = await this.#inTime(() => this.#perform({ order: [], victim: undefined, first }));
      if (run) this.#seen.add(run);
    }
    this.#begun = performance.now();
    for (const [i, level] of wanted.entries()) {
      set(level);
      const runs = this.#runs;
      const until = Math.min(this.#begun + (maxMs * (i + 1)) / wanted.length, this.#limits.until);
      let found = await this.#level(level, until);
      // A connection that took its time to open kept them apart; now it is there.
      if (replay === undefined && !("run" in found) && this.#seen.nothing() !== undefined)
        found = await this.#level(level, until);
      if ("run" in found) {
        const diagnosis = diagnose(found.run, level, this.#engine);
        // What was not seen was not brought back either.
        if (diagnosis.kind === "not a race" && this.#seen.silent.length > 0)
          this.#refuse(this.#seen.nothing());
        return failed({
          name: this.#name,
          names: this.#names,
          runs: this.#runs,
          ms: this.#ms,
          levels: done,
          unexplored: replay === undefined ? this.#seen.pairs.unexplored : [],
          isolation: level,
          seed: this.#seed,
          ...found,
          diagnosis,
        });
      }
      done.push({ ...found, runs: this.#runs - runs, ...(level === undefined ? {} : { isolation: level }) });
    }
    if (replay === undefined) this.#refuse(this.#seen.nothing());
    const whole = replay !== undefined || done.every(({ coverage }) => coverage === "exhaustive");
    return passed({
      name: this.#name,
      runs: this.#runs,
      ms: this.#ms,
      levels: done,
      unexplored: whole ? [] : this.#seen.pairs.unexplored,
      seed: this.#seed,
      ...this.#seen.noted,
    });
  }

  #refuse(why: string | undefined): void {
    if (why !== undefined) throw new UsageError(`explore "${this.#name}": ${why}`);
  }

  #refuseLess(why: string | undefined): void {
    if (why !== undefined)
      throw new CoverageError(`explore "${this.#name}": ${why}`, this.#seen.pairs.unexplored);
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
    const { faults = [] } = this.#scenario;
    /** `faulty`: with one fault each; `expected`: those that the first run has shown. */
    const begin = () => ({
      search: new ScheduleSearch(equivalence, most, this.#stage.victims),
      faulty: new Map<string, ScheduleSearch>(),
      expected: new Set<ScheduleSearch>(),
    });
    let { search, faulty, expected } = begin();
    const cheapest = () => [search, ...faulty.values()].reduce((a, b) => (b.cheapest < a.cheapest ? b : a));
    const slept = new Set<number>();
    const patient = new Set<number>();
    /** Which connection a pool in another process lends to whom is that one's business. */
    const lent = new Set<number>();
    // What is tried then is not known to be everything.
    let uncertain = false;
    /** Locks came out differently after the same order. */
    let moved = false;
    let random = 0;
    let stopped = false;
    const runs = this.#runs;
    let { learned } = this.#stage;
    /** What was tried with a fault is not known to be everything. */
    let doubtful = false;
    const before = this.#faulted;
    for (let within = cheapest(), plan = within.next(); plan; within = cheapest(), plan = within.next()) {
      const planned = plan;
      const of = within;
      stopped = performance.now() > until;
      if (!stopped) {
        const queued = [search, ...faulty.values()].reduce((sum, each) => sum + each.queued, 0);
        this.#progress(level, queued, planned.preemptions);
      }
      const found = stopped ? undefined : await this.#inTime(() => this.#once(planned, of));
      stopped = found === undefined;
      if (!found) {
        within.putBack();
        break;
      }
      const { run, error, strange, unsteady } = found;
      if (!planned.fault) {
        for (const each of run.slept) slept.add(each);
        for (const each of run.patient) patient.add(each);
      }
      if (error !== undefined) return { run, error };
      if (this.#stage.learned !== learned) {
        ({ learned } = this.#stage);
        ({ search, faulty, expected } = begin());
        continue;
      }
      // Locks depend on deleted rows: from the beginning, without these.
      if (
        !this.#settles &&
        this.#stage.settle &&
        (strange !== undefined || run.diverted || locksNothing(run))
      ) {
        this.#settles = true;
        ({ search, faulty, expected } = begin());
        continue;
      }
      if (unsteady || (run.diverted && !this.#stage.victims)) moved = true;
      // It was wrong to leave something out: from the beginning, without that.
      const doubted = (strange !== undefined && !unsteady) || (this.#stage.certified ?? false);
      if (doubted && !equivalence.all) {
        equivalence.all = true;
        ({ search, faulty, expected } = begin());
        continue;
      }
      const odd = run.diverted || strange !== undefined;
      if (planned.fault) {
        doubtful ||= odd || run.slept.size > 0 || run.patient.size > 0;
        this.#faulted++;
      } else {
        uncertain ||= odd;
        if (this.#stage.remote)
          for (const index of this.#names.keys()) if (holdsBetween(run, index).length > 0) lent.add(index);
        const broken = planned.order.length === 0 ? await this.#lent(run) : undefined;
        if (broken) return broken;
        for (const fault of faultsIn(faults, run, this.#names.length)) {
          const key = JSON.stringify(fault);
          // Alone, up to there: the others come later.
          const order = Array.from({ length: fault.nth + 1 }, () => fault.actor);
          if (faulty.has(key)) continue;
          const start = { order, fault, victim: undefined, lenient: true };
          const one = new ScheduleSearch(equivalence, most, this.#stage.victims, start);
          faulty.set(key, one);
          if (planned.order.length === 0) expected.add(one);
        }
      }
      if (run.strayed === undefined || planned.lenient) within.learn(planned, run);
    }
    // Those that only other orders have shown are not asked for: what was tried of them is told.
    if ([...expected].some(({ untried }) => untried))
      this.#refuseLess("there was no time for all faults: give `maxMs` more");
    if (!stopped && search.beyond && most > 0) {
      const found = await this.#atRandom(level, until);
      if ("run" in found) return found;
      ({ random } = found);
    }
    const { unseen = new Set<string>(), guessed = new Set<string>() } = this.#stage;
    uncertain ||= [slept, patient, lent, unseen, guessed].some(({ size }) => size > 0);
    const unsettled = moved || this.#unsettled >= enoughUnsettled;
    uncertain ||= unsettled;
    const { reached, coverage: without } = coverageOf([search], uncertain, this.#runs - runs);
    const withFault =
      faulty.size > 0 &&
      coverageOf([...faulty.values()], uncertain || doubtful, this.#faulted - before).coverage;
    const coverage = withFault && worth(withFault) < worth(without) ? withFault : without;
    const doubts = {
      slept: this.#called(slept),
      patient: this.#called(patient),
      unseen: [...unseen],
      ...(unsettled && { unsettled }),
      ...(lent.size > 0 && { lent: this.#called(lent) }),
      ...(guessed.size > 0 && { guessed: [...guessed] }),
    };
    // Else that is why, and more time would not help.
    if (!this.#seen.any || this.#seen.nothing() === undefined)
      this.#refuseLess(this.#tooLittle(coverage, reached, this.#runs - runs, doubtsOf(doubts)));
    return {
      coverage,
      ...(withFault && { faults: { runs: this.#faulted - before, without, coverage: withFault } }),
      random,
      ...doubts,
    };
  }

  /**
   * Whoever has a lock of a session while its connection is back in the pool: another one begins just then, and gets that
   * connection, for which the lock is its own.
   */
  async #lent(serial: ExploreRun): Promise<{ run: ExploreRun; error: unknown } | undefined> {
    if (!this.#stage.answered || this.#stage.remote) return undefined;
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

  #tooLittle(
    coverage: Coverage,
    reached: number,
    runs: number,
    doubts: readonly string[],
  ): string | undefined {
    const { minCoverage, preemptions: most = 3, maxMs = defaultMs } = this.#scenario;
    const ms = Math.max(maxMs, leastMs);
    if (runs === 0)
      return `in ${ms} ms no run came to its end. It says nothing: give \`maxMs\` more.${this.#cut === undefined ? "" : ` When the time was over: ${this.#cut}.`}`;
    const enough =
      minCoverage === 0 ||
      (minCoverage === undefined
        ? reached >= Math.min(1, most)
        : worth(coverage) >= (minCoverage === "exhaustive" ? Infinity : minCoverage));
    if (enough) return undefined;
    const wanted =
      minCoverage === undefined
        ? "one switch between each two actors were tried"
        : minCoverage === "exhaustive"
          ? "any number of switches were tried, or it is not known whether they were"
          : `up to ${minCoverage} switches were tried, or it is not known whether they were`;
    return `after ${runs} runs in ${ms} ms not all orders with ${wanted} (${coverageText(coverage)}${doubts.length > 0 ? `, since ${doubts.join(", and ")}` : ""}). It says nothing yet: give \`maxMs\` more, or take fewer actors or statements.${this.#cut === undefined ? "" : ` When the time was over: ${this.#cut}.`}`;
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

  async #once(plan: ExplorePlan, search?: ScheduleSearch): Promise<OneRun> {
    for (let again = 0; ; again++) {
      const { learned } = this.#stage;
      const run = await this.#awake(plan);
      // Where the server decides whom it ends, it may take some trying.
      if (run.diverted && again < 4) continue;
      const found =
        this.#stage.learned !== learned
          ? undefined
          : run.strayed === undefined
            ? search?.strange(run, this.#names)
            : { what: run.strayed, same: true, waited: plan.waited ?? false };
      const strange = found?.what;
      // A connection that the pool opened anew says more than one that was there before: twice is a habit.
      if (strange !== undefined && again < 2) continue;
      // Something may still be at work of what has ended in the middle.
      if (strange !== undefined && plan.fault) {
        this.#seen.add(run);
        const said = await this.#judge(run);
        return { run, strange, ...(said === undefined ? {} : { error: said }) };
      }
      // Left out too much, judged by what is read besides, or sent by whichever actor is ready first: then it is not the caller's.
      const ours = this.#stage.certified || found?.same === false || this.#borrows;
      const unsteady = strange !== undefined && !ours && this.#isUnsteady(run, found?.waited);
      if (strange !== undefined && !ours && !unsteady)
        throw new UsageError(
          `explore "${this.#name}": the same order came out differently: ${strange}. Something else than the order of statements decides: a timer, a random number, a cache, work left over from the last run.`,
        );
      this.#seen.add(run);
      const error = await this.#judge(run);
      return {
        run,
        ...(strange === undefined ? {} : { strange }),
        ...(unsteady ? { unsteady } : {}),
        ...(error === undefined ? {} : { error }),
      };
    }
  }

  /** Somebody has waited for a lock that nobody waited for before, or the other way round, where that is nobody's fault. */
  #isUnsteady(run: ExploreRun, waited = false): boolean {
    return this.#stage.settle !== undefined && (hasWaited(run) || waited);
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
    if (this.#settles && this.#unsettled < enoughUnsettled)
      this.#unsettled = (await this.#stage.settle?.()) ? 0 : this.#unsettled + 1;
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

/** Of all of these searches, what was tried. */
function coverageOf(
  searches: readonly ScheduleSearch[],
  uncertain: boolean,
  runs: number,
): { readonly reached: number; readonly coverage: Coverage } {
  const exhausted = searches.every(({ cheapest, beyond }) => cheapest === Infinity && !beyond);
  const least = (of: "all" | "pairs") => Math.min(...searches.map(({ complete }) => complete[of]));
  const [all, pairs] = [least("all"), least("pairs")];
  const reached = exhausted ? Infinity : Math.max(all, pairs);
  if (uncertain) return { reached, coverage: { runs } };
  if (exhausted) return { reached, coverage: "exhaustive" };
  if (all < 1 && pairs > all) return { reached, coverage: { pairs } };
  return { reached, coverage: all < 0 ? { runs } : { bounded: all } };
}

/** Nothing is wrong with the data yet; but whoever wants that lock next waits for ever. */
function leftBehind(run: ExploreRun): { run: ExploreRun; error: Error } | undefined {
  return notGivenBack(run)
    ? { run, error: new Error("a lock of a session was not given back, and stays") }
    : undefined;
}

const adds = /\b(?:count|sum|min|max|avg)\s*\(/i;
const none: ReadonlySet<string> = new Set(["0", "", "NULL"]);

/** Somebody locks rows, or would, and there are none: what is locked then depends on which were there before. */
const locksNothing = ({ choices }: ExploreRun): boolean =>
  choices.some(({ step: { text, rows, affected } }) => {
    const { kind } = footprint(text);
    return kind === "read"
      ? locksRows(text) &&
          (rows.length === 0 || (adds.test(text) && rows.flat().every((value) => none.has(value))))
      : kind === "write" && affected === 0;
  });

interface OneRun {
  readonly run: ExploreRun;
  readonly error?: unknown;
  /** Where it came out differently. */
  readonly strange?: string;
  /** That may be because of locks which depend on what the server still has of deleted rows. */
  readonly unsteady?: boolean;
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
