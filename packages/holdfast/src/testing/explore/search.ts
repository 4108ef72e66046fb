/**
 * Which orders are still to be tried. A run follows its plan, and then lets whoever had the last turn go on; each turn
 * that could have been another's gives a new plan. Those with the fewest switches come first; with many actors, these are
 * switches between two of them before all the orders in which everybody can come one after the other.
 */
import type { ActorStep } from "./actor.ts";
import type { Equivalence, SentStatement } from "./equivalence.ts";
import type { PlannedFault } from "./faults.ts";
import type { Choice, ExplorePlan, ExploreRun } from "./schedule.ts";
import { sameLabel } from "./statement.ts";

export interface Planned extends ExplorePlan {
  readonly preemptions: number;
  /** Who comes next was chosen where somebody had ended or waits, and not only who is first. */
  readonly detours: number;
  /** What comes before this turn is not to be changed. Default: all that is planned. */
  readonly from?: number;
}

/** What each actor was about to send; and whether somebody has waited for a lock in one of these runs. */
interface Pending {
  readonly labels: Map<number, string>;
  waited: boolean;
}

interface PlannedStatement extends SentStatement {
  readonly label: string;
}

/** How an order was come to. */
interface Way {
  readonly preemptions: number;
  readonly detours: number;
}

/** The first of them. */
export interface SearchStart extends ExplorePlan {
  readonly fault: PlannedFault;
}

