/** One process of many that add 1 to a counter by reading it and writing what they read plus one. */
import { setTimeout as sleep } from "node:timers/promises";
import {
  type Database,
  type Holdfast,
  type Transaction,
  fenced,
  holdfast,
  key,
  once,
  shared,
  sql,
  versioned,
} from "holdfast";
import { backendNamed } from "../backends.ts";
import { random } from "../harness/random.ts";

export const kinds = [
  "advisory lock",
  "row lock",
  "table lock",
  "lock row",
  "lease and fence",
  "semaphore",
  "reader-writer lease",
  "version",
  "once",
] as const;
export type Kind = (typeof kinds)[number] | "nothing";

export interface IncrementArg {
  backend: string;
  url: string;
  /** One after the other, each on a counter of its own: starting a process takes longer than the calls. */
  kinds: readonly Kind[];
  calls: number;
  callers: number;
  seed: number;
}

export interface IncrementResult {
  kind: Kind;
  /** Calls that came back without an error. */
  done: number;
  errors: string[];
}

class OnPurpose extends Error {}

interface Counter {
  id: number;
  /** Clients differ in what they make of an integer. */
  n: number | bigint | string;
}

export default async function increment(arg: IncrementArg): Promise<IncrementResult[]> {
  const site = await backendNamed(arg.backend).open(arg.url);
  const results: IncrementResult[] = [];
  for (const [i, kind] of arg.kinds.entries()) results.push(await many(site.database, kind, i + 1, arg));
  await site.close();
  return results;
}

async function many(
  database: Database<unknown>,
  kind: Kind,
  id: number,
  { calls, callers, seed }: IncrementArg,
): Promise<IncrementResult> {
  const next = random(seed ^ Math.imul(process.pid, 0x9e3779b1));
  const strategy = kind === "lock row" ? ({ strategy: "lock row" } as const) : {};
  const hf = holdfast(database, { wait: 110_000, deadline: 120_000, ...strategy });
  const result: IncrementResult = { kind, done: 0, errors: [] };

  /** Some calls fail before they write, some after: neither may leave anything behind. */
  const hesitate = async () => {
    if (next() < 0.3) await sleep(next() * 5);
    if (next() < 0.05) throw new OnPurpose();
  };
  const readAndWrite = async (tx: Transaction<unknown>, read?: number) => {
    const n = read ?? Number((await tx.query(sql`SELECT n FROM counter WHERE id = ${id}`))[0]?.n);
    await hesitate();
    await tx.query(sql`UPDATE counter SET n = ${n + 1} WHERE id = ${id}`);
    if (next() < 0.05) throw new OnPurpose();
  };

  // Those that look again and again for their turn take longer, and show as much with fewer calls.
  let left = kind === "semaphore" || kind === "reader-writer lease" ? Math.ceil(calls / 3) : calls;
  const caller = async (): Promise<void> => {
    while (left-- > 0) {
      try {
        await one(hf, kind, id, `${seed}-${left}`, readAndWrite, hesitate);
        result.done++;
      } catch (error) {
        if (!(error instanceof OnPurpose)) result.errors.push(String(error));
      }
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  await hf.close();
  return result;
}

async function one(
  hf: Holdfast<unknown>,
  kind: Kind,
  id: number,
  call: string,
  readAndWrite: (tx: Transaction<unknown>, read?: number) => Promise<void>,
  hesitate: () => Promise<void>,
): Promise<void> {
  switch (kind) {
    case "nothing":
      return hf.transaction((tx) => readAndWrite(tx));
    case "advisory lock":
    case "lock row":
      return hf.transaction({ lock: key("counter", id) }, (tx) => readAndWrite(tx));
    case "row lock":
      return hf.transaction(async (tx) => readAndWrite(tx, Number((await tx.row<Counter>("counter", id)).n)));
    case "table lock":
      return hf.transaction(async (tx) => {
        await tx.table("counter", "exclusive");
        await readAndWrite(tx);
      });
    case "semaphore":
      return hf.semaphore(key("counter", id), { permits: 1, ttl: 5000, wait: 110_000 }).use((permit) =>
        hf.transaction(async (tx) => {
          await fenced(tx, permit);
          await readAndWrite(tx);
        }),
      );
    case "reader-writer lease": {
      {
        await using reading = await hf.lease(shared(key("counter", id)), { ttl: 5000, wait: 110_000 });
        const read = () => hf.transaction((tx) => tx.row<Counter>("counter", id, { for: "share" }));
        const [before, after] = [await read(), (await sleep(2), await read())];
        if (!reading.signal.aborted && String(before.n) !== String(after.n))
          throw new Error(`a writer wrote under a reader's lease: ${before.n}, ${after.n}`);
      }
      await using writing = await hf.lease(key("counter", id), { ttl: 5000, wait: 110_000 });
      await hf.transaction(async (tx) => {
        await fenced(tx, writing);
        await readAndWrite(tx);
      });
      return;
    }
    case "lease and fence": {
      await using lease = await hf.lease(key("counter", id), { ttl: 5000, wait: 110_000 });
      await hf.transaction(async (tx) => {
        await fenced(tx, lease);
        await readAndWrite(tx);
      });
      return;
    }
    case "version":
      await versioned<Counter>(hf, "counter", { attempts: 10_000 }).update(id, async ({ n }) => {
        await hesitate();
        return { n: Number(n) + 1 };
      });
      return;
    case "once":
      // The same ids in every process: a call that failed on purpose is sent again until it is known to be done.
      for (;;) {
        try {
          await once(hf, ["increment", call], async (tx) => {
            const { n } = await tx.row<Counter>("counter", id);
            await readAndWrite(tx, Number(n));
          });
          return;
        } catch (error) {
          if (!(error instanceof OnPurpose)) throw error;
        }
      }
  }
}
