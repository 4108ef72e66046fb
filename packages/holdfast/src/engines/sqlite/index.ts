import type { Engine } from "../../core/database.ts";
import { begin, end, lock, savepoint } from "./begin.ts";
import type { SqliteConnection } from "./dialect.ts";
import { classify, violated } from "./errors.ts";
import { inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrations } from "./schema.ts";
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
  inspect,
  query: (connection, statement) => connection.query(statement),
  classify,
  violated,
  migrations,
};
