/** Patroni, three nodes, a leader that loses its power under load. What `docs/high-availability.md` promises. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Client, Pool } from "pg";
import { describe, expect, test } from "vitest";
import { type Node, noPatroni, standbys, startPatroni } from "./harness/patroni.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { FailoverArg, FailoverResult } from "./workers/failover.ts";

/** Resolves when the server has done all that it was asked for. */
async function idle(url: string): Promise<void> {
  const client = new Client({ connectionString: url });
  client.on("error", () => {});
  await client.connect();
  const active =
    "SELECT count(*)::int AS n FROM pg_stat_activity WHERE backend_type = 'client backend' AND state = 'active' AND pid <> pg_backend_pid()";
  await eventually(async () => (await client.query(active)).rows[0].n === 0);
  await client.end();
}

const PROCESSES = 3;
const HELD = 1_000_000;

describe.each([{ synchronous: true }, { synchronous: false }])("replication: %o", ({ synchronous }) => {
  test("a leader that is gone under load", { timeout: 300_000 }, async ({ skip }) => {
    const why = noPatroni();
    skip(why !== undefined, why);
    const cluster = await startPatroni({ synchronous });
    const pool = new Pool({ connectionString: cluster.url, max: 3, connectionTimeoutMillis: 5000 });
    pool.on("error", () => {});
    const hf = holdfast(fromPg(pool));
    const workers: ReturnType<typeof startWorker<FailoverResult>>[] = [];
    try {
      await pool.query(`CREATE TABLE counter (n int NOT NULL); INSERT INTO counter VALUES (0);
        CREATE TABLE mail (id text PRIMARY KEY); CREATE TABLE sent (mail text NOT NULL);
        CREATE TABLE written (fence bigint NOT NULL)`);
      await hf.migrate();
      await stock(hf).increase("CAP", HELD);
      await eventually(async () => {
        const found = await standbys(cluster.url);
        return found.streaming === 2 && (!synchronous || found.synchronous > 0);
      });

      const load = new URL("./workers/failover.ts", import.meta.url);
      for (let me = 0; me < PROCESSES; me++)
        workers.push(startWorker<FailoverResult>(load, { url: cluster.url, me } satisfies FailoverArg));
      await Promise.all(workers.map((worker) => worker.message("ready")));
      const enough = (than: number) =>
        eventually(async () => (await pool.query("SELECT n FROM counter")).rows[0].n > than, {
          timeout: 60_000,
        });
      await enough(100);

      const old = (await cluster.leader()) as Node;
      const before = (await pool.query("SELECT n FROM counter")).rows[0].n as number;
      // What was sent is done, and nobody hears of it: else there would be hardly an answer that is lost.
      cluster.silence();
      await idle(old.url());
      old.crash();
      await cluster.takenOver(old);
      await enough(before + 50);

      for (const worker of workers) worker.send("stop");
      await Promise.all(workers.map((worker) => worker.message("stopping")));
      // Every job that is there is done.
      const left = async () => {
        const { waiting, delayed, running } = await queue(hf, "mails").counts();
        return waiting + delayed + running;
      };
      await eventually(async () => (await left()) === 0, { timeout: 60_000 });
      for (const worker of workers) worker.send("close");
      const told = await Promise.all(workers.map((worker) => worker.result));
      await judge(told);
    } finally {
      for (const worker of workers) worker.sigkill();
      await hf.close().catch(() => {});
      await pool.end();
      await cluster.stop();
    }

    async function judge(told: readonly FailoverResult[]): Promise<void> {
      type Lists = "consumed" | "sold" | "enqueued" | "fences" | "led" | "written";
      const all = <K extends Lists>(name: K) =>
        told.flatMap((each): (string | number)[] => each[name]) as FailoverResult[K][number][];
      const sum = (name: "counted" | "unknown") => told.reduce((total, each) => total + each[name], 0);
      const count = async (text: string) => Number(Object.values((await pool.query(text)).rows[0])[0]);
      const consumed = (await quota(hf, { name: "uses", limit: HELD }).peek("all")).used;
      const sold = HELD - (await stock(hf).level("CAP")).onHand;
      const sent = await count("SELECT count(*) FROM sent");
      const counted = await count("SELECT n FROM counter");
      const written = await count("SELECT count(*) FROM written");
      const tally = {
        consumed: [all("consumed").length, consumed],
        sold: [all("sold").length, sold],
        sent: [all("enqueued").length, sent],
        counted: [sum("counted"), counted],
        written: [all("written").length, written],
      };
      console.log(
        `${synchronous ? "synchronous" : "asynchronous"}: told and found, ${JSON.stringify(tally)}, ${sum("unknown")} unknown`,
      );

      // Nothing is done twice, in either case.
      expect(consumed).toBeLessThanOrEqual(all("consumed").length);
      expect(sold).toBeLessThanOrEqual(all("sold").length);
      expect(await count("SELECT count(*) - count(DISTINCT mail) FROM sent")).toBe(0);
      expect(await count("SELECT count(*) FROM mail WHERE id NOT IN (SELECT mail FROM sent)")).toBe(0);
      expect(counted).toBeLessThanOrEqual(sum("counted") + sum("unknown"));
      // No fence is given twice, and each process sees them grow.
      const fences = [...all("fences"), ...all("led")];
      expect(new Set(fences).size).toBe(fences.length);
      for (const each of told)
        for (const list of [each.fences, each.led]) expect(list).toEqual(list.toSorted((a, b) => a - b));
      expect(await count("SELECT count(*) - count(DISTINCT fence) FROM written")).toBe(0);
      expect((await stock(hf).reconcile()).ok).toBe(true);

      if (!synchronous) return;
      // And nothing is lost.
      expect(consumed).toBe(all("consumed").length);
      expect(sold).toBe(all("sold").length);
      expect(sent).toBe(all("enqueued").length);
      expect(counted).toBeGreaterThanOrEqual(sum("counted"));
      const { rows } = await pool.query("SELECT fence::float8 AS fence FROM written");
      const found = new Set(rows.map(({ fence }) => fence as number));
      expect(all("written").filter((fence) => !found.has(fence))).toEqual([]);
    }
  });
});
