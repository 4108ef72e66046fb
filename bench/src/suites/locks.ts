import { startPostgres } from "@holdfast/cli";
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { Client, type ClientBase, Pool } from "pg";
import postgres, { type ISql } from "postgres";
import { startDelay } from "../delay.ts";
import {
  type BenchRow,
  type Contestant,
  type Report,
  type SuiteOptions,
  alternate,
  machine,
  scatter,
} from "../measure.ts";
import { ping } from "../ping.ts";

/**
 * Two per core of a small machine. With eight the two cores that server, client and the delaying process share are
 * saturated, and a "1 ms" round trip takes 2.5: the delayed cells then measure the processor (1.50 instead of 1.74).
 */
const callers = 4;
const manyUsers = 1000;
const historyPerUser = 10;
const bytes = 1000;
/** Never reached: every operation writes, so all contestants do the same work. */
const quota = 1_000_000_000_000;

/** The delayed one goes through a process that holds everything back for half of it in either direction. */
const wires = [
  { name: "loopback", roundTripMs: 0 },
  { name: "1ms", roundTripMs: 1 },
] as const;

const sumOf = "SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE user_id = $1";

/** Check and write in one go. After the lock, as a statement of its own, it sees what the last holder wrote. */
async function oneStatement(send: Send, user: number): Promise<void> {
  await send(
    `INSERT INTO image (user_id, bytes) SELECT $1::bigint, $2::bigint
       WHERE (${sumOf}) + $2 <= $3::bigint`,
    [user, bytes, quota],
  );
}

/** Check, decide in the application, write. */
async function twoStatements(send: Send, user: number): Promise<void> {
  const [row] = await send(sumOf, [user]);
  if (Number(row?.["used"]) + bytes > quota) throw new Error("The quota was not to be reached");
  await send("INSERT INTO image (user_id, bytes) VALUES ($1, $2)", [user, bytes]);
}

type Send = (text: string, values: number[]) => Promise<readonly Record<string, unknown>[]>;
type Body = (send: Send, user: number) => Promise<void>;

/** One client, and the same operation on it in two ways. */
interface Driver {
  readonly name: string;
  ours(user: number, body: Body): Promise<void>;
  /**
   * What a careful programmer writes by hand: a lock that is not waited for forever, and whose timeout does not go
   * on to apply to the body's own waits. With one statement in the body it is six round trips.
   */
  textbook(user: number, body: Body): Promise<void>;
  close(): Promise<void>;
}

function byPg(client: ClientBase): Send {
  return async (text, values) => (await client.query<Record<string, unknown>>(text, values)).rows;
}

/** Prepared, as its tagged templates are, and its `unsafe` by itself is not. */
function byPostgres(sql: ISql): Send {
  return (text, values) => sql.unsafe(text, values, { prepare: true });
}

function pgDriver(url: string, size: number): Driver {
  const pool = new Pool({ connectionString: url, max: size });
  const hf = holdfast(fromPg(pool));
  return {
    name: "pg",
    ours: (user, body) => hf.transaction({ lock: key("upload", user) }, (tx) => body(byPg(tx.client), user)),
    async textbook(user, body) {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        await client.query("SET LOCAL lock_timeout = '5s'");
        await client.query("SELECT pg_advisory_xact_lock(hashtext($1))", [`upload:${user}`]);
        await client.query("SET LOCAL lock_timeout = DEFAULT");
        await body(byPg(client), user);
        await client.query("COMMIT");
      } catch (error) {
        await client.query("ROLLBACK");
        throw error;
      } finally {
        client.release();
      }
    },
    close: () => pool.end(),
  };
}

function postgresDriver(url: string, size: number): Driver {
  const sql = postgres(url, { max: size });
  const hf = holdfast(fromPostgres(sql));
  return {
    name: "postgres.js",
    ours: (user, body) =>
      hf.transaction({ lock: key("upload", user) }, (tx) => body(byPostgres(tx.client), user)),
    async textbook(user, body) {
      await sql.begin(async (tx) => {
        await tx`SET LOCAL lock_timeout = '5s'`;
        await tx`SELECT pg_advisory_xact_lock(hashtext(${`upload:${user}`}))`;
        await tx`SET LOCAL lock_timeout = DEFAULT`;
        await body(byPostgres(tx), user);
      });
    },
    close: () => sql.end(),
  };
}

interface Cell {
  readonly name: string;
  /** How its ratios end. */
  readonly suffix: string;
  readonly users: number;
  readonly body: Body;
  readonly drivers: readonly ((url: string, size: number) => Driver)[];
}

