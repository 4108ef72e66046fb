/** With many actors, a bug between two of them is found before every order of all has been tried. */
import { expect, test } from "vitest";
import { step } from "../../packages/holdfast/src/testing/explore/actor.ts";
import { Equivalence } from "../../packages/holdfast/src/testing/explore/equivalence.ts";
import type { Choice, ExploreRun } from "../../packages/holdfast/src/testing/explore/schedule.ts";
import { ScheduleSearch, randomOf } from "../../packages/holdfast/src/testing/explore/search.ts";

/** What actors with three statements each would do by a plan, without any server. */
function played(
  order: readonly number[],
  actors = 5,
  table = (_actor: number, _nth: number) => "t",
): ExploreRun {
  const left = Array.from({ length: actors }, () => 3);
  const choices: Choice[] = [];
  for (let i = 0; left.some((n) => n > 0); i++) {
    const enabled = left.flatMap((n, actor) => (n > 0 ? [actor] : []));
    const last = choices.at(-1);
    const goOn = choices.findLast(({ chosen }) => enabled.includes(chosen))?.chosen ?? enabled[0];
    const chosen = (order[i] ?? goOn) as number;
    const switched = last && chosen !== last.chosen && enabled.includes(last.chosen);
    const steps = new Map(
      enabled.map((actor) => [
        actor,
        step(actor, `UPDATE ${table(actor, 3 - (left[actor] ?? 0))} SET n = ${3 - (left[actor] ?? 0)}`),
      ]),
    );
    choices.push({
      enabled: steps,
      chosen,
      step: steps.get(chosen) ?? step(chosen, ""),
      preemptions: (last?.preemptions ?? 0) + (switched ? 1 : 0),
    });
    left[chosen] = (left[chosen] ?? 0) - 1;
  }
  const none = new Set<never>();
  return {
    choices,
    results: [],
    deadlocks: [],
    slept: none,
    patient: none,
    together: none,
    diverted: false,
    strayed: undefined,
    late: undefined,
    fault: undefined,
  };
}

test("of five actors, each two come between each other's statements before all come in every order", () => {
  const search = new ScheduleSearch(new Equivalence(undefined), 3, false);
  const found = new Set<string>();
  let runs = 0;
  while (search.complete.pairs < 1) {
    const plan = search.next();
    if (!plan) break;
    runs++;
    const run = played(plan.order);
    for (const { chosen, preemptions, enabled } of run.choices)
      if (preemptions === 1)
        for (const other of enabled.keys()) if (other !== chosen) found.add(`${other},${chosen}`);
    search.learn(plan, run);
  }
  expect(found.size).toBe(20);
  // Every order without a switch alone is one of 120.
  expect(runs).toBeLessThan(120);
  expect(search.complete.all).toBe(-1);
});

test("an order with more switches is left out only if it comes to what another one has come to", () => {
  const seed = Number(process.env["HOLDFAST_SEED"] ?? 1);
  const random = randomOf(seed);
  const traceOf = ({ choices }: ExploreRun) =>
    new Equivalence([]).key(choices.map(({ chosen, step: { text } }) => ({ actor: chosen, text })));
  const all = (left: readonly number[], order: readonly number[] = []): (readonly number[])[] =>
    left.every((n) => n === 0)
      ? [order]
      : left.flatMap((n, actor) => (n > 0 ? all(left.with(actor, n - 1), [...order, actor]) : []));
  let exhausted = 0;
  for (let i = 0; i < 150; i++) {
    const actors = i % 3 === 0 ? 3 : 2;
    const names = Array.from({ length: actors * 3 }, () => `t${Math.floor(random() * 4)}`);
    const table = (actor: number, nth: number) => names[actor * 3 + nth] as string;
    const most = Math.floor(random() * 4);
    const search = new ScheduleSearch(new Equivalence([]), most, false);
    const found = new Set<string>();
    for (let plan = search.next(); plan; plan = search.next()) {
      const run = played(plan.order, actors, table);
      found.add(traceOf(run));
      search.learn(plan, run);
    }
    if (search.beyond) continue;
    exhausted++;
    const traces = all(Array.from({ length: actors }, () => 3)).map((order) =>
      traceOf(played(order, actors, table)),
    );
    expect(found, `seed ${seed}, program ${i}`).toEqual(new Set(traces));
  }
  expect(exhausted).toBeGreaterThan(20);
});
