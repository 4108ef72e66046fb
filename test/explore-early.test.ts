/** With many actors, a bug between two of them is found before every order of all has been tried. */
import { fromPg } from "holdfast/pg";
import { explore } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { Equivalence } from "../packages/holdfast/src/testing/explore/equivalence.ts";
import { Search } from "../packages/holdfast/src/testing/explore/search.ts";
import type { Choice, Run } from "../packages/holdfast/src/testing/explore/schedule.ts";
import { step } from "../packages/holdfast/src/testing/explore/actor.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  await pool.query("CREATE TABLE stock (id int PRIMARY KEY, qty int NOT NULL); CREATE TABLE seen (id int)");
});
afterAll(async () => {
  await pool?.end();
  await database?.drop();
});

/** What five actors with three statements each would do by a plan, without any server. */
function played(order: readonly number[]): Run {
  const left = Array.from({ length: 5 }, () => 3);
  const choices: Choice[] = [];
  for (let i = 0; left.some((n) => n > 0); i++) {
    const enabled = left.flatMap((n, actor) => (n > 0 ? [actor] : []));
    const last = choices.at(-1);
    const goOn = choices.findLast(({ chosen }) => enabled.includes(chosen))?.chosen ?? enabled[0];
    const chosen = (order[i] ?? goOn) as number;
    const switched = last && chosen !== last.chosen && enabled.includes(last.chosen);
    const steps = new Map(
      enabled.map((actor) => [actor, step(actor, `UPDATE t SET n = ${3 - (left[actor] ?? 0)}`)]),
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
  };
}

test("of five actors, each two come between each other's statements before all come in every order", () => {
  const search = new Search(new Equivalence(undefined), 3, false);
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

test("five actors, of which the last two get in each other's way", async () => {
  const add = (id: number) => async () => {
    const { rows } = await pool.query("SELECT qty FROM stock WHERE id = $1", [id]);
    await pool.query("INSERT INTO seen VALUES ($1)", [id]);
    await pool.query("UPDATE stock SET qty = $2 WHERE id = $1", [id, rows[0].qty + 1]);
  };
  const report = await explore("five", {
    db: fromPg(pool),
    reset: () =>
      pool.query(
        "DELETE FROM seen; DELETE FROM stock; INSERT INTO stock SELECT i, 0 FROM generate_series(1, 4) i",
      ),
    actors: { A: add(1), B: add(2), C: add(3), D: add(4), E: add(4) },
    async invariant() {
      const { rows } = await pool.query("SELECT sum(qty)::int AS n FROM stock");
      expect(rows[0].n).toBe(5);
    },
    maxMs: 60_000,
  });
  expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "lost update" });
  expect(report.runs).toBeLessThan(120);
});
