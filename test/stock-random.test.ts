/** Random histories of several processes, some of which are killed and started again with the same calls. */
import { holdfast, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { stock } from "holdfast/stock";
import { execute } from "holdfast/testing";
import { Pool } from "pg";
import { describe, expect, inject, test } from "vitest";
import { missingFor, within } from "./harness/places.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { openNamed, ourTable } from "./harness/sites.ts";
import { checkStock } from "./harness/stock-check.ts";
import { type Answer, type StockArg, locations, shopOf, skus } from "./workers/stock-random.ts";

const worker = new URL("./workers/stock-random.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const servers = ["pg", "mysql2 on MySQL", "mysql2 on MariaDB"];

const deadlocks = sql`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`;

/** Each process runs its calls to the end; those that are killed run all of them again, with the same ids. */
async function crew(of: Pick<StockArg, "backend" | "url" | "seed">, processes: number, kills: number) {
  const { seed } = of;
  const one = async (index: number): Promise<Answer[]> => {
    for (let life = 0; ; life++) {
      const arg: StockArg = { ...of, index, calls: 90, callers: 6 };
      const process = startWorker<Answer[]>(worker, arg);
      try {
        if (life >= kills) return await process.result;
        await process.message("busy");
        await new Promise((resolve) => setTimeout(resolve, (seed + life * 7 + index * 3) % 30));
      } finally {
        process.sigkill();
        await process.exited;
      }
    }
  };
  return (await Promise.all(Array.from({ length: processes }, (_, i) => one(i)))).flat();
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
          const shop = shopOf(site.hf);
          await shop.apply(
            skus.flatMap((sku) => locations.map((location) => ({ sku, location, quantity: 15 }))),
          );
          const answers = await crew({ backend, url, seed }, 4, 1);
          expect(answers.length).toBeGreaterThan(50);
          await checkStock(backend, site, answers, `HOLDFAST_SEED=${seed}`);
          if (backend !== "pg") return;
          const [row] = await execute(site, deadlocks);
          expect(Number(row?.["deadlocks"])).toBe(0);
        });
      },
    );
  },
);

describe.each(servers)("%s", (backend) => {
  test("connections that are cut, also during a commit: every id is applied once", async ({ skip }) => {
    const why = missingFor(backend);
    skip(why !== undefined, why);
    await within(backend, async (url, site) => {
      const proxy = await startProxy({ port: Number(new URL(url).port) });
      const through = await openNamed(backend, proxy.url(url));
      const shop = stock(through.hf, { name: "cut" });
      const sku = (n: number) => `sku-${n % 5}`;
      await stock(site.hf, { name: "cut" }).apply(
        Array.from({ length: 5 }, (_, i) => ({ sku: sku(i), quantity: 20_000 })),
      );
      const next = random(inject("seed"));
      // Before it gets there, or after it was committed and before the answer is back. What is prepared goes by its name.
      const [ours, share] =
        backend === "pg"
          ? [/holdfast\.stock_|holdfast_[0-9a-f]{12}/, 0.3]
          : [/holdfast_stock_|COMMIT(?!TED)/, 0.15];
      proxy.cutWhen((direction, chunk) => {
        if (direction === "to-client" || !ours.test(chunk.toString("latin1")) || next() > share)
          return "pass";
        return next() < 0.5 ? "cut-before" : "drop-answer";
      });
      const [callers, each] = [16, backend === "pg" ? 30 : 12];
      try {
        let sold = 0;
        const sell = async (caller: number, round: number) => {
          for (let i = 0; i < each; i++) {
            // Half of them without an id: those that Holdfast repeats by itself count once too.
            const externalId = i % 2 ? `${round}-${caller}-${i}` : undefined;
            const lines = [
              { sku: sku(caller), quantity: -1 },
              { sku: sku(caller + i), quantity: -1 },
            ];
            for (;;) {
              try {
                await shop.apply(lines, externalId === undefined ? {} : { externalId });
                sold += 2;
                break;
              } catch {
                // Without an id nobody can know whether it happened: it is not tried again.
                if (externalId === undefined) {
                  sold = Number.NaN;
                  break;
                }
                await new Promise((resolve) => setTimeout(resolve, 5));
              }
            }
          }
        };
        // The slower the machine, the more calls are in one batch, and the fewer there are to cut.
        let rounds = 0;
        while (proxy.cuts <= 5 && rounds < 20) {
          rounds++;
          await Promise.all(Array.from({ length: callers }, (_, caller) => sell(caller, rounds)));
        }
        expect(proxy.cuts).toBeGreaterThan(5);
        const movement = ourTable(backend, "stock_movement");
        const [row] = await execute(
          site,
          sql`SELECT -sum(quantity) AS sold FROM ${movement} WHERE quantity < 0`,
        );
        const named = rounds * callers * Math.floor(each / 2) * 2;
        if (Number.isNaN(sold)) expect(Number(row?.["sold"])).toBeGreaterThanOrEqual(named);
        else expect(Number(row?.["sold"])).toBe(sold);
        const twice = await execute(
          site,
          sql`SELECT external_id FROM ${movement} GROUP BY external_id HAVING count(*) <> max(parts)`,
        );
        expect(twice).toEqual([]);
        expect(await stock(site.hf, { name: "cut" }).reconcile()).toMatchObject({ ok: true });
      } finally {
        await through.close();
        await proxy.close();
      }
    });
  });
});

test("512 callers, orders of 3 out of 1,000 SKUs written in any order, new ones among them: no deadlock", async () => {
  await within("pg", async (url, site) => {
    const pools = [1, 2].map(() => new Pool({ connectionString: url, max: 8 }));
    const shops = pools.map((each) => stock(holdfast(fromPg(each), { wait: 60_000 }), { name: "spread" }));
    try {
      const next = random(inject("seed"));
      const lines = (quantity: number) =>
        Array.from({ length: 3 }, () => ({ sku: `sku-${Math.floor(next() * 1000)}`, quantity }));
      await Promise.all(
        Array.from({ length: 512 }, async (_, caller) => {
          for (let i = 0; i < 3; i++) {
            const shop = shops[caller % 2];
            // What is not there yet is made by whoever comes first.
            await shop?.apply(lines(2));
            await shop?.apply(lines(-1)).catch(() => {});
          }
        }),
      );
      expect(await shops[0]?.reconcile()).toMatchObject({ ok: true });
      const [row] = await execute(site, deadlocks);
      expect(Number(row?.["deadlocks"])).toBe(0);
    } finally {
      for (const each of pools) await each.end();
    }
  });
});
