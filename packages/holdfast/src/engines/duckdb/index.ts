import type { Engine } from "../../core/database.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { classify } from "./errors.ts";
import { holders, inspect } from "./inspect.ts";
import { leases } from "./leases.ts";
import { assertUsable, begin, end, lock, savepoint } from "./locks.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrations } from "./schema.ts";
import { tables } from "./tables.ts";

export { Desk } from "./desk.ts";
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
  holders,
  inspect,
  async query(connection, statement) {
    assertUsable(connection);
    return connection.query(statement);
  },
  classify,
  migrations,
};
