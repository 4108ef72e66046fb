/**
 * Orders of one line on one hot SKU, and of 3 lines over 1,000 SKUs, that never run out: the textbook with SERIALIZABLE
 * and retries, the textbook with plain FOR UPDATE, a conditional UPDATE in a transaction written by hand, and ours. All of
 * them write a movement per line; ours also knows an id again, keeps a chain of versions and balances, and lets
 * reservations count.
 */
import { startPostgres } from "@holdfast/cli";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { stock } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import {
  type BenchRow,
  type Contestant,
  type Measured,
  type Report,
  type SuiteOptions,
  alternate,
  machine,
  scatter,
} from "../measure.ts";

const skus = 1000;
const plenty = 1_000_000_000;
/** More connections than cores do not make PostgreSQL faster; fewer would let callers of the others queue in the client. */
const connections = 20;

const serializable = "textbook: SERIALIZABLE, retried";
const forUpdate = "textbook: FOR UPDATE";
const conditional = "conditional UPDATE by hand";
const ours = "holdfast/stock";

/** In canonical order, as somebody writes it who has met a deadlock. */
type Skus = readonly string[];

interface Cell {
  readonly name: string;
  readonly callers: number;
  readonly order: (turn: number) => Skus;
}

const skuOf = (n: number) => `sku-${String(n).padStart(4, "0")}`;
const hot: Skus = [skuOf(0)];

/** Three of them, no two the same. */
function three(turn: number): Skus {
  const found = new Set<string>();
  for (let i = 0; found.size < 3; i++) found.add(skuOf(Math.floor(scatter(turn * 7 + i) * skus)));
  return [...found].toSorted();
}

const cells: readonly Cell[] = [1, 64, 256].flatMap((callers) => [
  { name: `hot, ${callers}`, callers, order: () => hot },
  { name: `orders, ${callers}`, callers, order: three },
]);

const ratios: readonly (readonly [ratio: string, cell: string, other: string])[] = [
  ["hot64_vs_serializable", "hot, 64", serializable],
  ["hot64_vs_for_update", "hot, 64", forUpdate],
  ["hot64_vs_conditional", "hot, 64", conditional],
  ["orders64_vs_serializable", "orders, 64", serializable],
  ["orders64_vs_for_update", "orders, 64", forUpdate],
  ["orders64_vs_conditional", "orders, 64", conditional],
  ["one_vs_for_update", "hot, 1", forUpdate],
];

async function transaction(
  pool: Pool,
  begin: string,
  body: (client: PoolClient) => Promise<void>,
): Promise<void> {
  const client = await pool.connect();
  try {
    await client.query(begin);
    await body(client);
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

// Named: prepared once per connection.
const read = (order: Skus) => ({
  name: "read",
  text: "SELECT sku, stock FROM variant WHERE sku = ANY ($1) ORDER BY sku FOR UPDATE",
  values: [order],
});
const write = (order: Skus) => ({
  name: "write",
  text: "UPDATE variant SET stock = stock - 1 WHERE sku = ANY ($1)",
  values: [order],
});
const take = (sku: string) => ({
  name: "take",
  text: "UPDATE variant SET stock = stock - 1 WHERE sku = $1 AND stock >= 1",
  values: [sku],
});
const note = (order: Skus, reference: string) => ({
  name: "note",
  text: `INSERT INTO movement (sku, quantity, source, reference_type, reference_id)
    SELECT sku, -1, 'ORDER', 'order', $2 FROM unnest($1::text[]) sku`,
  values: [order, reference],
});

async function textbook(client: PoolClient, order: Skus, reference: string): Promise<void> {
  const { rows } = await client.query<{ stock: number }>(read(order));
  if (rows.length < order.length || rows.some(({ stock: left }) => left < 1)) throw new Error("not enough");
  await client.query(write(order));
  await client.query(note(order, reference));
}

function isSerialization(error: unknown): boolean {
  const { code } = error as { code?: unknown };
  return code === "40001" || code === "40P01";
}

function contestants(
  pools: Readonly<Record<"serializable" | "forUpdate" | "conditional" | "ours", Pool>>,
): (cell: Cell) => Contestant[] {
  const shop = stock(holdfast(fromPg(pools.ours)), { name: "bench" });
  let orders = 0;
  const reference = () => String(++orders);
  return ({ order }) => [
    {
      name: serializable,
      async call(turn) {
        // With the pause that its readers are told to make: full jitter, doubled each time.
        for (let attempt = 0; ; attempt++) {
          try {
            return await transaction(pools.serializable, "BEGIN ISOLATION LEVEL SERIALIZABLE", (client) =>
              textbook(client, order(turn), reference()),
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
      call: (turn) =>
        transaction(pools.forUpdate, "BEGIN", (client) => textbook(client, order(turn), reference())),
    },
    {
      name: conditional,
      call: (turn) =>
        transaction(pools.conditional, "BEGIN", async (client) => {
          for (const sku of order(turn))
            if ((await client.query(take(sku))).rowCount === 0) throw new Error("not enough");
          await client.query(note(order(turn), reference()));
        }),
    },
    {
      name: ours,
      async call(turn) {
        const id = reference();
        await shop.apply(
          order(turn).map((sku) => ({ sku, quantity: -1 })),
          { source: "ORDER", reference: { type: "order", id }, externalId: `order-${id}` },
        );
      },
    },
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
  const pools = { serializable: pool(), forUpdate: pool(), conditional: pool(), ours: pool() };
  const admin = pools.ours;
  await admin.query(
    "CREATE TABLE variant (sku text PRIMARY KEY, stock int NOT NULL CHECK (stock >= 0)) WITH (fillfactor = 50)",
  );
  await admin.query(`CREATE TABLE movement (id bigserial PRIMARY KEY, sku text NOT NULL, quantity int NOT NULL,
    source text NOT NULL, reference_type text, reference_id text, at timestamptz NOT NULL DEFAULT now())`);
  await admin.query("CREATE INDEX ON movement (sku, at)");
  await admin.query(
    "INSERT INTO variant SELECT 'sku-' || lpad(n::text, 4, '0'), $1 FROM generate_series(0, $2::int - 1) n",
    [plenty, skus],
  );
  const hf = holdfast(fromPg(admin));
  await hf.migrate();
  const shop = stock(hf, { name: "bench" });
  await shop.apply(Array.from({ length: skus }, (_, i) => ({ sku: skuOf(i), quantity: plenty })));
  await admin.query("VACUUM ANALYZE");
  const { rows: versions } = await admin.query("SELECT current_setting('server_version') AS version");

  const make = contestants(pools);
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
    const faster = [serializable, forUpdate, conditional].filter((other) => p99(other) <= p99(ours));
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