const cells: readonly Cell[] = [
  // The one the bars are for, with pg: two callers want the same lock only by chance, so it shows what the calls cost.
  {
    name: "one statement, 1,000 users",
    suffix: "",
    users: manyUsers,
    body: oneStatement,
    drivers: [pgDriver, postgresDriver],
  },
  // For information: the longer the body, the less the way in and out of the transaction weighs.
  {
    name: "two statements, 1,000 users",
    suffix: "_two_statements",
    users: manyUsers,
    body: twoStatements,
    drivers: [pgDriver],
  },
  // For information: all callers want one lock, so what counts is how long it is held. The user's history grows
  // with every operation, so the faster one has the longer sums.
  {
    name: "one statement, one hot user",
    suffix: "_hot_user",
    users: 1,
    body: oneStatement,
    drivers: [pgDriver],
  },
];

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  await using cleanup = new AsyncDisposableStack();
  // As it comes: fsync and synchronous_commit are on.
  const server = await startPostgres();
  cleanup.defer(() => server.stop());
  const admin = new Client({ connectionString: server.url() });
  await admin.connect();
  cleanup.defer(() => admin.end());
  const { rows: versions } = await admin.query<{ version: string }>(
    "SELECT current_setting('server_version') AS version",
  );
  await admin.query("CREATE TABLE image (user_id bigint NOT NULL, bytes bigint NOT NULL)");
  await admin.query("CREATE INDEX ON image (user_id)");

  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  const notes: string[] = [];
  for (const wire of wires) {
    const delay = await startDelay(server.port, wire.roundTripMs);
    cleanup.defer(() => delay.close());
    // Without a delay the process only counts round trips: nothing is timed through it.
    const url = wire.roundTripMs > 0 ? delay.url(server.url()) : server.url();
    notes.push(`A round trip on ${wire.name}, as SELECT 1 takes it: ${(await ping(url)).toFixed(2)} ms`);
    for (const { name, suffix, users, body, drivers } of cells) {
      const cell = `${wire.name}, ${name}`;
      note(`${cell} …`);
      const reset = async (): Promise<void> => {
        await admin.query("TRUNCATE image");
        await admin.query(
          "INSERT INTO image SELECT u, $3::int FROM generate_series(1, $1::int) u, generate_series(1, $2::int)",
          [users, historyPerUser, bytes],
        );
        await admin.query("ANALYZE image");
      };
      await reset();
      const roundTrips: number[] = [];
      for (const make of drivers) {
        const single = make(delay.url(server.url()), 1);
        for (const { call } of contestantsOn(single, users, body)) {
          roundTrips.push(await count(delay.roundTrips, call));
        }
        await single.close();
      }
      // Both ways on the same connections, for the same users in the same order.
      const open = drivers.map((make) => make(url, callers));
      const contestants = open.flatMap((driver) => contestantsOn(driver, users, body));
      const measured = await alternate({ contestants, callers, seconds, reset });
      await Promise.all(open.map((driver) => driver.close()));
      for (const [i, { name: contestant, ...figures }] of measured.entries()) {
        rows.push({ cell, contestant, ...figures, roundTrips: roundTrips[i] ?? Number.NaN });
      }
      for (const [i, { name: driver }] of open.entries()) {
        const [ours, textbook] = measured.slice(2 * i).map(({ opsPerSecond }) => opsPerSecond);
        const ratio = (ours ?? Number.NaN) / (textbook ?? Number.NaN);
        const prefix = driver === "pg" ? "" : "postgres_js_";
        ratios[`${prefix}textbook_${wire.name}${suffix}`] = Number(ratio.toFixed(3));
      }
    }
  }
  return { suite: "locks", machine: machine(versions[0]?.version ?? ""), rows, ratios, notes };
}

/** Ours first. */
function contestantsOn(driver: Driver, users: number, body: Body): Contestant[] {
  const userOf = (turn: number): number => 1 + Math.floor(scatter(turn) * users);
  return [
    { name: `holdfast, ${driver.name}`, call: (turn) => driver.ours(userOf(turn), body) },
    { name: `textbook, ${driver.name}`, call: (turn) => driver.textbook(userOf(turn), body) },
  ];
}

/** Round trips of one operation, once the connection is there and the client knows the statements. */
async function count(roundTrips: () => Promise<number>, call: Contestant["call"]): Promise<number> {
  const times = 10;
  await call(0);
  const before = await roundTrips();
  for (let turn = 0; turn < times; turn++) await call(turn);
  return ((await roundTrips()) - before) / times;
}
