import { setTimeout as sleep } from "node:timers/promises";
import { type HazardError, type Holdfast, holdfast, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import type { PoolClient } from "pg";
import { command, hazardOf, open } from "../support.ts";

const orders = "holdfast_example_order";
const ledger = "holdfast_example_ledger";

interface Order {
  id: number;
  amount: number;
  status: "new" | "accepted" | "rejected";
  version: number;
}

type Verdict = "accepted" | "rejected";

/**
 * The service takes seconds, so nothing is locked and no transaction is open while it thinks. The order may change
 * meanwhile, and then the verdict is about an order that is no more: the version tells, and it is asked again.
 */
async function check(
  hf: Holdfast<PoolClient>,
  id: number,
  ask: (order: Order, signal: AbortSignal) => Promise<Verdict>,
): Promise<Order> {
  return versioned<Order, PoolClient>(hf, orders).updateAfter(id, ask, async (order, verdict, tx) => {
    // Under the lock of the row, in one transaction with it.
    if (verdict === "accepted")
      await tx.client.query(`INSERT INTO ${ledger} VALUES ($1, $2)`, [order.id, order.amount]);
    return { status: verdict };
  });
}

/** As it is often written: the order cannot change meanwhile, and whoever wants it, the customer too, waits for the service. */
async function checkUnderLock(
  hf: Holdfast<PoolClient>,
  id: number,
  ask: (order: Order) => Promise<Verdict>,
): Promise<void> {
  await hf.transaction(async (tx) => {
    const order = await tx.row<Order>(orders, id);
    const verdict = await ask(order);
    await tx.client.query(`UPDATE ${orders} SET status = $2 WHERE id = $1`, [id, verdict]);
  });
}

export interface Result {
  /** What the service was asked about. */
  readonly asked: readonly number[];
  readonly status: string;
  readonly amount: number;
  /** Charged, as the ledger has it. */
  readonly charged: number;
  /** What Holdfast says of the other way, with `hazards: "throw"`, as in tests. */
  readonly underLock: string;
}

/** While the service looks at an order of 100, the customer makes it one of 9,000. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    [orders]: "id int PRIMARY KEY, amount int NOT NULL, status text NOT NULL, version int NOT NULL DEFAULT 0",
    [ledger]: "order_id int NOT NULL, amount int NOT NULL",
  });
  const { pool, hf } = place;
  await pool.query(`INSERT INTO ${orders} VALUES (1, 100, 'new')`);
  const asked: number[] = [];
  const { status, amount } = await check(hf, 1, async (order, signal) => {
    asked.push(order.amount);
    // The customer is not held up by the check. Whoever writes to such a table counts the version up.
    if (asked.length === 1) await versioned<Order>(hf, orders).update(1, () => ({ amount: 9_000 }));
    await sleep(50, undefined, { signal });
    return order.amount < 1_000 ? "accepted" : "rejected";
  });
  await using strict = holdfast(fromPg(pool), { hazards: "throw" });
  const underLock = await checkUnderLock(strict, 1, async () => {
    await sleep(50);
    return "accepted";
  }).then(
    () => "no hazard",
    (error: unknown) => hazardOf(error as HazardError),
  );
  const { rows } = await pool.query<{ charged: number }>(
    `SELECT coalesce(sum(amount), 0)::int AS charged FROM ${ledger}`,
  );
  return { asked, status, amount, charged: rows[0]?.charged ?? Number.NaN, underLock };
}

await command(
  import.meta.url,
  main,
  ({ asked, status, amount, charged, underLock }) =>
    `The service was asked about ${asked.join(", then about ")}: the order of ${amount} is ${status}, ${charged} charged. ` +
    `Asked under a lock: ${underLock}`,
);
