/**
 * One process that calls quota, stock, once, locks and leases, while others kill it, freeze it, and crash the server. What it
 * is about to do, and what it was told, is on disk before it goes on: the test compares that with what the database says.
 */
import { closeSync, fsyncSync, openSync, writeSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { StaleFenceError, fenced, holdfast, key, once, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
import { random } from "../harness/random.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export const kinds = ["quota", "stock", "once", "lock", "lease"] as const;
export type Kind = (typeof kinds)[number];

export interface ChaosArg {
  url: string;
  file: string;
  /** Of all its ids; another one for each life of a process. */
  life: string;
  seed: number;
  callers: number;
}

/** A line before a call, and one after it. No second line: the process was killed. */
export type Line =
  | { readonly id: string; readonly kind: Kind }
  | { readonly id: string; readonly told: "done" | "not done" | "unknown"; readonly code?: string };

export const limit = 1_000_000;

/** What says that nothing was applied, whoever throws it. */
const undone = new Set([
  "HF_CONNECTION_LOST",
  "HF_LOCK_TIMEOUT",
  "HF_LOCK_NOT_AVAILABLE",
  "HF_DEADLINE",
  "HF_DEADLOCK",
  "HF_SERIALIZATION",
  "HF_NO_CONNECTION",
  "HF_STALE_FENCE",
  "HF_LEASE_LOST",
  "HF_QUOTA_EXCEEDED",
  "HF_STOCK_INSUFFICIENT",
]);
const unknown = new Set(["HF_OUTCOME_UNKNOWN", "HF_COMMIT_UNKNOWN"]);

export default async function chaos(arg: ChaosArg, context: WorkerContext): Promise<void> {
  const file = openSync(arg.file, "a");
  const write = (line: Line) => {
    writeSync(file, `${JSON.stringify(line)}\n`);
    fsyncSync(file);
  };
  const pool = new Pool({ connectionString: arg.url, max: arg.callers + 3 });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool), { wait: 3000, deadline: 8000 });
  const uses = quota(hf, { name: "chaos", limit });
  const shelf = stock(hf);
  const next = random(arg.seed);
  let stopping = false;
  void context.receive("stop").then(() => (stopping = true));

  const acts: Record<Kind, (id: string, of: string) => Promise<unknown>> = {
    quota: (id, of) => uses.consume(`user ${of}`, 1, { id }),
    stock: (id, of) => shelf.apply([{ sku: `sku ${of}`, quantity: 1 }], { externalId: id }),
    once: (id, of) => once(hf, ["chaos", id], (tx) => tx.query(effect("once", id, of))),
    lock: (id, of) =>
      hf.transaction({ lock: key("chaos", of) }, async (tx) => {
        const [row] = await tx.query(sql`SELECT n FROM counter WHERE of = ${of}`);
        await tx.query(effect("lock", id, of));
        await tx.query(sql`UPDATE counter SET n = ${Number(row?.["n"]) + 1} WHERE of = ${of}`);
      }),
    async lease(id, of) {
      const lease = await hf.lease(key("chaos-lease", of), { ttl: 1000, wait: 2000 });
      try {
        await sleep(Math.floor(next() * 20));
        await hf.transaction({ retry: false }, async (tx) => {
          await fenced(tx, lease);
          await tx.query(effect("lease", id, of, lease.fence));
        });
      } finally {
        // It runs out by itself.
        await lease.release().catch(() => {});
      }
    },
  };

  const caller = async (who: number): Promise<void> => {
    for (let call = 0; !stopping; call++) {
      const kind = kinds[Math.floor(next() * kinds.length)] as Kind;
      const of = String(Math.floor(next() * 3));
      const id = `${arg.life} ${who} ${call}`;
      write({ id, kind });
      try {
        await acts[kind](id, of);
        write({ id, told: "done" });
      } catch (error) {
        const { code = "none" } = error as { code?: string };
        const told = unknown.has(code) ? "unknown" : undone.has(code) ? "not done" : undefined;
        // Raw errors of the driver say nothing of what became of a call.
        if (told === undefined && !(error instanceof StaleFenceError) && kind !== "lease") throw error;
        write({ id, told: told ?? "unknown", code });
        await sleep(Math.floor(next() * 50));
      }
    }
  };
  context.send("ready");
  await Promise.all(Array.from({ length: arg.callers }, (_, who) => caller(who)));
  await hf.close();
  await pool.end();
  closeSync(file);
}

const effect = (kind: Kind, id: string, of: string, fence = 0) =>
  sql`INSERT INTO effect (kind, id, of, fence) VALUES (${kind}, ${id}, ${of}, ${fence})`;
