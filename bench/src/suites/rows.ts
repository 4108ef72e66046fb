import { startPostgres } from "@holdfast/cli";
import { LockTimeoutError, StaleVersionError } from "holdfast";
import { Client, Pool } from "pg";
import {
  type Operation,
  choice,
  fill,
  groundOn,
  idsOf,
  missing,
  oneRow,
  table,
  twoRows,
} from "../../../packages/cli/src/bench/rows.ts";
import { type Delay, startDelay } from "../delay.ts";
import { type Measured, alternate, median } from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";
import { ping } from "../ping.ts";

/** As in the suite of locks: more saturate the two cores that server, client and the delaying process share. */
const callers = 4;
const poolOfChoice = 10;

const wires = [
  { name: "loopback", roundTripMs: 0 },
  { name: "1ms", roundTripMs: 1 },
] as const;

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
  await admin.query(table);

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
  const ground = groundOn(poolOn(url, cell.poolSize));
  const failures = new Map<string, number>();
  let done = 0;
  const contestants = Object.entries(cell.operations).map(([name, operation]) => {
    const call = operation(ground);
    failures.set(name, 0);
    return {
      name,
      async call(turn: number) {
        try {
          await call(...idsIn(turn, cell));
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
    await fill(admin, cell.rows);
  };
  await admin.query("TRUNCATE account");
  const measured = await alternate({ contestants, callers: cell.callers, seconds, reset });
  await check(admin, cell, done);
  await ground.pool.end();
  return measured.map((each) => ({ ...each, failures: failures.get(each.name) ?? 0 }));
}

/** Speed at the price of lost updates would be worth nothing: what is missing is what was taken. */
async function check(admin: Client, { conserved }: Cell, done: number): Promise<void> {
  const found = await missing(admin);
  const expected = conserved ? 0 : done;
  if (found !== expected) throw new Error(`${found} were taken in ${expected} operations`);
}

const poolOn = (url: string, size: number): Pool => new Pool({ connectionString: url, max: size });

const idsIn = (turn: number, { rows, hot }: Cell): [id: number, other: number] =>
  hot ? [1, 2] : idsOf(turn, rows);

/** Of one operation, once the connection is there and the client knows the table. */
async function countRoundTrips(cell: Cell, delay: Delay, url: string): Promise<Map<string, number>> {
  const ground = groundOn(poolOn(url, 1));
  const counted = new Map<string, number>();
  const times = 10;
  for (const [name, operation] of Object.entries(cell.operations)) {
    const call = operation(ground);
    await call(1, 2);
    const before = await delay.roundTrips();
    for (let turn = 0; turn < times; turn++) await call(...idsIn(turn, cell));
    counted.set(name, ((await delay.roundTrips()) - before) / times);
  }
  await ground.pool.end();
  return counted;
}
