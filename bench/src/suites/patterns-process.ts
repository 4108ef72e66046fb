/** One of several processes on one SQLite file: takes what it is told to, by hand or by Holdfast. */
import Database from "better-sqlite3";
import { holdfast } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { type Contestant, type Round, closedLoop } from "../../../packages/cli/src/bench/measure.ts";
import { consuming, hotSku, hotUser, limit, ordering, shop, units } from "./patterns-ours.ts";
import { textbook } from "./patterns-race.ts";

export type FileCell = "quota" | "stock";

export interface FileOrder {
  readonly file: string;
  readonly cell: FileCell;
  readonly ours: boolean;
  readonly callers: number;
  readonly ms: number;
}

export type FileAnswer = { readonly round: Round } | { readonly error: string };

/** As its documentation advises. A writer waits for others for 5 s, and COMMIT is not flushed: both are its defaults with WAL. */
export function openFile(file: string): Database.Database {
  const db = new Database(file);
  db.pragma("journal_mode = WAL");
  // The handle that makes it WAL would keep FULL.
  db.pragma("synchronous = NORMAL");
  return db;
}

/** BEGIN IMMEDIATE, read, check, write, COMMIT; statements prepared once, as its documentation advises. */
export function byHand(db: Database.Database, cell: FileCell, prefix: string): Contestant {
  let calls = 0;
  const used = db.prepare<[number], { used: number }>("SELECT used FROM account WHERE user_id = ?");
  const use = db.prepare("UPDATE account SET used = ? WHERE user_id = ?");
  const line = db.prepare(
    "INSERT INTO ledger (user_id, amount, used, request_id, at) VALUES (?, 1, ?, ?, unixepoch('subsec'))",
  );
  const left = db.prepare<[string], { stock: number }>("SELECT stock FROM variant WHERE sku = ?");
  const take = db.prepare("UPDATE variant SET stock = stock - 1 WHERE sku = ?");
  const movement = db.prepare(
    `INSERT INTO movement (sku, quantity, source, reference_type, reference_id, at)
      VALUES (?, -1, 'ORDER', 'order', ?, unixepoch('subsec'))`,
  );
  const consume = db.transaction((user: number, request: string) => {
    const now = (used.get(user)?.used ?? Number.NaN) + 1;
    if (!(now <= limit)) throw new Error("used up");
    use.run(now, user);
    line.run(user, now, request);
  });
  const order = db.transaction((sku: string, reference: string) => {
    if (!((left.get(sku)?.stock ?? 0) >= 1)) throw new Error("not enough");
    take.run(sku);
    movement.run(sku, reference);
  });
  return {
    name: textbook,
    async call() {
      const id = `${prefix}-${++calls}`;
      if (cell === "quota") consume.immediate(hotUser, id);
      else order.immediate(hotSku, id);
    },
  };
}

function main(): void {
  const made = new Map<string, Contestant>();
  const make = ({ file, cell, ours }: FileOrder): Contestant => {
    const prefix = `${cell}-${process.pid}`;
    if (!ours) return byHand(openFile(file), cell, prefix);
    const hf = holdfast(fromBetterSqlite3(() => openFile(file)));
    return cell === "quota" ? consuming(units(hf), () => hotUser, prefix) : ordering(shop(hf), prefix);
  };
  const run = async (order: FileOrder): Promise<FileAnswer> => {
    const name = `${order.cell} ${order.ours}`;
    try {
      const contestant = made.get(name) ?? make(order);
      made.set(name, contestant);
      globalThis.gc?.();
      return { round: await closedLoop(contestant.call, order.callers, order.ms) };
    } catch (error) {
      return { error: String((error as Error).stack) };
    }
  };
  process.on("message", (order: FileOrder) => void run(order).then((answer) => process.send?.(answer)));
}

if (process.send) main();
