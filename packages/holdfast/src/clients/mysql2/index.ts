import type { Database, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import {
  type Mysql2Connection,
  type Mysql2Pool,
  type Mysql2PoolConnection,
  checkOutMysql2,
  elsewhereMysql2,
  mysql2Connection,
  observeMysql2,
  observeMysql2Statements,
  promisedMysql2,
  roomOfMysql2,
  unwrapMysql2,
} from "./connection.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";

export type { Mysql2Connection, Mysql2Pool, Mysql2PoolConnection };

/** A pool of `mysql2` (of its promise kind, or of the other). */
export function fromMysql2<C extends Mysql2PoolConnection>(
  pool: Mysql2Pool<C> | { promise(): Mysql2Pool<C> },
): Database<C, SqlConnection> {
  const promised = promisedMysql2<C>(pool);
  if (!promised) throw new UsageError("fromMysql2(pool): this is not a pool of the package mysql2");
  const kill = killer(promised);
  return {
    engine: mysql,
    traits: {
      client: "mysql2",
      cancel: true,
      listen: false,
      embedded: false,
      single: false,
      pinned: true,
      begins: false,
    },
    unwrap: unwrapMysql2,
    room: () => roomOfMysql2(promised),
    observe: (seen) => observeMysql2(promised, seen),
    openings: (opening) => observeMysql2Statements(promised, opening),
    connect: (purpose) => checkOutMysql2(promised, kill, purpose),
    join(native) {
      const candidate = native as Partial<Mysql2PoolConnection & Mysql2Pool> | null;
      if (typeof candidate !== "object" || candidate === null || typeof candidate.query !== "function")
        throw new NotInTransactionError("this is no connection of mysql2");
      if (typeof candidate.getConnection === "function") {
        throw new NotInTransactionError(
          "a pool runs every statement on another connection; pass the connection that you began the transaction on",
        );
      }
      return mysql2Connection(native, kill);
    },
    elsewhere: (native) => elsewhereMysql2(promised, native),
  };
}
