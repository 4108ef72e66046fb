/**
 * Orders of one line on one hot SKU, and of 3 lines over 1,000 SKUs, that never run out: the textbook with SERIALIZABLE
 * and retries, the textbook with plain FOR UPDATE, a conditional UPDATE in a transaction written by hand, and ours. All of
 * them write a movement per line; ours also knows an id again, keeps a chain of versions and balances, and lets
 * reservations count.
 */
import { startPostgres } from "@holdfast/cli";
import type { Stock } from "holdfast/stock";
import { Pool } from "pg";
import { type Contestant, type Measured, alternate } from "../../../packages/cli/src/bench/measure.ts";
import {
  type Skus,
  apply,
  conditional,
  hot,
  makeShop,
  textbook,
  three,
} from "../../../packages/cli/src/bench/stock.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";

/** More connections than cores do not make PostgreSQL faster; fewer would let callers of the others queue in the client. */
const connections = 20;

const serializable = "textbook: SERIALIZABLE, retried";
const forUpdate = "textbook: FOR UPDATE";
const conditionalByHand = "conditional UPDATE by hand";
const ours = "holdfast/stock";

interface Cell {
  readonly name: string;
  readonly callers: number;
  readonly order: (turn: number) => Skus;
}

const cells: readonly Cell[] = [1, 64, 256].flatMap((callers) => [
  { name: `hot, ${callers}`, callers, order: () => hot },
  { name: `orders, ${callers}`, callers, order: three },
]);

const ratios: readonly (readonly [ratio: string, cell: string, other: string])[] = [
  ["hot64_vs_serializable", "hot, 64", serializable],
  ["hot64_vs_for_update", "hot, 64", forUpdate],
  ["hot64_vs_conditional", "hot, 64", conditionalByHand],
  ["orders64_vs_serializable", "orders, 64", serializable],
  ["orders64_vs_for_update", "orders, 64", forUpdate],
  ["orders64_vs_conditional", "orders, 64", conditionalByHand],
  ["one_vs_for_update", "hot, 1", forUpdate],
];

function isSerialization(error: unknown): boolean {
  const { code } = error as { code?: unknown };
  return code === "40001" || code === "40P01";
}

function contestants(
  pools: Readonly<Record<"serializable" | "forUpdate" | "conditional", Pool>>,
  shop: Stock,
): (cell: Cell) => Contestant[] {
  let orders = 0;
  const reference = () => String(++orders);
  return ({ order }) => [
    {
      name: serializable,
      async call(turn) {
        // With the pause that its readers are told to make: full jitter, doubled each time.
        for (let attempt = 0; ; attempt++) {
          try {
            return await textbook(
              pools.serializable,
              order(turn),
              reference(),
              "BEGIN ISOLATION LEVEL SERIALIZABLE",
            );
          } catch (error) {
            if (!isSerialization(error)) throw error;
            await new Promise((resolve) =>
              setTimeout(resolve, Math.random() * Math.min(100, 2 * 2 ** attempt)),
            );
          }
        }
      },
    },
    {
      name: forUpdate,
      call: (turn) => textbook(pools.forUpdate, order(turn), reference()),
    },
    {
      name: conditionalByHand,
      call: (turn) => conditional(pools.conditional, order(turn), reference()),
    },
    { name: ours, call: (turn) => apply(shop, order(turn), reference()) },
  ];
}

export async function run({ seconds, note: tell }: SuiteOptions): Promise<Report> {
  await using cleanup = new AsyncDisposableStack();
  // As it comes: fsync and synchronous_commit are on.
  const server = await startPostgres();
  cleanup.defer(() => server.stop());
  const pool = () => {
    const made = new Pool({ connectionString: server.url(), max: connections });
    // Sessions that end after their server do not hide what went wrong before.
    made.on("error", () => {});
    cleanup.defer(() => made.end());
    return made;
  };
  const pools = { serializable: pool(), forUpdate: pool(), conditional: pool() };
  const admin = pool();
  const shop = await makeShop(admin);
  const { rows: versions } = await admin.query("SELECT current_setting('server_version') AS version");

  const make = contestants(pools, shop);
  const rows: BenchRow[] = [];
  const byCell = new Map<string, readonly Measured[]>();
  for (const cell of cells) {
    tell(`${cell.name} callers …`);
    const measured = await alternate({
      contestants: make(cell),
      callers: cell.callers,
      seconds,
      reset: async () => {},
    });
    byCell.set(cell.name, measured);
    for (const { name, ...figures } of measured) rows.push({ cell: cell.name, contestant: name, ...figures });
  }

  const of = (cell: string, name: string) => byCell.get(cell)?.find((each) => each.name === name);
  const found = Object.fromEntries(
    ratios.map(([name, cell, other]) => [
      name,
      Number(((of(cell, ours)?.opsPerSecond ?? 0) / (of(cell, other)?.opsPerSecond ?? 0)).toFixed(2)),
    ]),
  );
  const late = cells.flatMap(({ name }) => {
    const p99 = (who: string) => of(name, who)?.p99Ms ?? Number.NaN;
    const faster = [serializable, forUpdate, conditionalByHand].filter((other) => p99(other) <= p99(ours));
    return faster.length > 0 ? [`p99 in "${name}" is not below that of ${faster.join(" and ")}`] : [];
  });
  // Figures of orders that were not taken exactly would be worth nothing.
  const { ok, findings } = await shop.reconcile();
  if (!ok) throw new Error(`the books do not add up: ${findings.map(({ text }) => text).join("; ")}`);
  return {
    suite: "stock",
    machine: machine(versions[0].version),
    rows,
    ratios: found,
    notes: late.length > 0 ? late : ["p99 of holdfast/stock is the lowest in every cell."],
  };
}
