/** When a transaction of Prisma's has ended, which it tells nobody: seen where it calls what runs in it. */
import { AsyncLocalStorage } from "node:async_hooks";

type Callback = (tx: unknown) => Promise<unknown>;
type Run = (this: unknown, call: { callback: Callback }) => Promise<unknown>;

const running = new AsyncLocalStorage<(() => void)[]>();
const seen = new WeakSet<object>();

export function seeTransactions(client: object): void {
  const prisma = client as { _transactionWithCallback?: Run };
  const original = prisma._transactionWithCallback;
  if (seen.has(client) || typeof original !== "function") return;
  seen.add(client);
  prisma._transactionWithCallback = async function (this: unknown, call) {
    const told: (() => void)[] = [];
    const { callback } = call;
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
