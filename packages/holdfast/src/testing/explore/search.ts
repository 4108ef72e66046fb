/**
 * Which orders are still to be tried. A run follows its plan, and then lets whoever had the last turn go on; each turn
 * that could have been another's gives a new plan. Those with the fewest switches come first.
 */
import type { Equivalence, Sent } from "./equivalence.ts";
import type { Choice, Plan, Run } from "./schedule.ts";
import { labelOf, sameLabel } from "./statement.ts";

export interface Planned extends Plan {
  readonly preemptions: number;
}

export class Search {
  /** By number of switches. */
  readonly #queue: Planned[][] = [[{ order: [], labels: [], victim: undefined, preemptions: 0 }]];
  /** Where orders lead, up to those that come to the same: with how many switches it was reached. */
  readonly #seen = new Map<string, number>();
  /** What each actor was about to send there. */
  readonly #pending = new Map<string, Map<number, string>>();
  readonly #equivalence: Equivalence;
  readonly #most: number;
  readonly #victims: boolean;
  /** Something was left out, because it takes more switches than were asked for. */
  beyond = false;

  /** `victims`: whom a deadlock ends can be chosen. */
  constructor(equivalence: Equivalence, most: number, victims: boolean) {
    this.#equivalence = equivalence;
    this.#most = most;
    this.#victims = victims;
  }

  get queued(): number {
    return this.#queue.reduce((sum, { length }) => sum + length, 0);
  }

  next(): Planned | undefined {
    return this.#queue.find(({ length }) => length > 0)?.shift();
  }

  /** Where a run came to what another one came to, and went on differently: something else than the order decides. */
  strange({ choices, deadlocks }: Run, names: readonly string[]): string | undefined {
    for (const [i, { enabled }] of choices.entries()) {
      const victim = deadlocks.findLast(({ at }) => at <= i)?.victim;
      const key = `${this.#equivalence.key(choices.slice(0, i).map(sentOf))}|${victim}`;
      const known = this.#pending.get(key) ?? new Map<number, string>();
      this.#pending.set(key, known);
      for (const [actor, { text }] of enabled) {
        const label = labelOf(text);
        const before = known.get(actor);
        if (before !== undefined && !sameLabel(before, label))
          return `as step ${i + 1}, ${names[actor]} would send "${label}" in place of "${before}"`;
        known.set(actor, label);
      }
    }
    return undefined;
  }

  /** What the run of a plan showed. */
  learn(plan: Planned, { choices, deadlocks }: Run): void {
    for (let i = plan.order.length; i <= choices.length; i++) {
      const before = choices.slice(0, i);
      const past = deadlocks.findLast(({ at }) => at <= i && at >= 0);
      const victim = past?.victim ?? plan.victim;
      const here = deadlocks.find(({ at }) => at === i);
      if (here && this.#victims) this.#otherVictims(before, here.among, here.victim);
      // From here on it is what another run has tried, or is going to.
      if (i > plan.order.length && !this.#fresh(before.map(sentOf), victim, before.at(-1)?.preemptions ?? 0))
        return;
      const choice = choices[i];
      if (choice) this.#otherTurns(before, choice, victim);
    }
  }

  #otherTurns(before: readonly Choice[], { enabled, chosen }: Choice, victim: number | undefined): void {
    const last = before.at(-1);
    for (const [other, step] of enabled) {
      if (other === chosen) continue;
      const switched = last && last.chosen !== other && enabled.has(last.chosen);
      const preemptions = (last?.preemptions ?? 0) + (switched ? 1 : 0);
      if (preemptions > this.#most) {
        this.beyond = true;
        continue;
      }
      const sent = [...before.map(sentOf), { actor: other, text: step.text }];
      if (this.#fresh(sent, victim, preemptions)) this.#add(sent, victim, preemptions);
    }
  }

  #otherVictims(before: readonly Choice[], among: readonly number[], chosen: number | undefined): void {
    const preemptions = before.at(-1)?.preemptions ?? 0;
    for (const other of among) {
      if (other === chosen) continue;
      const sent = before.map(sentOf);
      if (this.#fresh(sent, other, preemptions, "deadlock")) this.#add(sent, other, preemptions);
    }
  }

  #fresh(sent: readonly Sent[], victim: number | undefined, preemptions: number, mark = ""): boolean {
    const key = `${mark}${this.#equivalence.key(sent)}|${sent.at(-1)?.actor}|${victim}`;
    if ((this.#seen.get(key) ?? Infinity) <= preemptions) return false;
    this.#seen.set(key, preemptions);
    return true;
  }

  #add(sent: readonly Sent[], victim: number | undefined, preemptions: number): void {
    (this.#queue[preemptions] ??= []).push({
      order: sent.map(({ actor }) => actor),
      labels: sent.map(({ text }) => labelOf(text)),
      victim,
      preemptions,
    });
  }
}

function sentOf({ chosen, step }: Choice): Sent {
  return { actor: chosen, text: step.text };
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
