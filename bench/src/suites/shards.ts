/**
 * One unit of a quota, of subjects that are spread over two PostgreSQL servers, next to one server that has them all. What is
 * compared is what an operation costs the busiest server: all of them are on this machine, whose cores they share, so that
 * operations per second say nothing of two machines.
 */
import { hash } from "node:crypto";
import { startPostgres } from "@holdfast/cli";
import { type Holdfast, holdfast, sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Quota, quota } from "holdfast/quota";
import { Pool } from "pg";
import {
  closedLoop,
  inTurns,
  median,
  medians,
  roundCount,
  scatter,
} from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";
import { cpuMs } from "../server-cpu.ts";

const users = 10_000;
const limit = Number.MAX_SAFE_INTEGER;
const connections = 20;

/** With the last one batches are as large as they get, on one server and on each of two: more callers change nothing any more. */
const callers = [1, 64, 256, 1024];

interface Contestant {
  readonly name: string;
  readonly units: Quota;
  /** Of its servers. */
  readonly pids: readonly number[];
}

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  if (process.platform !== "linux")
    throw new Error("What a server's processes use is read from /proc, which is Linux's.");
  await using cleanup = new AsyncDisposableStack();
  const start = async () => {
    // As it comes: fsync and synchronous_commit are on.
    const server = await startPostgres();
    cleanup.defer(() => server.stop());
    const pool = new Pool({ connectionString: server.url(), max: connections });
    // The server's farewell may be quicker than ours.
    pool.on("error", () => {});
    cleanup.defer(() => pool.end());
    const database = fromPg(pool);
    await holdfast(database).migrate();
    return { database, pool, pid: server.pid };
  };
  const [alone, left, right] = [await start(), await start(), await start()];
  const databases = [left.database, right.database];
  const shards = sharded(
    databases,
    ({ parts }) => hash("sha256", parts[1] ?? "", "buffer").readUInt32BE(0) % databases.length,
  );
  const one: Holdfast<unknown> = holdfast(alone.database);
  const contestants: readonly Contestant[] = [
    { name: "one server", units: quota(one, { name: "units", limit }), pids: [alone.pid] },
    { name: "two servers", units: quota(shards, { name: "units", limit }), pids: [left.pid, right.pid] },
  ];
  let calls = 0;
  const measure = async ({ units, pids }: Contestant, count: number, ms: number) => {
    const before = pids.map(cpuMs);
    const round = await closedLoop(
      async (turn) =>
        void (await units.consume(`user-${Math.floor(scatter(turn) * users)}`, 1, {
          id: `request-${++calls}`,
        })),
      count,
      ms,
    );
    const used = pids.map((pid, i) => cpuMs(pid) - (before[i] ?? 0));
    return { round, cpuUs: (Math.max(...used) * 1000) / round.latenciesMs.length };
  };
  note(`${users} subjects …`);
  for (const each of contestants)
    for (let from = 0; from < users; from += 1000)
      await Promise.all(Array.from({ length: 1000 }, (_, i) => each.units.consume(`user-${from + i}`, 1)));
  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  for (const count of callers) {
    note(`${count} callers …`);
    for (const each of contestants) await measure(each, count, seconds * 500);
    const results = await inTurns(contestants, roundCount, (each) =>
      measure(each, count, (seconds * 1000) / roundCount),
    );
    const costs = contestants.map((each) => {
      const found = results.get(each) ?? [];
      const cpuUs = median(found.map((result) => result.cpuUs));
      const { name: contestant, ...figures } = medians(
        each.name,
        found.map(({ round }) => round),
      );
      rows.push({
        cell: count === 1 ? "1 caller" : `${count} callers`,
        contestant,
        ...figures,
        busiestCpuUs: Math.round(cpuUs),
      });
      return cpuUs;
    });
    const [single = Number.NaN, busiest = Number.NaN] = costs;
    const name = count === callers.at(-1) ? "two_shards_cpu" : `two_shards_cpu_${count}`;
    ratios[name] = Number((single / busiest).toFixed(2));
  }
  const { rows: versions } = await alone.pool.query("SELECT current_setting('server_version') AS version");
  await shards.close();
  return {
    suite: "shards",
    machine: machine(versions[0].version),
    rows,
    ratios,
    notes: [
      "busiestCpuUs: processor time of the busiest server per operation, in microseconds, all of its processes together.",
      "The ratios are of that: what one server needs for an operation, over what the busiest of two needs. 2 would be half each.",
      "All servers are on one machine and share its cores: op/s are not those of two machines.",
    ],
  };
}
