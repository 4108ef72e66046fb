/**
 * One unit of a quota, that is never used up: the textbook (a lock and a SUM), rate-limiter-flexible on PostgreSQL and on
 * Redis, and ours. Ours also writes a line of the ledger and knows the id again; the others do neither.
 */
import { startPostgres } from "@holdfast/cli";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { Redis } from "ioredis";
import { Pool } from "pg";
import { RateLimiterPostgres, RateLimiterRedis } from "rate-limiter-flexible";
import {
  type Contestant,
  type Measured,
  alternate,
  median,
  scatter,
} from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";
import { limit, lockAndSum, makeUses } from "../../../packages/cli/src/bench/quota.ts";
import { type RedisServer, startRedis } from "../../../test/harness/redis.ts";

const users = 10_000;
const rowsPerUser = 1000;
/** More connections than cores do not make PostgreSQL faster; fewer would let callers of the others queue in the client. */
const connections = 20;

const textbook = "textbook: lock and SUM";
const rlfPostgres = "rate-limiter-flexible on PostgreSQL";
const rlfRedis = "rate-limiter-flexible on Redis, default durability";
const rlfRedisAlways = "rate-limiter-flexible on Redis, appendfsync always";
const ours = "holdfast/quota";

interface Cell {
  readonly name: string;
  readonly callers: number;
  /** Whose turn it is. */
  readonly user: (turn: number) => number;
}

const cells: readonly Cell[] = [1, 64, 256].flatMap((callers) => [
  { name: `hot, ${callers}`, callers, user: () => 1 },
  { name: `spread, ${callers}`, callers, user: (turn: number) => Math.floor(scatter(turn) * users) },
]);

const ratios: readonly (readonly [ratio: string, cell: string, others: readonly string[]])[] = [
  ["hot64_vs_textbook", "hot, 64", [textbook]],
  ["hot64_vs_rlf_pg", "hot, 64", [rlfPostgres]],
  ["spread64_vs_textbook", "spread, 64", [textbook]],
  ["spread64_vs_rlf_pg", "spread, 64", [rlfPostgres]],
  ["hot256_vs_rlf_redis", "hot, 256", [rlfRedis, rlfRedisAlways]],
  ["spread256_vs_rlf_redis", "spread, 256", [rlfRedis, rlfRedisAlways]],
  ["one_vs_textbook", "hot, 1", [textbook]],
];

async function contestants(
  pools: { readonly textbook: Pool; readonly rlf: Pool; readonly ours: Pool },
  redis: { readonly default: Redis; readonly always: Redis },
): Promise<(cell: Cell) => Contestant[]> {
  const onPostgres = await new Promise<RateLimiterPostgres>((resolve, reject) => {
    const limiter: RateLimiterPostgres = new RateLimiterPostgres(
      { storeClient: pools.rlf, tableName: "rlf", points: limit, duration: 0, clearExpiredByTimeout: false },
      (error) => (error ? reject(error) : resolve(limiter)),
    );
  });
  const onRedis = (storeClient: Redis) => new RateLimiterRedis({ storeClient, points: limit, duration: 0 });
  const [lax, strict] = [onRedis(redis.default), onRedis(redis.always)];
  const hf = holdfast(fromPg(pools.ours));
  await hf.migrate();
  const units = quota(hf, { name: "units", limit });
  let calls = 0;
  return ({ user }) => [
    { name: textbook, call: (turn) => lockAndSum(pools.textbook, user(turn)) },
    { name: rlfPostgres, call: async (turn) => void (await onPostgres.consume(`user-${user(turn)}`)) },
    { name: rlfRedis, call: async (turn) => void (await lax.consume(`user-${user(turn)}`)) },
    { name: rlfRedisAlways, call: async (turn) => void (await strict.consume(`user-${user(turn)}`)) },
    {
      name: ours,
      // Each call with an id of the caller's, as a request has one.
      call: async (turn) => void (await units.consume(`user-${user(turn)}`, 1, { id: `request-${++calls}` })),
    },
  ];
}

