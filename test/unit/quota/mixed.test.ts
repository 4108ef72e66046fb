/**
 * PostgreSQL's functions and the generic store at the same time, on the same tables: a process of one release beside one of
 * another. Every call, from several connections of each; what everybody was told is what the ledger says.
 */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { describe, expect, inject, test } from "vitest";
import { storeDialect } from "../../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { quotaStore } from "../../../packages/holdfast/src/engines/sql/quota/index.ts";
import { createDatabase, unavailable } from "../../harness/databases.ts";
import { checkAnswers } from "../../harness/quota-answers.ts";
import { type Answer, plan, quotasOf } from "../../workers/quota-random.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const why = unavailable("postgres");
const callers = 6;

type Site = ReturnType<typeof fromPg<Pool>>;

const generic = (site: Site, optimistic: boolean): Site => ({
  ...site,
  engine: { ...site.engine, quotas: quotaStore({ ...storeDialect, optimistic }) },
});

async function callAll(site: Site, seed: number, index: number): Promise<Answer[]> {
  // Many wait for each other here, and the machine may be busy.
  const hf = holdfast(site, { wait: 60_000 });
  const all = quotasOf(hf);
  const steps = plan({ seed, index, calls: 120 });
  const answers: Answer[] = [];
  const caller = async () => {
    for (let step = steps.shift(); step; step = steps.shift()) answers.push(...(await step(all)));
  };
  await Promise.all(Array.from({ length: callers }, caller));
  await hf.close();
  return answers;
}

describe("the functions and the generic store at once", () => {
  test.for(Array.from({ length: long ? 30 : 2 }, (_, i) => i))(
    "seed + %i",
    { timeout: 240_000 },
    async (i, { skip }) => {
      skip(why !== undefined, why);
      const seed = inject("seed") + i;
      const database = await createDatabase("postgres");
      const pools = Array.from({ length: 4 }, () => new Pool({ connectionString: database.url, max: 4 }));
      try {
        const [first, second, third, fourth] = pools.map((pool) => fromPg(pool)) as [Site, Site, Site, Site];
        await holdfast(first).migrate();
        const sites = [first, generic(second, true), third, generic(fourth, false)];
        const answers = (await Promise.all(sites.map((site, index) => callAll(site, seed, index)))).flat();
        expect(answers.length).toBeGreaterThan(100);
        const kinds = await checkAnswers("pg", { database: first }, answers, `HOLDFAST_SEED=${seed}`);
        const wanted = "consume hold settle release expire refund grant limit plan".split(" ");
        expect(wanted.filter((kind) => !kinds.has(kind))).toEqual([]);
      } finally {
        for (const pool of pools) await pool.end();
        await database.drop();
      }
    },
  );
});
