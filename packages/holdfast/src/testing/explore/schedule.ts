/** One run of the actors, in an order that is chosen step by step. */
import { setTimeout as sleep } from "node:timers/promises";
import { Actor, type Stage, type Step } from "./actor.ts";
import { labelOf, sameLabel } from "./statement.ts";

export interface Choice {
  /** Who could have had the turn, and with what. */
  readonly enabled: ReadonlyMap<number, Step>;
  readonly chosen: number;
  /** What was sent. */
  readonly step: Step;
  /** Switches away from an actor that could have gone on, up to and with this one. */
  readonly preemptions: number;
}

export interface Deadlock {
  /** After so many choices. */
  readonly at: number;
  readonly among: readonly number[];
  readonly victim: number | undefined;
}

export interface Run {
  readonly choices: readonly Choice[];
  readonly results: readonly PromiseSettledResult<unknown>[];
  readonly deadlocks: readonly Deadlock[];
  /** Actors that waited for something that is not a statement. */
  readonly slept: ReadonlySet<number>;
  /** In a deadlock another one was ended than was planned, and what followed is another run. */
  readonly diverted: boolean;
  /** The order did not come out as planned: something else than the schedule decides. */
  readonly strayed: string | undefined;
}

export interface Plan {
  readonly order: readonly number[];
  /** What is sent in each turn, without values; absent in a plan that people gave. */
  readonly labels?: readonly string[];
  readonly victim: number | undefined;
  /** After the plan: who is next? By default whoever had the last turn. */
  readonly pick?: (enabled: readonly number[]) => number;
  /** A turn that cannot be taken is left out. */
  readonly lenient?: boolean;
}

/** A statement that is not answered by then is looked for among those that wait. */
const graceMs = 2;
/** An actor that does nothing for so long, while others could go on, waits for one of them in this process. */
const napMs = 60;
/** An actor that neither sends anything nor ends waits for something that we do not see. */
const idleMs = 10_000;

export function perform(stage: Stage, names: readonly string[], plan: Plan): Promise<Run> {
  return new Play(stage, names, plan).run();
}

class Play {
  readonly #stage: Stage;
  readonly #plan: Plan;
  readonly #cast: readonly Actor[];
  readonly #started: Actor[] = [];
  readonly #choices: Choice[] = [];
  readonly #deadlocks: Deadlock[] = [];
  readonly #slept = new Set<number>();
  #strayed: string | undefined;
  #diverted = false;
  #wake = Promise.withResolvers<void>();

  constructor(stage: Stage, names: readonly string[], plan: Plan) {
    this.#stage = stage;
    this.#plan = plan;
    this.#cast = names.map((name, index) => new Actor(index, name));
    stage.changed = () => {
      this.#wake.resolve();
      this.#wake = Promise.withResolvers<void>();
    };
  }

  async run(): Promise<Run> {
    this.#stage.open(this.#plan.victim);
    try {
      for (const actor of this.#cast) {
        this.#started.push(actor);
        this.#stage.start(actor);
        // One after the other: some clients send what is asked for in one tick as one statement, whoever asks for it.
        await this.#settle();
      }
      for (;;) {
        await this.#settle();
        if (this.#cast.every(({ done }) => done)) break;
        const enabled = this.#cast.filter(({ next }) => next);
        if (enabled.length > 0) await this.#turn(enabled);
        else await this.#deadlocked();
      }
    } finally {
      for (const actor of this.#cast) actor.over = true;
      this.#stage.close();
    }
    return {
      choices: this.#choices,
      results: this.#cast.map(({ result }) => result as PromiseSettledResult<unknown>),
      deadlocks: this.#deadlocks,
      slept: this.#slept,
      diverted: this.#diverted,
      strayed: this.#strayed,
    };
  }

  async #turn(enabled: readonly Actor[]): Promise<void> {
    const indexes = enabled.map(({ index }) => index);
    const last = this.#choices.at(-1);
    const planned = await this.#planned(indexes);
    if (planned === "again") return;
    const goOn = last && indexes.includes(last.chosen) ? last.chosen : (indexes[0] as number);
    const chosen = planned ?? this.#plan.pick?.(indexes) ?? goOn;
    const switched = last && chosen !== last.chosen && indexes.includes(last.chosen);
    const actor = this.#cast[chosen] as Actor;
    const held = actor.next as NonNullable<Actor["next"]>;
    const label = this.#plan.labels?.[this.#choices.length];
    if (label !== undefined && !this.#diverted && !sameLabel(label, labelOf(held.step.text)))
      this.#strayed ??= `as step ${this.#choices.length + 1}, ${actor.name} sent "${labelOf(held.step.text)}" in place of "${label}"`;
    this.#choices.push({
      enabled: new Map(
        enabled.map((each) => [each.index, (each.next as NonNullable<Actor["next"]>).step] as const),
      ),
      chosen,
      step: held.step,
      preemptions: (last?.preemptions ?? 0) + (switched ? 1 : 0),
    });
    actor.held.splice(actor.held.indexOf(held), 1);
    actor.sent.add(held.step);
    await held.send();
  }

  /** Whose turn was planned, if it can be taken. */
  async #planned(enabled: readonly number[]): Promise<number | "again" | undefined> {
    const planned = this.#diverted ? undefined : this.#plan.order[this.#choices.length];
    if (planned === undefined || enabled.includes(planned)) return planned;
    const actor = this.#cast[planned];
    if (actor?.asleep && (await this.#change(idleMs))) return "again";
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
    for (;;) {
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
        waited = 0;
        continue;
      }
      waited += Math.min(performance.now() - from, 2 * graceMs);
      if (flying.length > 0) {
        await this.#look(flying);
        waited = 0;
      } else await this.#doze(running, waited);
    }
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
    else if (ms > idleMs) throw new Error(this.#idle(running));
  }

  #idle(actors: readonly Actor[]): string {
    const names = actors.map(({ name }) => name).join(", ");
    return `${names} neither sends a statement nor ends for ${idleMs / 1000} s: it waits for something that is not a statement (a timer, another service, a pool that has no connection left)`;
  }

  /** Marks those that wait for another actor. Resolves to whether all of these do. */
  async #look(steps: readonly Step[]): Promise<boolean> {
    const found = await this.#stage.waiting(steps);
    let all = true;
    for (const step of steps) {
      // It may have been answered meanwhile.
      if (!this.#cast[step.actor]?.sent.has(step)) {
        all = false;
        continue;
      }
      const others = found.get(step);
      step.blocked = others !== undefined;
      for (const other of others ?? []) step.waitedFor.add(other);
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
    const change = this.#change(idleMs);
    this.#stage.stuck?.(waiting, this.#plan.victim);
    if (!(await change)) throw new Error(this.#idle(this.#cast.filter(({ done }) => !done)));
    const victim = steps.find((step) => step.error !== undefined)?.actor;
    if (this.#plan.victim !== undefined && victim !== this.#plan.victim && !this.#plan.lenient)
      this.#diverted = true;
    this.#deadlocks.push({ at: this.#choices.length, among: waiting.map(({ index }) => index), victim });
  }

  /** Whether something changes within this time. */
  async #change(ms: number): Promise<boolean> {
    const patience = new AbortController();
    const late = sleep(Math.max(ms, 0), false, { signal: patience.signal }).catch(() => false);
    const changed = await Promise.race([this.#wake.promise.then(() => true), late]);
    patience.abort();
    return changed;
  }
}
