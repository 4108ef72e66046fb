import type { Database, Isolation, QueryLock, SqlConnection } from "../core/database.ts";
import { NotInTransactionError, UsageError } from "../core/errors.ts";
import {
  type KyselyLike,
  kyselyConnection,
  kyselyDialect,
  observeKysely,
  pinKysely,
} from "../drivers/kysely.ts";

/** The part of a Kysely instance that is used here. */
export interface KyselyClient extends KyselyLike {
  transaction(): { execute: (...args: never[]) => unknown };
}

/** What `db.transaction().execute(async (trx) => …)` hands to its callback. */
export type TransactionOf<Client extends KyselyClient> = ReturnType<
  Client["transaction"]
>["execute"] extends (body: (trx: infer Tx) => never) => unknown
  ? Tx
  : never;

interface TransactionBuilder {
  setIsolationLevel(level: Isolation): TransactionBuilder;
  setAccessMode(mode: "read only"): TransactionBuilder;
  execute<T>(body: (trx: KyselyLike) => Promise<T>): Promise<T>;
}

interface Executing {
  executeQuery(query: unknown): Promise<{ rows: unknown[] }>;
}

/** A SELECT made with a transaction's builder. */
interface SelectQuery {
  compile(): { query: { kind: string } };
  forUpdate(): SelectQuery;
  forNoKeyUpdate(): SelectQuery;
  forShare(): SelectQuery;
  forKeyShare(): SelectQuery;
  noWait(): SelectQuery;
  skipLocked(): SelectQuery;
  execute(): Promise<unknown[]>;
}

const clauses = {
  update: "forUpdate",
  "no key update": "forNoKeyUpdate",
  share: "forShare",
  "key share": "forKeyShare",
} as const;

function locking(
  trx: Executing,
  query: unknown,
  { strength, wait }: QueryLock,
): (() => Promise<unknown>) | undefined {
  const { compile, execute } = (query ?? {}) as Partial<SelectQuery>;
  if (typeof compile !== "function" || typeof execute !== "function") return undefined;
  const select = query as SelectQuery;
  if (select.compile().query.kind !== "SelectQueryNode" || typeof select.forUpdate !== "function")
    throw new UsageError("tx.rows(query): only a SELECT can lock what it finds");
  const locked = select[clauses[strength]]();
  const bounded = wait === "nowait" ? locked.noWait() : wait === "skip" ? locked.skipLocked() : locked;
  // By the transaction, whichever instance it was made with: Kysely's builders do not tell.
  return async () => (await trx.executeQuery(bounded.compile())).rows;
}

/** A Kysely instance on PostgreSQL, MySQL or MariaDB. `tx.client` is Kysely's own typed Transaction. */
export function fromKysely<Client extends KyselyClient>(
  db: Client,
): Database<TransactionOf<Client>, SqlConnection> {
  if (typeof db !== "object" || db === null || typeof db.getExecutor !== "function")
    throw new UsageError("fromKysely(db): this is not an instance of Kysely");
  if (db.isTransaction)
    throw new UsageError("fromKysely(db): this is a transaction; make Holdfast once, of the instance itself");
  const dialect = kyselyDialect(db, "fromKysely");
  return {
    engine: dialect.engine,
    traits: {
      client: "kysely",
      cancel: false,
      listen: false,
      embedded: false,
      single: false,
      pinned: true,
      begins: true,
    },
    connect: (purpose) => pinKysely(db, dialect, purpose),
    transaction({ isolation, isolationIsDefault, readOnly }, body) {
      let builder = db.transaction() as unknown as TransactionBuilder;
      // Said only where it is not the server's default: elsewhere it is a round trip, and the engine verifies it.
      if (!isolationIsDefault) builder = builder.setIsolationLevel(isolation);
      if (readOnly) builder = builder.setAccessMode("read only");
      return builder.execute((trx) => body(kyselyConnection(trx, dialect), trx as never));
    },
    join(native) {
      const candidate = native as KyselyLike | null;
      if (typeof candidate !== "object" || candidate === null || typeof candidate.getExecutor !== "function")
        throw new NotInTransactionError("this is no transaction of Kysely");
      if (!candidate.isTransaction) {
        throw new NotInTransactionError(
          "this is the Kysely instance itself; pass the `trx` that db.transaction().execute(async (trx) => …) hands to its callback",
        );
      }
      return kyselyConnection(candidate, dialect);
    },
    locking: (native, query, lock) => locking(native as unknown as Executing, query, lock),
    observe: (seen) => observeKysely(db, seen),
    unwrap: dialect.unwrap,
  };
}
