/**
 * The same small shop on each ORM: an order counts against its user's limit, takes stock and leaves a receipt to be sent, all
 * in one transaction of the ORM's own.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { QuotaExceededError, quota } from "holdfast/quota";
import { InsufficientStockError, stock } from "holdfast/stock";
import { Pool } from "pg";
import { command } from "./support.ts";

export interface Receipt {
  readonly orderId: string;
}

export interface Orders {
  /** Throws if the user has had enough, or there is none left; then nothing is written. */
  order(userId: string, sku: string): Promise<void>;
  /** Sends receipts until it is stopped. */
  work(): AsyncDisposable;
  close(): Promise<void>;
}

/** What each user may order in a day. */
export const daily = { name: "orders", limit: 6, per: "day" } as const;

const table = `CREATE TABLE purchase (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  user_id text NOT NULL,
  sku text NOT NULL,
  receipt boolean NOT NULL DEFAULT false
)`;

export interface Result {
  readonly sold: number;
  readonly refused: number;
  readonly counted: number;
  readonly left: number;
  readonly receipts: number;
}

/** Two users want ten caps each, and may have six; there are ten. */
export async function demo(url: string, open: (url: string) => Promise<Orders>): Promise<Result> {
  const pool = new Pool({ connectionString: url });
  const hf = holdfast(fromPg(pool));
  await hf.migrate();
  await pool.query(table);
  const shop = await open(url);
  try {
    await stock(hf).adjustTo("CAP", 10);
    const users = Array.from({ length: 20 }, (_, i) => (i % 2 === 0 ? "ada" : "bob"));
    const answers = await Promise.allSettled(users.map((user) => shop.order(user, "CAP")));
    const failed = answers.flatMap((each) => (each.status === "rejected" ? [each.reason as unknown] : []));
    for (const error of failed)
      if (!(error instanceof QuotaExceededError || error instanceof InsufficientStockError)) throw error;
    const receipts = queue<Receipt>(hf, "receipts");
    {
      await using _worker = shop.work();
      const busy = async () => {
        const { waiting, delayed, running } = await receipts.counts();
        return waiting + delayed + running > 0;
      };
      while (await busy()) await sleep(20);
    }
    const limit = quota(hf, daily);
    const used = await Promise.all(["ada", "bob"].map(async (user) => (await limit.peek(user)).used));
    const { rows } = await pool.query<{ sold: number; receipts: number }>(
      "SELECT count(*)::int AS sold, count(*) FILTER (WHERE receipt)::int AS receipts FROM purchase",
    );
    return {
      sold: rows[0]?.sold ?? 0,
      refused: failed.length,
      counted: used.reduce((sum, each) => sum + each, 0),
      left: (await stock(hf).level("CAP")).onHand,
      receipts: rows[0]?.receipts ?? 0,
    };
  } finally {
    await shop.close();
    await pool.query("DROP TABLE purchase");
    await hf.close();
    await pool.end();
  }
}

export function start(file: string, open: (url: string) => Promise<Orders>): Promise<void> {
  return command(
    file,
    (url) => demo(url, open),
    ({ sold, refused, left, receipts }) =>
      `${sold} orders, ${refused} refused, ${left} caps left, ${receipts} receipts`,
  );
}
