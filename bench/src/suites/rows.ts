import { startPostgres } from "@holdfast/cli";
import { type Holdfast, LockTimeoutError, StaleVersionError, holdfast, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, type ClientBase, Pool, type PoolClient } from "pg";
import { type Delay, startDelay } from "../delay.ts";
import {
  type BenchRow,
  type Measured,
  type Report,
  type SuiteOptions,
  alternate,
  machine,
  median,
  scatter,
} from "../measure.ts";
import { ping } from "../ping.ts";

/** As in the suite of locks: more saturate the two cores that server, client and the delaying process share. */
const callers = 4;
const poolOfChoice = 10;
const balance = 1_000_000_000;

const wires = [
  { name: "loopback", roundTripMs: 0 },
  { name: "1ms", roundTripMs: 1 },
] as const;

interface Account {
  id: string;
  owner: string;
  balance: number;
  version: number;
}

/** The pool that all contestants of a cell share, and what is made of it. */
interface Ground {
  readonly pool: Pool;
  readonly hf: Holdfast<PoolClient>;
}

/** One operation: takes 1 from a row. A transfer gives it to another one. */
type Operation = (ground: Ground) => (id: number, other: number) => Promise<void>;

/** Decided in the application, as a row is locked for nothing else. */
function less({ balance: now }: Account, amount = 1): number {
  if (now < amount) throw new Error("The balance was not to be used up");
  return now - amount;
}

const setBalance = "UPDATE account SET balance = $2 WHERE id = $1";
const move =
  "UPDATE account SET balance = balance + CASE id WHEN $1 THEN -1 ELSE 1 END WHERE id = $1 OR id = $2";

/** What most people write. It waits for ever. */
function byHand(body: (client: ClientBase, id: number, other: number) => Promise<void>): Operation {
  return ({ pool }) =>
    async (id, other) => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        await body(client, id, other);
        await client.query("COMMIT");
      } catch (error) {
        await client.query("ROLLBACK");
        throw error;
      } finally {
        client.release();
      }
    };
}

/** A wait that ends, and a timeout that does not go on to apply to what follows: two round trips more. */
function patiently<T>(select: (client: ClientBase) => Promise<T>): (client: ClientBase) => Promise<T> {
  return async (client) => {
    await client.query("SET LOCAL lock_timeout = '5s'");
    const result = await select(client);
    await client.query("SET LOCAL lock_timeout = DEFAULT");
    return result;
  };
}

const selectOne = (id: number) => async (client: ClientBase) =>
  (await client.query<Account>("SELECT * FROM account WHERE id = $1 FOR UPDATE", [id])).rows[0] as Account;

const selectTwo = (ids: number[]) => async (client: ClientBase) =>
  (await client.query<Account>("SELECT * FROM account WHERE id = ANY ($1) ORDER BY id FOR UPDATE", [ids]))
    .rows;

/** Rows come in the order of their ids there, and in the order of the call with Holdfast. */
function payer(found: readonly Account[], id: number): Account {
  return found.find((row) => Number(row.id) === id) as Account;
}

const oneRow: Readonly<Record<string, Operation>> = {
  holdfast:
    ({ hf }) =>
    (id) =>
      hf.transaction(async (tx) => {
        const row = await tx.row<Account>("account", id);
        await tx.client.query(setBalance, [id, less(row)]);
      }),
  "by hand": byHand(async (client, id) => {
    const row = await selectOne(id)(client);
    await client.query(setBalance, [id, less(row)]);
  }),
  careful: byHand(async (client, id) => {
    const row = await patiently(selectOne(id))(client);
    await client.query(setBalance, [id, less(row)]);
  }),
};

const twoRows: Readonly<Record<string, Operation>> = {
  holdfast:
    ({ hf }) =>
    (id, other) =>
      hf.transaction(async (tx) => {
        const found = await tx.rows<Account>("account", [id, other]);
        less(payer(found, id));
        await tx.client.query(move, [id, other]);
      }),
  "by hand": byHand(async (client, id, other) => {
    const found = await selectTwo([id, other])(client);
    less(payer(found, id));
    await client.query(move, [id, other]);
  }),
  careful: byHand(async (client, id, other) => {
    const found = await patiently(selectTwo([id, other]))(client);
    less(payer(found, id));
    await client.query(move, [id, other]);
  }),
};

