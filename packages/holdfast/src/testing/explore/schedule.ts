/** One run of the actors, in an order that is chosen step by step. */
import { UsageError } from "../../seam/errors.ts";
import { comesWithin } from "../../waiting/wait.ts";
import { Actor, type ActorStage, type ActorStep } from "./actor.ts";
import type { Fault, PlannedFault } from "./faults.ts";
import { footprint, sameLabel } from "./statement.ts";

export interface Choice {
  /** Who could have had the turn, and with what. */
  readonly enabled: ReadonlyMap<number, ActorStep>;
  readonly chosen: number;
  /** What was sent. */
  readonly step: ActorStep;
  /** Switches away from an actor that could have gone on, up to and with this one. */
  readonly preemptions: number;
  /** Whoever had the last turn has ended, and is called again: to let somebody else go on is no switch. */
  readonly anew?: boolean;
}

export interface Deadlock {
  /** After so many choices. */
  readonly at: number;
  readonly among: readonly number[];
  readonly victim: number | undefined;
}

export interface ExploreRun {
  readonly choices: readonly Choice[];
  readonly results: readonly PromiseSettledResult<unknown>[];
  readonly deadlocks: readonly Deadlock[];
  /** Actors that waited for something that is not a statement. */
  readonly slept: ReadonlySet<number>;
  /** Actors that tried again what was refused: they had the turn for it when somebody else had ended something. */
  readonly patient: ReadonlySet<number>;
  /** Pairs that were at work at the same time, as "0,1". */
  readonly together: ReadonlySet<string>;
  /** In a deadlock another one was ended than was planned, and what followed is another run. */
  readonly diverted: boolean;
  /** What befell an actor, if it came to that. */
  readonly fault: Fault | undefined;
  /** Who began late, and after which choice. */
  readonly late: ExplorePlan["late"];
  /** The order did not come out as planned: something else than the schedule decides. */
  readonly strayed: string | undefined;
}

export interface ExplorePlan {
  readonly order: readonly number[];
  /** What is sent in each turn, without values; absent in a plan that people gave. */
  readonly labels?: readonly string[];
  readonly victim: number | undefined;
  /** After the plan: who is next? By default whoever had the last turn. */
  readonly pick?: (enabled: readonly number[]) => number;
  readonly fault?: PlannedFault | undefined;
  /**
   * One that begins as soon as the answer to this choice is heard, before whoever it was for goes on: a pool that has just got a
   * connection back lends that one to it.
   */
  readonly late?: { readonly actor: number; readonly after: number } | undefined;
  /** Who is called before the others. By default in their order. */
  readonly first?: number | undefined;
  /** Somebody has waited for a lock in the run that it was learned from. */
  readonly waited?: boolean;
  /** A turn that cannot be taken is left out. */
  readonly lenient?: boolean;
}

/** A statement that is not answered by then is looked for among those that wait. */
const graceMs = 2;
/** An actor that does nothing for so long, while others could go on, waits for one of them in this process. */
const napMs = 60;
/** An actor that tries again what was refused waits so long for one that does nothing, and may be about to make way. */
const makeWayMs = 250;
/** Whoever waits for a lease looks for it at least as often. */
const outlastMs = 1000;
/** Whoever was refused so often goes on alone in orders at random. */
const enoughRefusals = 3;
/** So often it asks for the same, of one that stands still and whose leases have run out, before that one goes on. */
const insistence = 3;
/** A lock of a session that is no actor's may be a matter of moments. */
const outsideMs = 1000;

export interface Limits {
  /** For an actor that neither sends anything nor ends, and for a statement that is not answered. */
  readonly idleMs: number;
  /** Of `performance.now()`. */
  readonly until: number;
}

/** It is over before the run is. */
export class TimeOver extends Error {
  /** How long nothing had happened by then. */
  readonly ms: number;

  constructor(message: string, ms: number) {
    super(message);
    this.name = "TimeOver";
    this.ms = ms;
  }
}

