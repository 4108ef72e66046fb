import { unsupported } from "../../seam/capabilities.ts";
import type { Engine } from "../../seam/database.ts";
import { namedConnection, prefixNames } from "../../seam/names.ts";
import { begin, end, lock, savepoint } from "./begin.ts";
import { type SqliteConnection, dialect } from "./dialect.ts";
import { classify, violated } from "./errors.ts";
import { inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrationsIn } from "./schema.ts";
import { tables } from "./tables.ts";

export { type SqliteConnection, render } from "./dialect.ts";

export const sqlite: Engine<SqliteConnection> = {
  name: "sqlite",
  probe,
  begin,
  end,
  savepoint,
  lock,
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
  inspect,
  query: (connection, statement) => connection.query(statement),
  classify,
  violated,
  migrations: migrationsIn(dialect.names),
  named(schema) {
    const names = prefixNames(schema);
    if (names.schema === dialect.names.schema) return undefined;
    const on = (connection: SqliteConnection): SqliteConnection => namedConnection(connection, names);
    return { engine: { ...sqlite, migrations: migrationsIn(names) }, on };
  },
};
