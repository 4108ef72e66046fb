import type { Engine } from "../../seam/database.ts";
import { namedConnection, prefixNames } from "../../seam/names.ts";
import { assertTransaction, begin, end, isEnded, lock, savepoint } from "./begin.ts";
import { type SqliteConnection, dialect, lexis } from "./dialect.ts";
import { classify, violated } from "./errors.ts";
import { inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrationsIn } from "./schema.ts";
import { stores } from "./stores.ts";
import { tables } from "./tables.ts";

export { GiveUp, type SqliteConnection, render } from "./dialect.ts";

export const sqlite: Engine<SqliteConnection> = {
  name: "sqlite",
  probe,
  begin,
  end,
  isEnded,
  savepoint,
  assertTransaction,
  lock,
  tables,
  leases,
  replay,
  ...stores,
  inspect,
  query: (connection, statement) => connection.query(statement),
  lexis,
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
