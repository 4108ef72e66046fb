import type { Engine } from "../../seam/database.ts";
import { namedConnection, prefixNames } from "../../seam/names.ts";
import { type DuckdbConnection, dialect, lexis } from "./dialect.ts";
import { classify } from "./errors.ts";
import { holders, inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { assertUsable, begin, end, lock, savepoint } from "./locks.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrationsIn } from "./schema.ts";
import { storesIn } from "./stores.ts";
import { tables } from "./tables.ts";

export { InProcessLocks } from "./in-process-locks.ts";
export { type DuckdbConnection, render } from "./dialect.ts";

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
  ...storesIn(dialect.names.schema),
  holders,
  inspect,
  async query(connection, statement) {
    await assertUsable(connection);
    return connection.query(statement);
  },
  lexis,
  classify,
  migrations: migrationsIn(dialect.names),
  named(schema) {
    const names = prefixNames(schema);
    if (names.schema === dialect.names.schema) return undefined;
    const on = (connection: DuckdbConnection): DuckdbConnection =>
      namedConnection(connection, names, {
        aside: (body) => connection.aside((other) => body(on(other))),
      });
    return { engine: { ...duckdb, ...storesIn(names.schema), migrations: migrationsIn(names) }, on };
  },
};