export function perform(
  stage: ActorStage,
  names: readonly string[],
  plan: ExplorePlan,
  limits: Limits,
): Promise<ExploreRun> {
  return new Play(stage, names, plan, limits).run();
}

class Play {
  readonly #stage: ActorStage;
  readonly #plan: ExplorePlan;
  /** By their indexes. */
  readonly #cast: Actor[];
  readonly #started: Actor[] = [];
  readonly #choices: Choice[] = [];
  readonly #deadlocks: Deadlock[] = [];
  /** Statements that were ended by these. */
  readonly #ended = new Set<ActorStep>();
  /** Whose statements were not answered when the last one was sent, with that one's. */
  #unanswered: readonly number[] = [];
  readonly #slept = new Set<number>();
  readonly #patient = new Set<number>();
  readonly #together = new Set<string>();
  readonly #limits: Limits;
  /** When something happened last. */
  #moved = performance.now();
  /** The fault that has happened. */
  #befell: Fault | undefined;
  /** Called again, and has had no turn since. */
  #anew: number | undefined;
  #calledAgain = false;
  #paused = false;
  /** Since which choice its leases have run out. */
  #expired: number | undefined;
  /** What has to be over before anybody goes on. */
  #until: Promise<unknown> | undefined;
  #strayed: string | undefined;
  #diverted = false;
  #wake = Promise.withResolvers<void>();

  constructor(stage: ActorStage, names: readonly string[], plan: ExplorePlan, limits: Limits) {
    this.#stage = stage;
    this.#limits = limits;
    this.#plan = plan;
    this.#cast = names.map((name, index) => new Actor(index, name));
    stage.changed = () => {
      this.#moved = performance.now();
      this.#wake.resolve();
      this.#wake = Promise.withResolvers<void>();
    };
  }

  async run(): Promise<ExploreRun> {
    this.#stage.open(this.#plan.victim);
    let ended = false;
    try {
      const { late, first } = this.#plan;
      for (const actor of this.#cast.toSorted(
        (a, b) => Number(b.index === first) - Number(a.index === first),
      )) {
        if (actor.index === late?.actor) continue;
        this.#start(actor);
        // One after the other: some clients send what is asked for in one tick as one statement, whoever asks for it.
        await this.#settle();
      }
      for (;;) {
        await this.#settle();
        this.#deadlockPassed();
        if (this.#until) {
          await this.#until;
          this.#until = undefined;
          continue;
        }
        if (this.#delivered()) continue;
        if (this.#started.every(({ done }) => done)) {
          const late = this.#cast.find((actor) => !this.#started.includes(actor));
          if (!late) break;
          this.#start(late);
          continue;
        }
        await this.#next();
      }
      ended = true;
    } finally {
      for (const actor of this.#cast) actor.over = true;
      this.#stage.close();
      if (!ended) await this.#stage.clear?.(this.#started);
    }
    return {
      choices: this.#choices,
      results: this.#cast.map(({ result }) => result as PromiseSettledResult<unknown>),
      deadlocks: this.#deadlocks,
      slept: this.#slept,
      patient: this.#patient,
      together: this.#together,
      late: this.#plan.late,
      fault: this.#befell,
      diverted: this.#diverted,
      strayed: this.#strayed,
    };
  }

  #start(actor: Actor): void {
    this.#started.push(actor);
    this.#stage.start(actor);
  }

