import { startPostgres } from "@holdfast/cli";
import { holdfast, key } from "holdfast";
import { fromPostgres } from "holdfast/postgres";
import { Client, Pool } from "pg";
import postgres, { type ISql } from "postgres";
import {
  type Body,
  type Driver,
  type Send,
  bytes,
  fillPostgres,
  manyUsers,
  pgDriver,
  postgresTables,
  quota,
  sumOf,
  twoStatements,
  userOf,
} from "../../../packages/cli/src/bench/locks.ts";
import { startDelay } from "../delay.ts";
import { type Contestant, alternate } from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";
import { ping } from "../ping.ts";

/**
 * Two per core of a small machine. With eight the two cores that server, client and the delaying process share are
 * saturated, and a "1 ms" round trip takes 2.5: the delayed cells then measure the processor (1.50 instead of 1.74).
 */
const callers = 4;

/** The delayed one goes through a process that holds everything back for half of it in either direction. */
const wires = [
  { name: "loopback", roundTripMs: 0 },
  { name: "1ms", roundTripMs: 1 },
] as const;

/** Check and write in one go. After the lock, as a statement of its own, it sees what the last holder wrote. */
async function oneStatement(send: Send, user: number): Promise<void> {
  await send(
    `INSERT INTO image (user_id, bytes) SELECT $1::bigint, $2::bigint
       WHERE (${sumOf}) + $2 <= $3::bigint`,
    [user, bytes, quota],
  );
}

/** Prepared, as its tagged templates are, and its `unsafe` by itself is not. */
function byPostgres(sql: ISql): Send {
  return (text, values) => sql.unsafe(text, values as number[], { prepare: true });
}

const onPg = (url: string, size: number): Driver => pgDriver(new Pool({ connectionString: url, max: size }));

function onPostgresJs(url: string, size: number): Driver {
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
    drivers: [onPg, onPostgresJs],
  },
  // For information: the longer the body, the less the way in and out of the transaction weighs.
  {
    name: "two statements, 1,000 users",
    suffix: "_two_statements",
    users: manyUsers,
    body: twoStatements(),
    drivers: [onPg],
  },
  // For information: all callers want one lock, so what counts is how long it is held. The user's history grows
  // with every operation, so the faster one has the longer sums.
  {
    name: "one statement, one hot user",
    suffix: "_hot_user",
    users: 1,
    body: oneStatement,
    drivers: [onPg],
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
  for (const statement of postgresTables) await admin.query(statement);

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
      const reset = (): Promise<void> => fillPostgres(admin, users);
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
  return [
    { name: `holdfast, ${driver.name}`, call: (turn) => driver.ours(userOf(turn, users), body) },
    { name: `textbook, ${driver.name}`, call: (turn) => driver.textbook(userOf(turn, users), body) },
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
