/** One process of many that move money between a few accounts, in all directions at once. */
import { holdfast, rows, sql } from "holdfast";
import { Pool } from "pg";
import { backendNamed } from "../backends.ts";
import { random } from "../harness/random.ts";

export interface TransferArg {
  backend: string;
  url: string;
  /** `naive`: SELECT … FOR UPDATE of one account, then of the other, as they come; `one by one`: the same, by our locks. */
  how: "rows" | "lockAll" | "one by one" | "naive";
  calls: number;
  callers: number;
  accounts: number;
  seed: number;
}

export interface TransferResult {
  done: number;
  deadlocks: number;
  errors: string[];
}

const deadlock = new Set(["40P01", "HF_DEADLOCK"]);

export default async function transfer(arg: TransferArg): Promise<TransferResult> {
  const next = random(arg.seed ^ process.pid);
  const result: TransferResult = { done: 0, deadlocks: 0, errors: [] };
  const { move, close } = await mover(arg);
  let left = arg.calls;
  const caller = async (): Promise<void> => {
    while (left-- > 0) {
      const from = 1 + Math.floor(next() * arg.accounts);
      const to = 1 + ((from + Math.floor(next() * (arg.accounts - 1))) % arg.accounts);
      try {
        await move(from, to, 1 + Math.floor(next() * 5));
        result.done++;
      } catch (error) {
        if (deadlock.has(String((error as { code?: unknown }).code))) result.deadlocks++;
        else result.errors.push(String(error));
      }
    }
  };
  await Promise.all(Array.from({ length: arg.callers }, caller));
  await close();
  return result;
}

interface Mover {
  move(from: number, to: number, amount: number): Promise<void>;
  close(): Promise<void>;
}

async function mover({ backend, url, how, callers }: TransferArg): Promise<Mover> {
  if (how === "naive") {
    // Found sooner than after the default second, so that the test need not wait for each.
    const pool = new Pool({ connectionString: url, max: callers, options: "-c deadlock_timeout=20ms" });
    return { move: (...args) => naive(pool, ...args), close: () => pool.end() };
  }
  const site = await backendNamed(backend).open(url);
  // Never twice: a deadlock that was retried would not be seen here, only by the server.
  const hf = holdfast(site.database, { wait: 110_000, deadline: 120_000, retry: false });
  return {
    move: (from, to, amount) =>
      hf.transaction(async (tx) => {
        const keys = [from, to];
        const one = (id: number) => tx.row<{ balance: number | string }>("account", id);
        const [found] =
          how === "rows"
            ? [await tx.rows<{ balance: number | string }>("account", keys)]
            : how === "one by one"
              ? [[await one(from), await one(to)]]
              : await tx.lockAll([rows<{ balance: number | string }>("account", keys)]);
        const [a, b] = found.map(({ balance }) => Number(balance)) as [number, number];
        if (a < amount) return;
        await tx.query(sql`UPDATE account SET balance = ${a - amount} WHERE id = ${from}`);
        await tx.query(sql`UPDATE account SET balance = ${b + amount} WHERE id = ${to}`);
      }),
    async close() {
      await hf.close();
      await site.close();
    },
  };
}

async function naive(pool: Pool, from: number, to: number, amount: number): Promise<void> {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    const read = async (id: number) =>
      (await client.query<{ balance: number }>("SELECT balance FROM account WHERE id = $1 FOR UPDATE", [id]))
        .rows[0]?.balance ?? 0;
    const [a, b] = [await read(from), await read(to)];
    if (a >= amount) {
      await client.query("UPDATE account SET balance = $1 WHERE id = $2", [a - amount, from]);
      await client.query("UPDATE account SET balance = $1 WHERE id = $2", [b + amount, to]);
    }
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}
