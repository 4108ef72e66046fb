/** The connection below a transaction of Prisma's, which gives it to nobody: seen where its adapter begins one. */
import { AsyncLocalStorage } from "node:async_hooks";
import type { SqlConnection } from "../../seam/database.ts";
import { type View, view } from "../../context/revocable.ts";
import {
  type PgClient,
  type PgPooled,
  endPg,
  isPgPool,
  listenToClients,
  pgConnection,
  pgView,
} from "../pg/connection.ts";

interface Client {
  readonly _engineConfig?: { readonly adapter?: Factory };
}

interface Factory {
  readonly adapterName?: string;
  connect(): Promise<Adapter>;
}

interface Adapter {
  underlyingDriver?(): unknown;
  startTransaction(level?: string): Promise<{ client: PgClient }>;
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

/** From now on connections are seen; of a client that is connected already they are not. */
export function seePrismaPg(client: object): void {
  const factory = (client as Client)._engineConfig?.adapter;
  if (factory?.adapterName !== "@prisma/adapter-pg" || seen.has(factory)) return;
  seen.add(factory);
  const connect = factory.connect.bind(factory);
  factory.connect = async () => {
    const adapter = await connect();
    const pool = adapter.underlyingDriver?.();
    if (isPgPool(pool)) listenToClients(pool);
    const start = adapter.startTransaction.bind(adapter);
    adapter.startTransaction = async (level) => {
      const transaction = await start(level);
      const lending = lendings.getStore();
      if (lending) transaction.client = lending.take(transaction.client);
      return transaction;
    };
    return adapter;
  };
}

export function lendingTo<T>(lending: Lending, work: () => T): T {
  return lendings.run(lending, work);
}
