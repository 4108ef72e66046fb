import type { Database, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import { observeMethod } from "../observe.ts";
import {
  type MariadbConnection,
  type MariadbPool,
  type MariadbPoolConnection,
  checkOutMariadb,
  elsewhereMariadb,
  mariadbConnection,
  observeMariadbStatements,
  roomOfMariadb,
  unwrapMariadb,
} from "./connection.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";

export type { MariadbConnection, MariadbPool, MariadbPoolConnection };

/** A pool of the package `mariadb` (`createPool` of its promise API). */
export function fromMariadb<C extends MariadbPoolConnection>(
  pool: MariadbPool<C>,
): Database<C, SqlConnection> {
  const candidate = pool as { getConnection?: unknown; promise?: unknown } | null;
  // Pools of mysql2 have the same method, and `promise` besides.
  if (
    typeof candidate !== "object" ||
    candidate === null ||
    typeof candidate.getConnection !== "function" ||
    "promise" in candidate ||
    "pool" in candidate
  )
    throw new UsageError("fromMariadb(pool): this is not a pool of the package mariadb (its promise API)");
  const kill = killer(pool);
  return {
    engine: mysql,
    traits: {
      client: "mariadb",
      cancel: true,
      listen: false,
      embedded: false,
      single: false,
      pinned: true,
      begins: false,
    },
    unwrap: unwrapMariadb,
    connect: (purpose) => checkOutMariadb(pool, kill, purpose),
    observe(seen) {
      // Each of them takes a connection by itself, inside of the package.
      const ends = ["getConnection", "query", "execute", "batch"].map((name) =>
        observeMethod(pool, name, seen),
      );
      return () => ends.forEach((end) => end());
    },
    openings: (opening) => observeMariadbStatements(pool, opening),
    room: () => roomOfMariadb(pool),
    join(native) {
      const given = native as Partial<MariadbPoolConnection & MariadbPool> | null;
      if (typeof given !== "object" || given === null || typeof given.query !== "function")
        throw new NotInTransactionError("this is no connection of mariadb");
      if (typeof given.getConnection === "function") {
        throw new NotInTransactionError(
          "a pool runs every statement on another connection; pass the connection that you began the transaction on",
        );
      }
      return mariadbConnection(native, kill);
    },
    elsewhere: elsewhereMariadb(pool),
  };
}
