import diagnostics from "node:diagnostics_channel";
import { type Holdfast, key, rows } from "holdfast";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const accounts = "holdfast_example_account";
const log = "holdfast_example_transfer";
const transfersPerDay = 50;

interface Account {
  id: string;
  balance: number;
}

/**
 * A to B and B to A at the same time: locked one after the other, each would have the account that the other one
 * wants. `tx.rows` locks in the order of the keys, whatever order they are asked for in, and returns them in that one.
 */
async function transfer(
  hf: Holdfast<ClientBase>,
  from: string,
  to: string,
  amount: number,
): Promise<boolean> {
  return hf.transaction(async (tx) => {
    const [payer] = await tx.rows<Account>(accounts, [from, to]);
    if (!payer || payer.balance < amount) return false;
    await move(tx.client, from, to, amount);
    return true;
  });
}

/**
 * The same with a limit per day. The transfers to be counted are rows that are not there yet, so a key stands for
 * them. Key and rows are taken in one call: in one order that is the same for everybody.
 */
async function limited(hf: Holdfast<ClientBase>, from: string, to: string, amount: number): Promise<boolean> {
  return hf.transaction(async (tx) => {
    const [, [payer]] = await tx.lockAll([key("transfers-of", from), rows<Account>(accounts, [from, to])]);
    const { rows: counted } = await tx.client.query<{ today: number }>(
      `SELECT count(*)::int AS today FROM ${log} WHERE payer = $1 AND at >= current_date`,
      [from],
    );
    if (!payer || payer.balance < amount || (counted[0]?.today ?? 0) >= transfersPerDay) return false;
    await move(tx.client, from, to, amount);
    await tx.client.query(`INSERT INTO ${log} (payer, payee, amount) VALUES ($1, $2, $3)`, [
      from,
      to,
      amount,
    ]);
    return true;
  });
}

async function move(client: ClientBase, from: string, to: string, amount: number): Promise<void> {
  await client.query(
    `UPDATE ${accounts} SET balance = balance + CASE id WHEN $1 THEN -$3::int ELSE $3::int END WHERE id IN ($1, $2)`,
    [from, to, amount],
  );
}

export interface Result {
  readonly done: number;
  readonly refused: number;
  /** Of the limited ones, per payer. */
  readonly limited: Readonly<Record<string, number>>;
  readonly balances: Readonly<Record<string, number>>;
  /** Transactions that were run again, as they are after a deadlock. */
  readonly retries: number;
}

/** Two accounts with 1,000 each, and 300 transfers of 1 between them, in both directions at once. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    [accounts]: "id text PRIMARY KEY, balance int NOT NULL CHECK (balance >= 0)",
    [log]:
      "payer text NOT NULL, payee text NOT NULL, amount int NOT NULL, at timestamptz NOT NULL DEFAULT now()",
  });
  const { pool, hf } = place;
  await pool.query(`INSERT INTO ${accounts} VALUES ('A', 1000), ('B', 1000)`);
  let retries = 0;
  const count = () => void retries++;
  diagnostics.subscribe("holdfast:transaction:retry", count);
  try {
    const calls = Array.from({ length: 300 }, (_, i) => {
      const [from, to] = i % 2 === 0 ? (["A", "B"] as const) : (["B", "A"] as const);
      return i % 4 < 2 ? transfer(hf, from, to, 1) : limited(hf, from, to, 1);
    });
    const answers = await Promise.all(calls);
    const done = answers.filter(Boolean).length;
    const { rows: now } = await pool.query<Account>(`SELECT * FROM ${accounts} ORDER BY id`);
    const { rows: logged } = await pool.query<{ payer: string; count: number }>(
      `SELECT payer, count(*)::int FROM ${log} GROUP BY payer ORDER BY payer`,
    );
    return {
      done,
      refused: answers.length - done,
      limited: Object.fromEntries(logged.map(({ payer, count: times }) => [payer, times])),
      balances: Object.fromEntries(now.map(({ id, balance }) => [id, balance])),
      retries,
    };
  } finally {
    diagnostics.unsubscribe("holdfast:transaction:retry", count);
  }
}

await command(import.meta.url, main, ({ done, refused, balances, retries }) => {
  const total = Object.values(balances).reduce((sum, balance) => sum + balance, 0);
  return `${done} transfers done, ${refused} refused, ${retries} run again; A has ${balances["A"]} and B has ${balances["B"]}, ${total} together`;
});
