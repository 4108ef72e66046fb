import { unsupported } from "../../seam/capabilities.ts";
import type { Engine } from "../../seam/database.ts";
import { namedConnection, prefixNames } from "../../seam/names.ts";
import { type DuckdbConnection, dialect } from "./dialect.ts";
import { classify } from "./errors.ts";
import { holders, inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { assertUsable, begin, end, lock, savepoint } from "./locks.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrationsIn } from "./schema.ts";
import { tables } from "./tables.ts";

export { InProcessLocks } from "./in-process-locks.ts";
export { type DuckdbConnection, render } from "./dialect.ts";

/** The stores have to read rows as they are now, also in a transaction that began before they were written. There is no such read here. */
const oneSnapshot =
  "a transaction sees what there was when it began, and nothing newer: inside of yours it could not be counted what others have changed since";

export const duckdb: Engine<DuckdbConnection> = {
  name: "duckdb",
  probe,
  begin,
  end,
  savepoint,
  lock,
  tables,
  leases,
  replay,
  quotas: unsupported(`${oneSnapshot}; take a lock first, and add up your own rows`),
  stock: unsupported(`${oneSnapshot}; take a lock first, and change your own rows`),
  queues: unsupported(
    `${oneSnapshot}, and DuckDB has no savepoints; take a lock, and the next row of your own`,
  ),
  schedules: unsupported(`${oneSnapshot}; hf.tryLock runs a job in one instance at a time`),
  audit: unsupported("an audit is kept where the patterns are whose changes it is about"),
  holders,
  inspect,
  async query(connection, statement) {
    assertUsable(connection);
    return connection.query(statement);
  },
  classify,
  migrations: migrationsIn(dialect.names),
  named(schema) {
    const names = prefixNames(schema);
    if (names.schema === dialect.names.schema) return undefined;
    const on = (connection: DuckdbConnection): DuckdbConnection =>
      namedConnection(connection, names, {
        aside: (body) => connection.aside((other) => body(on(other))),
      });
    return { engine: { ...duckdb, migrations: migrationsIn(names) }, on };
  },
};
