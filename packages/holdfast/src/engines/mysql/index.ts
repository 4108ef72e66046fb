import { unsupported } from "../../seam/capabilities.ts";
import type { Engine, SqlConnection } from "../../seam/database.ts";
import { namedConnection, prefixNames } from "../../seam/names.ts";
import { sql } from "../../seam/sql.ts";
import { dialect } from "./dialect.ts";
import { classify, violated, waited } from "./errors.ts";
import { inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { holders, lock, session } from "./locks.ts";
import { outcome } from "./outcome.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrationsIn } from "./schema.ts";
import { tables } from "./tables.ts";
import { begin, end, keepLocks, settle } from "./transactions.ts";
import { protocol } from "./protocol.ts";

export { render } from "./dialect.ts";

const savepoints = {
  set: (name: string) => `SAVEPOINT ${name}`,
  release: (name: string) => `RELEASE SAVEPOINT ${name}`,
  rollback: (name: string) => `ROLLBACK TO SAVEPOINT ${name}`,
};

export const mysql: Engine<SqlConnection> = {
  name: "mysql",
  probe,
  begin,
  end,
  settle,
  async savepoint(connection, name, action) {
    await connection.query(sql.raw(savepoints[action](name)));
  },
  lock,
  keepLocks,
  session,
  tables,
  leases,
  replay,
  quotas: unsupported("quotas are kept on PostgreSQL only, for now; take a lock and add up your own rows"),
  stock: unsupported("stock is kept on PostgreSQL only, for now; tx.rows locks rows of your own"),
  queues: unsupported(
    "queues are kept on PostgreSQL only, for now; tx.rows takes the next row that nobody has",
  ),
  schedules: unsupported(
    "schedules are kept on PostgreSQL only, for now; hf.tryLock runs a job in one instance at a time",
  ),
  audit: unsupported("an audit is kept on PostgreSQL only, for now"),
  outcome,
  holders,
  inspect,
  query: (connection, statement) => connection.query(statement, true),
  classify,
  violated,
  waited,
  migrations: migrationsIn(dialect.names),
  named(schema) {
    const names = prefixNames(schema);
    if (names.schema === dialect.names.schema) return undefined;
    const on = (connection: SqlConnection): SqlConnection => namedConnection(connection, names);
    return { engine: { ...mysql, migrations: migrationsIn(names) }, on };
  },
  protocol,
};