/** What a call costs a subject with so many entries. */
async function history(
  pool: Pool,
  seconds: number,
): Promise<{ ratio: number; measured: readonly Measured[] }> {
  const hf = holdfast(fromPg(pool));
  const units = quota(hf, { name: "history", limit });
  for (const [subject, entries] of [
    ["short", 100],
    ["long", 1_000_000],
  ] as const) {
    await units.peek(subject);
    await pool.query(
      `WITH b AS (INSERT INTO holdfast.quota_bucket (quota, subject, used, version) VALUES ('history', $1, $3, $3) RETURNING id)
        INSERT INTO holdfast.quota_line (bucket, version, amount, used, max, at, kind, id)
        SELECT b.id, n, 1, n, $2, clock_timestamp(), 'consume', 'before-' || n FROM b, generate_series(1, $3::int) n`,
      [subject, limit, entries],
    );
  }
  await pool.query("VACUUM ANALYZE holdfast.quota_line");
  const measured = await alternate({
    contestants: ["short", "long"].map((subject) => ({
      name: subject === "short" ? "with 100 entries" : "with 1,000,000 entries",
      call: async () => void (await units.consume(subject)),
    })),
    callers: 1,
    seconds,
    reset: async () => {},
  });
  const [few, many] = measured.map(({ rounds }) => median(rounds));
  return { ratio: (many ?? Number.NaN) / (few ?? Number.NaN), measured };
}

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  await using cleanup = new AsyncDisposableStack();
  // As it comes: fsync and synchronous_commit are on.
  const server = await startPostgres();
  cleanup.defer(() => server.stop());
  const redisServers: RedisServer[] = [await startRedis("default"), await startRedis("always")];
  for (const each of redisServers) cleanup.defer(() => each.stop());
  const [lax, strict] = redisServers.map(
    ({ port }) => new Redis({ port, host: "127.0.0.1", enableAutoPipelining: true }),
  ) as [Redis, Redis];
  for (const each of [lax, strict]) cleanup.defer(() => each.disconnect());
  const pool = () => {
    const made = new Pool({ connectionString: server.url(), max: connections });
    cleanup.defer(() => made.end());
    return made;
  };
  const pools = { textbook: pool(), rlf: pool(), ours: pool() };
  note(`${users} users with ${rowsPerUser} rows each …`);
  await makeUses(pools.textbook, users, rowsPerUser);
  const { rows: versions } = await pools.textbook.query(
    "SELECT current_setting('server_version') AS version",
  );

  const make = await contestants(pools, { default: lax, always: strict });
  const rows: BenchRow[] = [];
  const byCell = new Map<string, readonly Measured[]>();
  for (const cell of cells) {
    note(`${cell.name} callers …`);
    const measured = await alternate({
      contestants: make(cell),
      callers: cell.callers,
      seconds,
      reset: async () => {},
    });
    byCell.set(cell.name, measured);
    for (const { name, ...figures } of measured) rows.push({ cell: cell.name, contestant: name, ...figures });
  }
  note("history …");
  const { ratio, measured } = await history(pools.ours, seconds);
  for (const { name, ...figures } of measured)
    rows.push({ cell: "one caller", contestant: name, ...figures });

  const rate = (cell: string, name: string) =>
    byCell.get(cell)?.find((each) => each.name === name)?.opsPerSecond ?? Number.NaN;
  const found = Object.fromEntries(
    ratios.map(([name, cell, others]) => [
      name,
      Number((rate(cell, ours) / Math.max(...others.map((other) => rate(cell, other)))).toFixed(2)),
    ]),
  );
  const late = cells.flatMap(({ name }) => {
    const p99 = (who: string) => byCell.get(name)?.find((each) => each.name === who)?.p99Ms ?? Number.NaN;
    const faster = [textbook, rlfPostgres].filter((other) => p99(other) <= p99(ours));
    return faster.length > 0 ? [`p99 in "${name}" is not below that of ${faster.join(" and ")}`] : [];
  });
  return {
    suite: "quota",
    machine: machine(versions[0].version),
    rows,
    ratios: { ...found, history_100_vs_1m: Number(ratio.toFixed(2)) },
    notes: [
      `Redis ${redisServers[0]?.version}. The default durability of its package: a snapshot now and then; what was written since is lost in a crash.`,
      `The Redis ratios are against the faster of the two settings.`,
      ...(late.length > 0
        ? late
        : ["p99 of holdfast/quota is below that of both PostgreSQL contestants in every cell."]),
    ],
  };
}