  /** It, from the beginning: as another process would. */
  #again(actor: Actor): void {
    this.#calledAgain = true;
    this.#anew = actor.index;
    const next = new Actor(actor.index, actor.name);
    this.#cast[actor.index] = next;
    this.#started.splice(this.#started.indexOf(actor), 1);
    this.#start(next);
  }

  /** Whether somebody who has ended is called again. */
  #delivered(): boolean {
    const { fault } = this.#plan;
    const actor = fault && this.#cast[fault.actor];
    if (!fault || !actor?.done || this.#calledAgain) return false;
    const wanted =
      fault.kind === "twice" ||
      // Whoever called it was told that it failed.
      (fault.kind === "lost commit" && this.#befell && actor.result?.status === "rejected");
    if (!wanted) return false;
    this.#befell ??= { ...fault, after: this.#choices.findLastIndex(({ chosen }) => chosen === actor.index) };
    this.#again(actor);
    return true;
  }

  #befalls(fault: PlannedFault, actor: Actor, step: ActorStep): void {
    const stage = this.#stage;
    const { kind } = fault;
    const befell = { ...fault, after: this.#choices.length - 1 };
    if (kind === "lost commit") {
      this.#befell = befell;
      stage.lose?.(step);
    } else if (kind !== "twice")
      stage.answered?.(step, () => {
        this.#befell = befell;
        if (kind === "pause") this.#paused = true;
        else
          this.#until =
            kind === "crash" ? stage.crash?.(actor).then(() => this.#again(actor)) : stage.expire?.();
      });
  }

  /** Somebody stands still, and the others have ended, or wait for it: its leases run out, which may be what they wait for. */
  async #outlast(others: readonly Actor[]): Promise<void> {
    if (this.#expired === undefined) {
      await this.#stage.expire?.();
      this.#expired = this.#choices.length;
      return;
    }
    // Whoever waits for a lock of the one that stands still, or would be refused once more, waits for it to go on; others may
    // sleep, and ask again.
    const asking = others.some(({ done, blocked, held }) => !done && !blocked && held.length === 0);
    if (asking && (await this.#change(outlastMs))) return;
    this.#paused = false;
  }

  async #next(): Promise<void> {
    let able = this.#cast.filter(({ next }) => next);
    if (this.#paused) {
      const others = this.#cast.filter(({ index }) => index !== this.#plan.fault?.actor);
      const ready = others.filter(({ next }) => next);
      if (ready.length === 0) return this.#outlast(others);
      if (ready.every((actor) => this.#asksForEver(actor))) this.#paused = false;
      else able = ready;
    }
    if (able.length === 0) return this.#deadlocked();
    if (this.#plan.pick) able = this.#fairly(able);
    const first = able.filter((actor) => !this.#triesAgain(actor));
    for (const { index } of able) if (first.every((each) => each.index !== index)) this.#patient.add(index);
    if (first.length > 0) return this.#turn(first);
    if (this.#cast.some(({ asleep }) => asleep) && (await this.#change(makeWayMs))) return;
    return this.#turn(able);
  }

  /**
   * Two that try again could refuse each other until both give up: it takes a random order long enough to do that, and nobody meets
   * it. So the one that was refused most often, and too often, goes on until its transaction is through.
   */
  #fairly(able: readonly Actor[]): Actor[] {
    const refusals = (actor: Actor) => {
      const own = this.#choices.filter(({ chosen }) => chosen === actor.index).map(({ step }) => step);
      const through = own.findLastIndex((step) => !step.error && footprint(step.text).kind === "commit");
      return own.slice(through + 1).filter(({ error }) => error !== undefined).length;
    };
    const counts = able.map(refusals);
    const most = Math.max(...counts);
    return most < enoughRefusals ? [...able] : [able[counts.indexOf(most)] as Actor];
  }

  /** What it asks for is not given although leases have run out: a transaction of the one that stands still keeps it. */
  #asksForEver({ index, next }: Actor): boolean {
    if (this.#expired === undefined) return false;
    const since = this.#choices.slice(this.#expired);
    const same = since.filter(({ chosen, step }) => chosen === index && step.text === next?.step.text);
    return same.length >= insistence;
  }

  /**
   * It is about to send what was refused before, and nobody else has ended anything since: it would be refused again. Others
   * come first then, as they would while it pauses: else whoever tries a few times would use them all up.
   */
  #triesAgain({ index, next }: Actor): boolean {
    if (this.#stage.fair) return false;
    const text = next?.step.text;
    let times = 0;
    let enough = 1;
    for (const { chosen, step } of this.#choices.toReversed()) {
      if (chosen !== index) {
        const { kind, any } = footprint(step.text);
        if (step.implicit || any || ends.has(kind)) break;
        continue;
      }
      // What was done each time is a loop, and not a retry.
      if (done(step)) break;
      if (step.text === text) {
        times++;
        if (!refused(step)) enough = 2;
      } else if (step.error === undefined && footprint(step.text).writes.size > 0 && !refused(step)) break;
    }
    return times >= enough && !this.#answersDiffer(index, text, times);
  }

  #answersDiffer(index: number, text: string | undefined, times: number): boolean {
    const same = this.#choices.filter(({ chosen, step }) => chosen === index && step.text === text);
    return new Set(same.slice(-times).map(({ step }) => JSON.stringify([step.rows, step.error]))).size > 1;
  }

  async #turn(enabled: readonly Actor[]): Promise<void> {
    const indexes = enabled.map(({ index }) => index);
    const last = this.#choices.at(-1);
    const planned = await this.#planned(indexes);
    if (planned === "again") return;
    for (const a of indexes) for (const b of indexes) if (a < b) this.#together.add(`${a},${b}`);
    // Who was at it last, and so goes on where somebody else came in between.
    const goOn = this.#choices.findLast(({ chosen }) => indexes.includes(chosen))?.chosen ?? indexes[0];
    const chosen = (planned ?? this.#plan.pick?.(indexes) ?? goOn) as number;
    const anew = last?.chosen === this.#anew;
    const switched = last && chosen !== last.chosen && indexes.includes(last.chosen) && !anew;
    if (chosen === this.#anew) this.#anew = undefined;
    const actor = this.#cast[chosen] as Actor;
    const held = actor.next as NonNullable<Actor["next"]>;
    const label = this.#plan.labels?.[this.#choices.length];
    if (label !== undefined && !this.#diverted && !sameLabel(label, held.step.label))
      this.#strayed ??= `as step ${this.#choices.length + 1}, ${actor.name} sent "${held.step.label}" in place of "${label}"`;
    this.#choices.push({
      enabled: new Map(
        enabled.map((each) => [each.index, (each.next as NonNullable<Actor["next"]>).step] as const),
      ),
      chosen,
      step: held.step,
      preemptions: (last?.preemptions ?? 0) + (switched ? 1 : 0),
      anew,
    });
    const { late: begins, fault } = this.#plan;
    const nth = this.#choices.filter((choice) => choice.chosen === chosen).length - 1;
    if (fault && fault.actor === chosen && fault.nth === nth) this.#befalls(fault, actor, held.step);
    const next = begins && begins.after === this.#choices.length - 1 ? this.#cast[begins.actor] : undefined;
    if (next)
      this.#stage.answered?.(held.step, () => {
        if (!this.#started.includes(next)) this.#start(next);
      });
    actor.held.splice(actor.held.indexOf(held), 1);
    actor.sent.add(held.step);
    this.#unanswered = this.#cast.filter(({ sent }) => sent.size > 0).map(({ index }) => index);
    // What it takes to send it is bounded as well: if it does not end, the statement is one that is not answered.
    await comesWithin(this.#limits.idleMs, Promise.resolve(held.send()));
  }

  /** Whose turn was planned, if it can be taken. */
  async #planned(enabled: readonly number[]): Promise<number | "again" | undefined> {
    const planned = this.#diverted ? undefined : this.#plan.order[this.#choices.length];
    if (planned === undefined || enabled.includes(planned)) return planned;
    const actor = this.#cast[planned];
    if (actor?.asleep && (await this.#change(this.#limits.idleMs))) return "again";
    if (!this.#plan.lenient)
      this.#strayed ??= `step ${this.#choices.length + 1} was to be ${actor?.name ?? "nobody"}'s, which ${actor ? this.#instead(actor) : "is not there"}`;
    return undefined;
  }

  #instead(actor: Actor): string {
    const others = [...actor.sent].flatMap(({ waitedFor }) => [...waitedFor]);
    if (actor.blocked && others.length > 0)
      return `now waits for ${[...new Set(others)].map((other) => this.#cast[other]?.name ?? "").join(", ")}`;
    return actor.result ? "has ended before" : "had nothing to send";
  }

  /** Until everybody is held back, done, asleep, or waits for one of the others. */
  async #settle(): Promise<void> {
    // Rounds, not the clock: when the whole process stood still, what came meanwhile has not been read yet.
    let waited = 0;
    let flown = 0;
    for (;;) {
      this.#inTime();
      const flying = this.#cast.flatMap(({ sent }) => [...sent].filter(({ blocked }) => !blocked));
      const running = this.#started.filter(
        (actor) => !actor.result && !actor.asleep && actor.held.length === 0 && actor.sent.size === 0,
      );
      if (flying.length + running.length === 0) {
        // What was blocked may have been let go by the last step.
        const blocked = this.#cast.flatMap(({ sent }) => [...sent]);
        if (blocked.length === 0 || (await this.#look(blocked))) return;
        waited = 0;
        continue;
      }
      const from = performance.now();
      if (await this.#change(graceMs)) {
        waited = flown = 0;
        continue;
      }
      const ms = Math.min(performance.now() - from, 2 * graceMs);
      waited += ms;
      if (flying.length > 0) {
        await this.#look(flying);
        await this.#fly(flying, (flown += ms));
        waited = 0;
      } else await this.#doze(running, waited);
    }
  }

  #inTime(): void {
    if (performance.now() > this.#limits.until)
      throw new TimeOver(this.#state(), performance.now() - this.#moved);
  }

  /** Not answered, and no actor is in the way. */
  async #fly(flying: readonly ActorStep[], ms: number): Promise<void> {
    const late = flying.find(({ outside }) => outside && performance.now() - outside.since > outsideMs);
    if (late?.outside) {
      const who = await this.#stage.describe?.(late.outside.sessions);
      const named = who?.length ? who.join("; and for ") : `session ${late.outside.sessions.join(", ")}`;
      throw new UsageError(
        `${this.#nameOf(late)} waits for a lock that no actor has: "${short(late.text)}" waits for ${named}. End that transaction, or use a database of its own.`,
      );
    }
    if (ms > this.#limits.idleMs)
      throw new UsageError(
        `${this.#state()}. A statement is not answered for ${seconds(this.#limits.idleMs)}; if it takes so long by itself, give \`maxMs\` more.`,
      );
  }

  #nameOf(step: ActorStep): string {
    return this.#cast[step.actor]?.name ?? "";
  }

  /** What everybody does, for people. */
  #state(): string {
    const texts = this.#cast.flatMap((actor) => {
      if (actor.done) return [];
      const [sent] = actor.sent;
      const others = [...(sent?.waitedFor ?? [])].map((other) => this.#cast[other]?.name ?? "");
      if (sent)
        return [
          `${actor.name} waits for ${sent.blocked && others.length > 0 ? others.join(", ") : "the answer"} to "${short(sent.text)}"`,
        ];
      if (actor.held[0]) return [`${actor.name} is about to send "${short(actor.held[0].step.text)}"`];
      return [`${actor.name} waits for something that is not a statement`];
    });
    return texts.length > 0 ? texts.join("; ") : "the actors are at work";
  }

  async #doze(running: readonly Actor[], ms: number): Promise<void> {
    const wake = this.#wake;
    if (ms > napMs) await this.#stage.caughtUp?.();
    if (wake !== this.#wake) return;
    if (ms > napMs && (this.#cast.some(({ next }) => next) || this.#started.length < this.#cast.length))
      for (const actor of running) {
        actor.asleep = true;
        this.#slept.add(actor.index);
      }
    else if (ms > this.#limits.idleMs) throw new UsageError(this.#idle(running));
  }

  #idle(actors: readonly Actor[]): string {
    const names = actors.map(({ name }) => name).join(", ");
    return `${names} neither sends a statement nor ends for ${seconds(this.#limits.idleMs)}: it waits for something that is not a statement (a timer, another service, a pool that has no connection left)`;
  }

  /** Marks those that wait for another actor. Resolves to whether all of these do. */
  async #look(steps: readonly ActorStep[]): Promise<boolean> {
    const found = await this.#stage.waiting(steps);
    let all = true;
    for (const step of steps) {
      // It may have been answered meanwhile.
      if (!this.#cast[step.actor]?.sent.has(step)) {
        all = false;
        continue;
      }
      const { actors = [], outside = [] } = found.get(step) ?? {};
      step.blocked = actors.length > 0;
      step.outside =
        actors.length === 0 && outside.length > 0
          ? { since: step.outside?.since ?? performance.now(), sessions: outside }
          : undefined;
      for (const other of actors) if (other !== step.actor) step.waitedFor.add(other);
      all &&= step.blocked;
    }
    return all;
  }

  /** Nobody can go on: those that are left wait for each other, and one of them is ended. */
  async #deadlocked(): Promise<void> {
    const asleep = this.#cast.filter((actor) => actor.asleep);
    if (asleep.length > 0) {
      // Not yet: somebody may still wake.
      for (const actor of asleep) actor.asleep = false;
      return;
    }
    const waiting = this.#cast.filter(({ blocked }) => blocked);
    const steps = waiting.flatMap(({ sent }) => [...sent]);
    const change = this.#change(this.#limits.idleMs);
    const chosen = this.#stage.stuck?.(waiting, this.#plan.victim) ?? false;
    if (!(await change)) {
      this.#inTime();
      throw new UsageError(
        `${this.#state()}: nobody can go on, and the server ends none of them. Is a session of an actor in the way of another session of the same actor?`,
      );
    }
    const ended = steps.find((step) => step.error !== undefined);
    // Else it was something else that has changed: the server takes its time.
    if (ended || chosen)
      this.#noteDeadlock(
        waiting.map(({ index }) => index),
        ended,
      );
  }

  /** The server has ended it while we were still looking who waits for whom. */
  #deadlockPassed(): void {
    for (const { step } of this.#choices)
      if (step.deadlock && !this.#ended.has(step)) this.#noteDeadlock(this.#unanswered, step);
  }

  #noteDeadlock(among: readonly number[], ended: ActorStep | undefined): void {
    if (ended) this.#ended.add(ended);
    const victim = ended?.actor;
    if (this.#plan.victim !== undefined && victim !== this.#plan.victim && !this.#plan.lenient)
      this.#diverted = true;
    this.#deadlocks.push({ at: this.#choices.length, among, victim });
  }

  /** Whether something changes within this time. */
  async #change(ms: number): Promise<boolean> {
    const most = Math.min(ms, this.#limits.until - performance.now() + 1);
    return comesWithin(Math.max(most, 0), this.#wake.promise);
  }
}

const ends: ReadonlySet<string> = new Set(["commit", "rollback", "other"]);

/** It came to nothing. */
function refused({ text, error, rows, affected }: ActorStep): boolean {
  return error !== undefined || (footprint(text).writes.size > 0 && rows.length === 0 && affected === 0);
}

/** It has written something, or called a function that may have: one that says no has not. */
function done(step: ActorStep): boolean {
  if (refused(step)) return false;
  const { kind } = footprint(step.text);
  return (
    kind === "insert" || kind === "write" || (step.acts && !step.rows.flat().some((value) => no.has(value)))
  );
}

const no: ReadonlySet<string> = new Set(["f", "false", "0"]);

const short = (text: string) => text.replaceAll(/\s+/g, " ").trim().slice(0, 120);
const seconds = (ms: number) => `${(ms / 1000).toLocaleString("en", { maximumFractionDigits: 1 })} s`;