const choice: Readonly<Record<string, Operation>> = {
  versioned: ({ hf }) => {
    // Nobody is to give up: who reads in vain is a matter of the time it takes.
    const accounts = versioned<Account>(hf, "account", { attempts: 100_000 });
    return async (id) => void (await accounts.update(id, (row) => ({ balance: less(row) })));
  },
  pessimistic: oneRow["holdfast"] as Operation,
  // For comparison: where the whole check fits into the statement, nothing else is needed.
  conditional:
    ({ pool }) =>
    async (id) =>
      void (await pool.query("UPDATE account SET balance = balance - 1 WHERE id = $1 AND balance >= 1", [
        id,
      ])),
};

interface Cell {
  readonly name: string;
  readonly operations: Readonly<Record<string, Operation>>;
  /** In the table; `hot`: all operations are about the first of them. */
  readonly rows: number;
  readonly hot: boolean;
  readonly callers: number;
  readonly poolSize: number;
  /** What the operations together leave as it was. */
  readonly conserved: boolean;
  readonly wires: readonly string[];
  /** The names of its ratios: ours, the other, how it is called. */
  readonly ratios: readonly (readonly [ours: string, other: string, name: string])[];
}

const byHandCell = {
  rows: 1000,
  hot: false,
  callers,
  poolSize: callers,
  wires: ["loopback", "1ms"],
} as const;

const cells: readonly Cell[] = [
  // The one the bar is for, on loopback: two callers want the same row only by chance.
  {
    ...byHandCell,
    name: "one of 1,000 rows",
    operations: oneRow,
    conserved: false,
    ratios: [
      ["holdfast", "by hand", "rows_vs_by_hand"],
      ["holdfast", "careful", "rows_vs_careful"],
    ],
  },
  {
    ...byHandCell,
    name: "two of 1,000 rows",
    operations: twoRows,
    conserved: true,
    ratios: [
      ["holdfast", "by hand", "two_rows_vs_by_hand"],
      ["holdfast", "careful", "two_rows_vs_careful"],
    ],
  },
  // Which one to choose: see docs/versions.md.
  ...[1, 8, 64].flatMap((many) =>
    [true, false].map((hot) => ({
      name: `${hot ? "one hot row" : "10,000 rows"}, ${many} caller${many === 1 ? "" : "s"}`,
      operations: choice,
      rows: 10_000,
      hot,
      callers: many,
      poolSize: poolOfChoice,
      conserved: false,
      // Through the delay, for information: how much the round trips weigh.
      wires: many === 8 ? ["loopback", "1ms"] : ["loopback"],
      ratios: [
        ["versioned", "pessimistic", `versioned_vs_pessimistic_${hot ? "hot" : "many"}_${many}`],
      ] as const,
    })),
  ),
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
  await admin.query(
    "CREATE TABLE account (id bigint PRIMARY KEY, owner text NOT NULL, balance int NOT NULL, version int NOT NULL DEFAULT 0)",
  );

  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  const notes: string[] = [];
  for (const wire of wires) {
    const delay = await startDelay(server.port, wire.roundTripMs);
    cleanup.defer(() => delay.close());
    // Without a delay the process only counts round trips: nothing is timed through it.
    const url = wire.roundTripMs > 0 ? delay.url(server.url()) : server.url();
    notes.push(`A round trip on ${wire.name}, as SELECT 1 takes it: ${(await ping(url)).toFixed(2)} ms`);
    for (const cell of cells) {
      if (!cell.wires.includes(wire.name)) continue;
      const name = `${wire.name}, ${cell.name}`;
      note(`${name} …`);
      const measured = await measure(cell, admin, url, seconds);
      const roundTrips = await countRoundTrips(cell, delay, delay.url(server.url()));
      for (const { name: contestant, ...figures } of measured)
        rows.push({ cell: name, contestant, ...figures, roundTrips: roundTrips.get(contestant) });
      for (const [ours, other, ratio] of cell.ratios) {
        const key = wire.name === "loopback" ? ratio : `${ratio}_${wire.name}`;
        const byRound = paired(measured, ours, other);
        ratios[key] = Number(median(byRound).toFixed(3));
        notes.push(
          `${key} by round: ${byRound
            .toSorted((a, b) => a - b)
            .map((each) => each.toFixed(2))
            .join(" ")}`,
        );
      }
    }
  }
  return { suite: "rows", machine: machine(versions[0]?.version ?? ""), rows, ratios, notes };
}