export class ScheduleSearch {
  /** By switches and detours together; then one switch before one detour, and of more of them, fewer switches first. */
  #queue: Planned[][][] = [];
  /** Where orders lead, up to those that come to the same: how it was reached. */
  readonly #seen = new Map<string, Way[]>();
  /** What each actor was about to send there; and after the very same order. */
  readonly #pending = {
    equal: new Map<string, Pending>(),
    same: new Map<string, Pending>(),
  };
  #taken: Planned | undefined;
  readonly #equivalence: Equivalence;
  readonly #most: number;
  readonly #victims: boolean;
  readonly #start: SearchStart | undefined;
  /** Where orders lead that were left out, because they take more switches than were asked for. */
  readonly #over: {
    before: readonly Choice[];
    other: number;
    step: ActorStep;
    victim: number | undefined;
  }[] = [];

  /** `victims`: whom a deadlock ends can be chosen. `start`: all orders with one fault, and the first of them. */
  constructor(equivalence: Equivalence, most: number, victims: boolean, start?: SearchStart) {
    this.#equivalence = equivalence;
    this.#most = most;
    this.#victims = victims;
    this.#start = start;
    this.restart();
  }

  /** Switches and detours of the next one; Infinity: there is none. */
  get cheapest(): number {
    const sum = this.#queue.findIndex((plans) => plans?.some((each) => (each?.length ?? 0) > 0));
    return sum < 0 ? Infinity : sum;
  }

  /** None was tried. */
  get untried(): boolean {
    return this.#queue[0]?.[0]?.some(({ from }) => from === 0) ?? false;
  }

  /** Something was left out that comes to what none of the others comes to. */
  get beyond(): boolean {
    return this.#over.some(({ before, other, step, victim }) => {
      const sent = this.#marked([...before.map(sentOf), sentBy(other, step)]);
      return !this.#seen.has(this.#keyOf(sent, victim));
    });
  }

  get queued(): number {
    return this.#queue.flat().reduce((sum, { length }) => sum + length, 0);
  }

  next(): Planned | undefined {
    this.#taken = this.#queue
      .flat()
      .find(({ length }) => length > 0)
      ?.shift();
    return this.#taken;
  }

  /** The one that was given last was not tried. */
  putBack(): void {
    if (this.#taken) ((this.#queue[0] ??= [])[0] ??= []).unshift(this.#taken);
  }

  /** All orders with so many switches were tried; and of each two actors, with the others after them. */
  get complete(): { readonly all: number; readonly pairs: number } {
    const left = this.#queue.flat(2);
    const least = (plans: readonly Planned[]) =>
      plans.reduce((most, { preemptions }) => Math.min(most, preemptions), this.#most + 1);
    return { all: least(left) - 1, pairs: least(left.filter(({ detours }) => detours === 0)) - 1 };
  }

  /** From the beginning: what was left out was wrong to be. */
  restart(): void {
    this.#queue = [
      [[{ order: [], labels: [], victim: undefined, ...this.#start, preemptions: 0, detours: 0, from: 0 }]],
    ];
    this.#seen.clear();
    this.#pending.equal.clear();
    this.#over.length = 0;
  }

  /**
   * Where a run came to what another one came to, and went on differently. After the very same order, something else than the
   * order decides; else it may be that what was taken to come to the same does not.
   */
  strange(
    { choices, deadlocks }: ExploreRun,
    names: readonly string[],
  ): { readonly what: string; readonly same: boolean; readonly waited: boolean } | undefined {
    const waits = hasWaited({ choices });
    let found: string | undefined;
    let waited = false;
    for (const [i, { enabled }] of choices.entries()) {
      const victim = deadlocks.findLast(({ at }) => at <= i)?.victim;
      const before = choices.slice(0, i);
      const after = (pending: Map<string, Pending>, key: string) => {
        const known = pending.get(key) ?? { labels: new Map<number, string>(), waited: false };
        pending.set(key, known);
        ({ waited } = known);
        known.waited ||= waits;
        for (const [actor, { label }] of enabled) {
          const earlier = known.labels.get(actor);
          if (earlier !== undefined && !sameLabel(earlier, label))
            return `as step ${i + 1}, ${names[actor]} would send "${label}" in place of "${earlier}"`;
          known.labels.set(actor, label);
        }
        return undefined;
      };
      const what = after(this.#pending.same, `${before.map(({ chosen }) => chosen).join()}|${victim}`);
      if (what !== undefined) return { what, same: true, waited };
      found ??= after(this.#pending.equal, `${this.#equivalence.key(this.#sent(before))}|${victim}`);
    }
    return found === undefined ? undefined : { what: found, same: false, waited };
  }

  /** What the run of a plan showed. */
  learn(plan: Planned, { choices, deadlocks }: ExploreRun): void {
    const { detours, from = plan.order.length } = plan;
    for (let i = from; i <= choices.length; i++) {
      const before = choices.slice(0, i);
      const past = deadlocks.findLast(({ at }) => at <= i && at >= 0);
      const victim = past?.victim ?? plan.victim;
      const here = deadlocks.find(({ at }) => at === i);
      const way = { preemptions: before.at(-1)?.preemptions ?? 0, detours };
      if (here && this.#victims) this.#otherVictims(before, here.among, here.victim, way);
      // From here on it is what another run has tried, or is going to.
      if (i > from && !this.#fresh(this.#sent(before), victim, way)) return;
      const choice = choices[i];
      if (choice) this.#otherTurns(before, choice, victim, way);
    }
  }

  #otherTurns(
    before: readonly Choice[],
    { enabled, chosen, anew }: Choice,
    victim: number | undefined,
    { preemptions, detours }: Way,
  ): void {
    const last = before.at(-1);
    for (const [other, step] of enabled) {
      if (other === chosen) continue;
      const switched = last && last.chosen !== other && enabled.has(last.chosen) && !anew;
      const way = {
        preemptions: preemptions + (switched ? 1 : 0),
        detours: detours + (switched || anew || !last ? 0 : 1),
      };
      if (way.preemptions > this.#most) {
        this.#over.push({ before, other, step, victim });
        continue;
      }
      const sent = this.#marked([...before.map(sentOf), sentBy(other, step)]);
      if (this.#fresh(sent, victim, way)) this.#add(sent, victim, way, hasWaited({ choices: before }));
    }
  }

  #otherVictims(
    before: readonly Choice[],
    among: readonly number[],
    chosen: number | undefined,
    way: Way,
  ): void {
    for (const other of among) {
      if (other === chosen) continue;
      const sent = this.#sent(before);
      if (this.#fresh(sent, other, way, "deadlock")) this.#add(sent, other, way, true);
    }
  }

  #sent(choices: readonly Choice[]): PlannedStatement[] {
    return this.#marked(choices.map(sentOf));
  }

  /** With where the fault is. */
  #marked(sent: readonly PlannedStatement[]): PlannedStatement[] {
    const { fault } = this.#start ?? {};
    let nth = -1;
    return sent.map((each) =>
      fault && fault.kind !== "twice" && each.actor === fault.actor && ++nth === fault.nth
        ? { ...each, fault: true }
        : each,
    );
  }

  #keyOf(sent: readonly PlannedStatement[], victim: number | undefined): string {
    return `${this.#equivalence.key(sent)}|${sent.at(-1)?.actor}|${victim}`;
  }

  #fresh(sent: readonly PlannedStatement[], victim: number | undefined, way: Way, mark = ""): boolean {
    const key = mark + this.#keyOf(sent, victim);
    const ways = this.#seen.get(key) ?? [];
    if (ways.some((each) => each.preemptions <= way.preemptions && each.detours <= way.detours)) return false;
    this.#seen.set(key, [...ways, way]);
    return true;
  }

  #add(
    sent: readonly PlannedStatement[],
    victim: number | undefined,
    { preemptions, detours }: Way,
    waited: boolean,
  ): void {
    const sum = preemptions + detours;
    ((this.#queue[sum] ??= [])[sum === 1 ? detours : preemptions] ??= []).push({
      order: sent.map(({ actor }) => actor),
      labels: sent.map(({ label }) => label),
      victim,
      fault: this.#start?.fault,
      waited,
      preemptions,
      detours,
    });
  }
}

/** For a lock that another actor had. */
export const hasWaited = ({ choices }: Pick<ExploreRun, "choices">): boolean =>
  choices.some(({ step: { waitedFor, deadlock } }) => waitedFor.size > 0 || deadlock);

const sentOf = ({ chosen, step }: Choice): PlannedStatement => sentBy(chosen, step);

function sentBy(actor: number, { text, label, opens, inside, connection }: ActorStep): PlannedStatement {
  return { actor, text, label, opens, inside, connection };
}

/** Numbers from 0 to 1, the same for the same seed (mulberry32). */
export function randomOf(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Orders with fewer switches than this one: two blocks of an actor put together. */
export function merged(order: readonly number[]): number[][] {
  const blocks: { actor: number; count: number }[] = [];
  for (const actor of order) {
    const last = blocks.at(-1);
    if (last?.actor === actor) last.count++;
    else blocks.push({ actor, count: 1 });
  }
  return blocks.flatMap((block, i) => {
    const next = blocks.findIndex(({ actor }, j) => j > i && actor === block.actor);
    if (next < 0) return [];
    const earlier = [
      ...blocks.slice(0, i),
      { actor: block.actor, count: block.count + (blocks[next]?.count ?? 0) },
      ...blocks.slice(i + 1, next),
      ...blocks.slice(next + 1),
    ];
    return [earlier.flatMap(({ actor, count }) => Array.from({ length: count }, () => actor))];
  });
}
