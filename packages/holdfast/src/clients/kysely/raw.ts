/**
 * The driver's own connection below one of Kysely's, which keeps it to itself. It is seen when the pool hands it out,
 * in the course of the very call by which Kysely wants a connection.
 */
import { AsyncLocalStorage } from "node:async_hooks";
import { type View, type ViewOptions, endsTransaction, view } from "../../context/revocable.ts";
import type { KyselyLike } from "./connection.ts";

interface Checkout {
  raw?: object | undefined;
}

/** Connections that were taken out in a piece of work and are not back yet. */
export class HeldConnection {
  readonly raws = new Set<object>();
  /** Told of each, before anything is sent on it. */
  taken: ((raw: object) => void) | undefined;
  /** What Kysely gets in place of its first connection, and its body with it. */
  seen: View<object> | undefined;
  /** Those that are taken out from now on are not of this work. */
  closed = false;
}

const checkouts = new AsyncLocalStorage<Checkout>();
const works = new AsyncLocalStorage<HeldConnection>();
/** By Kysely's connection, of which there is one for each of the driver's. */
const raws = new WeakMap<object, object>();
const watched = new WeakSet<object>();

type Method = (this: unknown, ...args: unknown[]) => unknown;
type Consumer = (connection: object) => Promise<unknown>;
type Provide = (consumer: Consumer, ...rest: unknown[]) => Promise<unknown>;

/** What a body may send once it has ended: nothing but the end that Kysely writes. */
const kyselyView: ViewOptions = {
  senders: ["executeQuery", "streamQuery"],
  ends: (_, [query]) => endsTransaction(query),
};

/** From now on connections that are taken out in a piece of work are seen. */
export function revealConnections(db: KyselyLike): void {
  const executor = db.getExecutor() as unknown as { provideConnection: Provide };
  if (!watched.has(executor)) watchExecutor(executor);
}

/** From now on {@link rawOf} knows what `pool[name]` gives to Kysely. */
export function revealRaws(db: KyselyLike, pool: object, name: "connect" | "getConnection"): void {
  if (!watched.has(pool)) watchPool(pool as Record<string, Method>, name);
  revealConnections(db);
}

function watchPool(pool: Record<string, Method>, name: string): void {
  watched.add(pool);
  const original = pool[name] as Method;
  pool[name] = function (this: unknown, ...args) {
    const checkout = checkouts.getStore();
    if (!checkout || checkout.raw) return original.apply(this, args);
    const callback = args[0] as ((error: unknown, raw?: object, ...rest: unknown[]) => void) | undefined;
    if (typeof callback === "function") {
      args[0] = (error: unknown, raw?: object, ...rest: unknown[]) => {
        checkout.raw ??= raw;
        callback(error, raw, ...rest);
      };
    }
    const result = original.apply(this, args);
    if (callback) return result;
    return (result as Promise<object>).then((raw) => {
      checkout.raw ??= raw;
      return raw;
    });
  };
}

function watchExecutor(executor: { provideConnection: Provide }): void {
  watched.add(executor);
  const original = executor.provideConnection;
  executor.provideConnection = function (this: unknown, consumer, ...rest) {
    const work = works.getStore();
    const held = work?.closed ? undefined : work;
    const checkout: Checkout = {};
    const consume: Consumer = (connection) => {
      const { raw } = checkout;
      if (raw) {
        raws.set(connection, raw);
        held?.raws.add(raw);
        held?.taken?.(raw);
      }
      if (!held || held.seen) return consumer(connection);
      const { proxy, revoke } = (held.seen = view(connection, kyselyView));
      if (raw) raws.set(proxy, raw);
      return consumer(proxy).finally(revoke);
    };
    const providing = checkouts.run(checkout, () => original.call(this, consume, ...rest));
    const back = () => void (checkout.raw && held?.raws.delete(checkout.raw));
    if (held) providing.then(back, back);
    return providing;
  };
}

/** Notes which connections are taken out in the course of `work`. */
export function holding<T>(held: HeldConnection, work: () => T): T {
  return works.run(held, work);
}

/** The driver's connection that a transaction of Kysely runs on, if it is known. */
export async function rawOf(trx: KyselyLike): Promise<object | undefined> {
  const executor = trx.getExecutor() as unknown as { provideConnection: Provide };
  return (await executor.provideConnection(async (connection) => raws.get(connection))) as object | undefined;
}