/** Round by round: the two of a round are next to each other in time, so what drifts over the rounds cancels out. */
function paired(measured: readonly Measured[], ours: string, other: string): number[] {
  const [a, b] = [ours, other].map((name) => measured.find((each) => each.name === name)?.rounds ?? []);
  return (a ?? []).map((opsPerSecond, i) => opsPerSecond / (b?.[i] ?? Number.NaN));
}

/** All contestants on the same connections, for the same rows in the same order. */
async function measure(
  cell: Cell,
  admin: Client,
  url: string,
  seconds: number,
): Promise<(Measured & { failures: number })[]> {
  const ground = groundOn(url, cell.poolSize);
  const failures = new Map<string, number>();
  let done = 0;
  const contestants = Object.entries(cell.operations).map(([name, operation]) => {
    const call = operation(ground);
    failures.set(name, 0);
    return {
      name,
      async call(turn: number) {
        try {
          await call(...idsOf(turn, cell));
          done++;
        } catch (error) {
          if (!(error instanceof StaleVersionError || error instanceof LockTimeoutError)) throw error;
          failures.set(name, (failures.get(name) ?? 0) + 1);
        }
      },
    };
  });
  const reset = async (): Promise<void> => {
    await check(admin, cell, done);
    done = 0;
    await admin.query("TRUNCATE account");
    await admin.query(
      "INSERT INTO account SELECT i, 'owner of ' || i, $2::int FROM generate_series(1, $1::int) i",
      [cell.rows, balance],
    );
    await admin.query("ANALYZE account");
  };
  await admin.query("TRUNCATE account");
  const measured = await alternate({ contestants, callers: cell.callers, seconds, reset });
  await check(admin, cell, done);
  await ground.pool.end();
  return measured.map((each) => ({ ...each, failures: failures.get(each.name) ?? 0 }));
}

/** Speed at the price of lost updates would be worth nothing: what is missing is what was taken. */
async function check(admin: Client, { conserved }: Cell, done: number): Promise<void> {
  const { rows } = await admin.query<{ missing: string | null }>(
    "SELECT sum($1::bigint - balance) AS missing FROM account",
    [balance],
  );
  const missing = Number(rows[0]?.missing ?? 0);
  const expected = conserved ? 0 : done;
  if (missing !== expected) throw new Error(`${missing} were taken in ${expected} operations`);
}

function groundOn(url: string, size: number): Ground {
  const pool = new Pool({ connectionString: url, max: size });
  return { pool, hf: holdfast(fromPg(pool)) };
}

function idsOf(turn: number, { rows, hot }: Cell): [id: number, other: number] {
  if (hot) return [1, 2];
  const id = Math.floor(scatter(turn) * rows);
  const other = (id + 1 + Math.floor(scatter(turn + 1_000_000) * (rows - 1))) % rows;
  return [id + 1, other + 1];
}

/** Of one operation, once the connection is there and the client knows the table. */
async function countRoundTrips(cell: Cell, delay: Delay, url: string): Promise<Map<string, number>> {
  const ground = groundOn(url, 1);
  const counted = new Map<string, number>();
  const times = 10;
  for (const [name, operation] of Object.entries(cell.operations)) {
    const call = operation(ground);
    await call(1, 2);
    const before = await delay.roundTrips();
    for (let turn = 0; turn < times; turn++) await call(...idsOf(turn, cell));
    counted.set(name, ((await delay.roundTrips()) - before) / times);
  }
  await ground.pool.end();
  return counted;
}
