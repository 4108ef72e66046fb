/** The connection below a transaction of Prisma's, which gives it to nobody: seen where its adapter begins one. */
import { AsyncLocalStorage } from "node:async_hooks";
import type { SqlConnection } from "../../seam/database.ts";
import { UnsupportedError } from "../../seam/errors.ts";
import { type View, view } from "../../context/revocable.ts";
import {
  type PgClient,
  type PgPool,
  type PgPooled,
  endPg,
  isPgPool,
  listenToClients,
  pgConnection,
  pgView,
} from "../pg/connection.ts";

interface Client {
  $connect?(): Promise<void>;
  readonly _engineConfig?: { readonly adapter?: Factory };
}

interface Factory {
  readonly adapterName?: string;
  connect(): Promise<Adapter>;
  /** One that the caller has made, and ends. */
  readonly externalPool?: unknown;
}

interface Adapter {
  underlyingDriver?(): unknown;
  startTransaction(level?: string): Promise<{ client: PgClient }>;
  dispose(): Promise<void>;
}

/** A transaction of ours that is about to begin. */
export class Lending {
  readonly #taken: (end: () => void) => void;
  #seen: View<PgClient> | undefined;
  #client: PgClient | undefined;

  constructor(taken: (end: () => void) => void) {
    this.#taken = taken;
  }

  /** What is to be used in place of it. Of the first one: what begins later in the same context is another's. */
  take(client: PgClient): PgClient {
    if (this.#seen) return client;
    this.#client = client;
    this.#seen = view(client, pgView);
    this.#taken(() => endPg(client));
    return this.#seen.proxy;
  }

  /** The driver's own, where it is seen. */
  get connection(): SqlConnection | undefined {
    return this.#client && pgConnection(this.#client);
  }

  /** Prisma 6 does not give back one that has died, and the pool would be smaller by it for good. */
  end(): void {
    const client = this.#client as PgPooled | undefined;
    if (!client || !pgConnection(client).lost.aborted) return;
    try {
      client.release(true);
    } catch {
      // It was given back.
    }
  }

  /** What Prisma had accepted before it closed the transaction, it would send after its end. */
  seal(): void {
    this.#seen?.seal();
  }
}

const lendings = new AsyncLocalStorage<Lending>();
const seen = new WeakSet<Factory>();
/** Of the factory's last adapter that was not disposed of. */
const pools = new WeakMap<Factory, PgPool>();

/** From now on connections are seen; of a client that is connected already they are not. False: they never are. */
export function seePrismaPg(client: object): boolean {
  const factory = (client as Client)._engineConfig?.adapter;
  if (factory?.adapterName !== "@prisma/adapter-pg") return false;
  if (seen.has(factory)) return true;
  seen.add(factory);
  const connect = factory.connect.bind(factory);
  factory.connect = async () => {
    const adapter = await connect();
    const pool = adapter.underlyingDriver?.();
    if (isPgPool(pool)) {
      listenToClients(pool);
      pools.set(factory, pool);
      const dispose = adapter.dispose.bind(adapter);
      adapter.dispose = () => {
        if (pools.get(factory) === pool) pools.delete(factory);
        return dispose();
      };
    }
    const start = adapter.startTransaction.bind(adapter);
    adapter.startTransaction = async (level) => {
      const transaction = await start(level);
      const lending = lendings.getStore();
      if (lending) transaction.client = lending.take(transaction.client);
      return transaction;
    };
    return adapter;
  };
  return true;
}

/** Prisma's pool, if it is known by now. */
export function knownPool(client: object): PgPool | undefined {
  const factory = (client as Client)._engineConfig?.adapter;
  return factory && pools.get(factory);
}

/** Prisma's pool; or one that is made in the same way, if Prisma was connected before anybody saw it. */
export async function poolOf(client: object): Promise<PgPool> {
  const prisma = client as Client;
  await prisma.$connect?.();
  const factory = prisma._engineConfig?.adapter as Factory;
  return pools.get(factory) ?? (await anotherPool(factory));
}

const others = new WeakMap<Factory, Promise<PgPool>>();

async function anotherPool(factory: Factory): Promise<PgPool> {
  let making = others.get(factory);
  if (!making) {
    making = factory.connect().then(() => {
      const pool = pools.get(factory);
      if (!pool) throw new UnsupportedError(`Prisma's ${factory.adapterName} does not show its pool`);
      // Nobody ends it: what is idle in it must not keep the process alive.
      const { options } = pool as { options?: { allowExitOnIdle?: boolean } };
      if (options && pool !== factory.externalPool) options.allowExitOnIdle = true;
      return pool;
    });
    others.set(factory, making);
    making.catch(() => others.delete(factory));
  }
  return making;
}

export function lendingTo<T>(lending: Lending, work: () => T): T {
  return lendings.run(lending, work);
}
