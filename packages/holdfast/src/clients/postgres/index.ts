import { observeOpenings } from "../observe.ts";
import type { Database, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import {
  type PostgresListening,
  PostgresPin,
  type PostgresPool,
  type PostgresSql,
  joinedPostgres,
  listenPostgres,
  pinnedPostgres,
  roomOfPostgres,
  unwrapPostgres,
} from "./connection.ts";
import { postgres } from "../../engines/postgres/index.ts";

export type { PostgresPool, PostgresSql };

/** What `sql.begin(async (sql) => …)` hands to its callback. */
export type TransactionOf<Pool extends PostgresPool> = Pool["begin"] extends (
  options: string,
  body: (sql: infer Tx) => never,
) => unknown
  ? Tx
  : never;

/** A postgres.js instance: `holdfast(fromPostgres(postgres(url)))`. */
export function fromPostgres<Pool extends PostgresPool>(
  sql: Pool,
): Database<TransactionOf<Pool>, SqlConnection> {
  if (typeof sql !== "function" || typeof sql.begin !== "function" || typeof sql.unsafe !== "function") {
    throw new UsageError("fromPostgres(sql): this is not what postgres(url) of the package postgres returns");
  }
  const database: Database<PostgresSql, SqlConnection> = {
    engine: postgres,
    traits: {
      client: "postgres",
      cancel: true,
      listen: true,
      embedded: false,
      single: false,
      pinned: true,
      begins: false,
    },
    connect: async ({ use, signal }) => {
      const pin = new PostgresPin(sql, use);
      // A transaction's first statement takes the connection; a session's may come much later, or be a wait for a lock.
      if (use === "session") await pin.acquire(signal);
      return pinnedPostgres(pin);
    },
    room: () => roomOfPostgres(sql),
    openings: (opening) => observeOpenings(sql, "begin", opening),
    join(native) {
      if (typeof native !== "function" || typeof native.unsafe !== "function") {
        throw new NotInTransactionError("this is no Sql of the package postgres");
      }
      if (typeof (native as Partial<PostgresPool>).begin === "function") {
        throw new NotInTransactionError(
          "this is the pool; pass the `sql` that sql.begin(…) hands to its callback",
        );
      }
      return joinedPostgres(native, sql);
    },
    ...(typeof (sql as { listen?: unknown }).listen === "function" && {
      listen: (channel, wake, signal) =>
        listenPostgres(sql as unknown as PostgresListening, channel, wake, signal),
    }),
    unwrap: unwrapPostgres,
  };
  return database as Database<never, SqlConnection>;
}
