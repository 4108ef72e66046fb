/** When a transaction of Prisma's begins and ends, which it tells nobody: seen where it calls what runs in it. */
import { AsyncLocalStorage } from "node:async_hooks";
import type { Opening } from "../../seam/database.ts";
import { asBody } from "../observe.ts";

type Callback = (tx: unknown) => Promise<unknown>;
type Run = (this: unknown, call: { callback: Callback }) => Promise<unknown>;

const running = new AsyncLocalStorage<(() => void)[]>();
const seen = new WeakSet<object>();
const openings = new WeakMap<object, Set<Opening>>();

/** Of the original client: those that it was extended to open theirs with it. */
export function seeOpenings(client: object, opening: Opening): () => void {
  let all = openings.get(client);
  if (!all) openings.set(client, (all = new Set()));
  all.add(opening);
  return () => all.delete(opening);
}

export function seeTransactions(client: object): void {
  const prisma = client as { _transactionWithCallback?: Run };
  const original = prisma._transactionWithCallback;
  if (seen.has(client) || typeof original !== "function") return;
  seen.add(client);
  prisma._transactionWithCallback = async function (this: unknown, call) {
    const told: (() => void)[] = [];
    const callback = asBody(openings.get(client) ?? [], call.callback) as Callback;
    try {
      return await original.call(this, {
        ...call,
        callback: (tx: unknown) => running.run(told, () => callback(tx)),
      });
    } finally {
      for (const then of told) then();
    }
  };
}

/** Of the transaction that the calling code is in, if that was seen. */
export function settledHere(): ((then: () => void) => void) | undefined {
  const told = running.getStore();
  return told && ((then) => void told.push(then));
}
