import type { Engine, SqlConnection } from "../../core/database.ts";
import { sql } from "../../core/sql.ts";
import { classify } from "./errors.ts";
import { begin, end, outcome } from "./begin.ts";
import { holders, lock } from "./locks.ts";
import { probe } from "./probe.ts";
import { migrations } from "./schema.ts";
import { session } from "./session.ts";

export { render } from "./dialect.ts";

const savepoints = {
  set: (name: string) => [`SAVEPOINT ${name}`],
  release: (name: string) => [`RELEASE SAVEPOINT ${name}`],
  rollback: (name: string) => [`ROLLBACK TO SAVEPOINT ${name}`, `RELEASE SAVEPOINT ${name}`],
};

export const postgres: Engine<SqlConnection> = {
  name: "postgres",
  probe,
  begin,
  end,
  async savepoint(connection, name, action) {
    for (const text of savepoints[action](name)) await connection.query(sql.raw(text));
  },
  lock,
  session,
  outcome,
  holders,
  query: (connection, statement) => connection.query(statement),
  classify,
  migrations,
};
