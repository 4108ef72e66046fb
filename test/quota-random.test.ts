/** Random histories of several processes, some of which are killed and started again with the same calls. */
import { holdfast, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { execute } from "holdfast/testing";
import { Pool } from "pg";
import { describe, expect, inject, test } from "vitest";
import { missingFor, within } from "./harness/places.ts";
import { startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { startProxy } from "./harness/proxy.ts";
import { checkAnswers } from "./harness/quota-answers.ts";
import { openNamed, ourTable } from "./harness/sites.ts";
import type { Answer, QuotaArg } from "./workers/quota-random.ts";

const worker = new URL("./workers/quota-random.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const servers = ["pg", "mysql2 on MySQL", "mysql2 on MariaDB"];

/** Each process runs its calls to the end; those that are killed run all of them again, with the same ids. */
async function crew(
  of: Pick<QuotaArg, "backend" | "url" | "seed" | "naive">,
  lives: number,
): Promise<Answer[]> {
  const { seed } = of;
  const one = async (clock: number, index: number): Promise<Answer[]> => {
    for (let life = 1; ; life++) {
      const arg: QuotaArg = { ...of, index, calls: 200, callers: index % 2 === 0 ? 6 : 20, clock };
      const process = startWorker<Answer[]>(worker, arg);
      try {
        if (life >= lives) return await process.result;
        await process.message("busy");
        await new Promise((resolve) => setTimeout(resolve, (seed + life * 7 + index * 3) % 30));
      } finally {
        process.sigkill();
        await process.exited;
      }
    }
  };
  // Clocks that are wrong by more than a window: they must not take it back, nor forward.
  return (await Promise.all([0, -900, 900, 0].map(one))).flat();
}

describe.each([...servers, "better-sqlite3"])(
  "%s: 4 processes, each killed once in the middle of it",
  (backend) => {
    const seeds = long ? 100 : backend === "pg" ? 2 : 1;
    test.for(Array.from({ length: seeds }, (_, i) => i))(
      "seed + %i",
      { timeout: 240_000 },
      async (i, { skip }) => {
        const why = missingFor(backend);
        skip(why !== undefined, why);
        const seed = inject("seed") + i;
        await within(backend, async (url, site) => {
          const answers = await crew({ backend, url, seed }, 2);
          expect(answers.length).toBeGreaterThan(100);
          const kinds = await checkAnswers(backend, site, answers, `HOLDFAST_SEED=${seed}`);
          // It happened, or it was not shown.
          const wanted = "consume hold settle release expire refund grant lapse limit plan reset".split(" ");
          expect(wanted.filter((kind) => !kinds.has(kind))).toEqual([]);
        });
      },
    );
  },
);

test("callers who look first and use then are found out", async () => {
  const seed = inject("seed");
  await within("pg", async (url, site) => {
    const answers = await crew({ backend: "pg", url, seed, naive: true }, 1);
    await expect(checkAnswers("pg", site, answers, `HOLDFAST_SEED=${seed}`)).rejects.toThrow(
      /never above the limit|or there is room/,
    );
  });
});

describe.each(servers)("%s", (backend) => {
  test("connections that are cut, also during a commit: every id is applied once", async ({ skip }) => {
    const why = missingFor(backend);
    skip(why !== undefined, why);
    await within(backend, async (url, site) => {
      const proxy = await startProxy({ port: Number(new URL(url).port) });
      const through = await openNamed(backend, proxy.url(url));
      const of = quota(through.hf, { name: "cut off", limit: 100_000 });
      const next = random(inject("seed"));
      // Where a call is one message, or many: of either, about a third of the calls.
      const [ours, share] = backend === "pg" ? [/cut off/, 0.3] : [/holdfast_quota_|COMMIT(?!TED)/, 0.15];
      // Before it gets there, or after it was committed and before the answer is back.
      proxy.cutWhen((direction, chunk) => {
        if (direction === "to-client" || !ours.test(chunk.toString("latin1")) || next() > share)
          return "pass";
        return next() < 0.5 ? "cut-before" : "drop-answer";
      });
      const [callers, each] = [16, backend === "pg" ? 75 : 25];
      try {
        const granted = new Set<string>();
        const use = async (caller: number, round: number) => {
          for (let i = 0; i < each; i++) {
            const id = `${round}-${caller}-${i}`;
            // Holdfast gives up after some tries; the caller tries again with the same id.
            for (;;) {
              try {
                await of.consume("u", 1, { id });
                granted.add(id);
                break;
              } catch {
                await new Promise((resolve) => setTimeout(resolve, 5));
              }
            }
          }
        };
        // The slower the machine, the more calls are in one batch, and the fewer there are to cut.
        let rounds = 0;
        while (proxy.cuts <= 5 && rounds < 20) {
          rounds++;
          await Promise.all(Array.from({ length: callers }, (_, caller) => use(caller, rounds)));
        }
        expect(proxy.cuts).toBeGreaterThan(5);
        const [row] = await execute(
          site,
          sql`SELECT count(*) AS n, max(used) AS used FROM ${ourTable(backend, "quota_line")}`,
        );
        const all = rounds * callers * each;
        expect([granted.size, Number(row?.["n"]), Number(row?.["used"])]).toEqual([all, all, all]);
      } finally {
        await through.close();
        await proxy.close();
      }
    });
  });
});

test("1,024 callers, 10,000 users, 4 batches in flight: the server sees no deadlock", async () => {
  await within("pg", async (url) => {
    const pools = [1, 2].map(() => new Pool({ connectionString: url, max: 8 }));
    const pool = pools[0] as Pool;
    const quotas = pools.map((each) =>
      quota(holdfast(fromPg(each), { wait: 60_000 }), { name: "spread", limit: 1_000_000 }),
    );
    try {
      const before = await deadlocks(pool);
      let next = inject("seed");
      await Promise.all(
        Array.from({ length: 1024 }, async (_, caller) => {
          for (let i = 0; i < 6; i++) {
            next = (Math.imul(next, 1_103_515_245) + 12_345) >>> 0;
            await quotas[caller % 2]?.consume(`user-${next % 10_000}`);
          }
        }),
      );
      const { rows } = await pool.query("SELECT sum(used)::int AS used FROM holdfast.quota_bucket");
      expect(rows[0].used).toBe(1024 * 6);
      expect(await deadlocks(pool)).toBe(before);
    } finally {
      for (const each of pools) await each.end();
    }
  });
});

async function deadlocks(pool: Pool): Promise<number> {
  const { rows } = await pool.query(
    "SELECT deadlocks::int FROM pg_stat_database WHERE datname = current_database()",
  );
  return rows[0].deadlocks;
}
