import type { Database, Isolation, QueryLock, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import {
  type KyselyLike,
  isSqlite,
  kyselyConnection,
  kyselyDialect,
  observeKysely,
  observeKyselyOpenings,
  pinKysely,
} from "./connection.ts";
import { HeldConnection, holding, rawOf, revealConnections, revealRaws } from "./raw.ts";
import { lendKysely, sendThrough } from "./sqlite.ts";
import { connectLent, joinLent, lentRoom, lentTraits, unwrapSqlite } from "../sqlite-lent.ts";
import {
  type PgClient,
  type PgFactory,
  type PgPool,
  checkOutPg,
  endPg,
  isPgPool,
  listenPg,
  listenToClients,
  pgConnection,
  roomOfPg,
  withholdBegin,
} from "../pg/connection.ts";
import { postgres } from "../../engines/postgres/index.ts";
import { sqlite } from "../../engines/sqlite/index.ts";

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

/** `lock`: undefined where everything that a transaction reads is locked. */
function locking(
  trx: Executing,
  query: unknown,
  lock: QueryLock | undefined,
): (() => Promise<unknown>) | undefined {
  const { compile, execute } = (query ?? {}) as Partial<SelectQuery>;
  if (typeof compile !== "function" || typeof execute !== "function") return undefined;
  const select = query as SelectQuery;
  if (select.compile().query.kind !== "SelectQueryNode" || typeof select.forUpdate !== "function")
    throw new UsageError("tx.rows(query): only a SELECT can lock what it finds");
  const bounded = lock ? bound(select, lock) : select;
  // By the transaction, whichever instance it was made with: Kysely's builders do not tell.
  return async () => (await trx.executeQuery(bounded.compile())).rows;
}

function bound(select: SelectQuery, { strength, wait }: QueryLock): SelectQuery {
  const locked = select[clauses[strength]]();
  return wait === "nowait" ? locked.noWait() : wait === "skip" ? locked.skipLocked() : locked;
}

function transactionOf(native: unknown): KyselyLike {
  const candidate = native as KyselyLike | null;
  if (typeof candidate !== "object" || candidate === null || typeof candidate.getExecutor !== "function")
    throw new NotInTransactionError("this is no transaction of Kysely");
  if (!candidate.isTransaction) {
    throw new NotInTransactionError(
      "this is the Kysely instance itself; pass the `trx` that db.transaction().execute(async (trx) => …) hands to its callback",
    );
  }
  return candidate;
}

function onSqlite<Trx>(db: KyselyClient): Database<Trx, SqlConnection> {
  const open = (body: (trx: KyselyLike) => Promise<void>) =>
    (db.transaction() as unknown as TransactionBuilder).execute(body);
  return {
    engine: sqlite,
    traits: { client: "kysely", ...lentTraits },
    connect: (purpose) => connectLent(db, () => lendKysely(open), unwrapSqlite, purpose) as Promise<never>,
    join: (native) => joinLent(sendThrough(transactionOf(native)), unwrapSqlite),
    locking: (native, query) => locking(native as Executing, query, undefined),
    room: () => lentRoom,
    observe: (seen) => observeKysely(db, seen),
    openings: (opening) => observeKyselyOpenings(db, opening),
    unwrap: unwrapSqlite,
  };
}

export interface KyselyOptions {
  /**
   * The Pool of pg that its dialect was made with. Kysely keeps it to itself; with it, BEGIN and the locks are one
   * message, and an abort ends what runs on the server.
   */
  readonly pool?: PgPool;
}

/** On a pool of pg that we know: as Kysely has it, but with the driver's own connection for what we send. */
function onPool(db: KyselyClient, pool: PgPool): Partial<Database<never, SqlConnection>> {
  const { options } = pool as { options?: object };
  listenToClients(pool);
  revealRaws(db, pool, "connect");
  return {
    connect: (purpose) => checkOutPg(pool, options, purpose) as Promise<never>,
    async transaction({ taken }, body) {
      const held = new HeldConnection();
      let begin: ReturnType<typeof withholdBegin> | undefined;
      held.taken = (raw) => {
        taken(() => endPg(raw as PgClient));
        begin = withholdBegin(raw as PgClient);
      };
      const run = async (trx: KyselyLike) => {
        held.closed = true;
        const raw = (await rawOf(trx)) as PgClient | undefined;
        if (!raw)
          throw new UsageError(
            "fromKysely(db, { pool }): this is not the pool that the dialect was made with",
          );
        begin?.end();
        return body({
          connection: pgConnection(raw, options),
          native: trx as never,
          begun: !begin?.withheld,
          seal: () => held.seen?.seal(),
        });
      };
      try {
        return await holding(held, () => (db.transaction() as unknown as TransactionBuilder).execute(run));
      } finally {
        begin?.end();
      }
    },
    listen: (channel, wake, signal) => listenPg(pool as PgPool & PgFactory, channel, wake, signal),
    room: () => roomOfPg(pool),
  };
}

/** A Kysely instance on PostgreSQL, MySQL, MariaDB or SQLite. `tx.client` is Kysely's own typed Transaction. */
export function fromKysely<Client extends KyselyClient>(
  db: Client,
  { pool }: KyselyOptions = {},
): Database<TransactionOf<Client>, SqlConnection> {
  if (typeof db !== "object" || db === null || typeof db.getExecutor !== "function")
    throw new UsageError("fromKysely(db): this is not an instance of Kysely");
  if (db.isTransaction)
    throw new UsageError("fromKysely(db): this is a transaction; make Holdfast once, of the instance itself");
  if (isSqlite(db)) return onSqlite(db);
  revealConnections(db);
  const dialect = kyselyDialect(db, "fromKysely");
  if (pool !== undefined && !(dialect.engine === postgres && isPgPool(pool)))
    throw new UsageError(
      "fromKysely(db, { pool }): this is not the Pool of pg that its dialect was made with",
    );
  return {
    engine: dialect.engine,
    traits: {
      client: "kysely",
      cancel: pool !== undefined,
      listen: pool !== undefined,
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
      const held = new HeldConnection();
      return holding(held, () =>
        builder.execute((trx) => {
          held.closed = true;
          return body({
            connection: kyselyConnection(trx, dialect),
            native: trx as never,
            seal: () => held.seen?.seal(),
          });
        }),
      );
    },
    join: (native) => kyselyConnection(transactionOf(native), dialect),
    locking: (native, query, lock) => locking(native as unknown as Executing, query, lock),
    observe: (seen) => observeKysely(db, seen),
    openings: (opening) => observeKyselyOpenings(db, opening),
    unwrap: dialect.unwrap,
    ...(pool && (onPool(db, pool) as object)),
  };
}
