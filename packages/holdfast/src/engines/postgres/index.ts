import type { Engine, SqlConnection } from "../../seam/database.ts";
import { namedConnection } from "../../seam/names.ts";
import { type Names, sql } from "../../seam/sql.ts";
import { agreements } from "./agreements.ts";
import { audits } from "./audit.ts";
import { dialect, namesIn } from "./dialect.ts";
import { classify, hopeless, violated, waited } from "./errors.ts";
import { begin, end, settle } from "./transaction/index.ts";
import { inspect } from "./inspect.ts";
import { beginLater } from "./transaction/later.ts";
import { holders, lock } from "./locks/index.ts";
import { leaseChannel, leases } from "./leases/index.ts";
import { outcome } from "./transaction/outcome.ts";
import { probe } from "./probe.ts";
import { queueChannel } from "./queue/functions/parts.ts";
import { queues } from "./queue/index.ts";
import { quotas } from "./quota/index.ts";
import { replay } from "./replay.ts";
import { schedules } from "./schedule/index.ts";
import { migrationsIn } from "./schema.ts";
import { session } from "./locks/session.ts";
import { guardIn, ownTables, stocks } from "./stock/index.ts";
import { tables } from "./tables.ts";
import { verifyLocks } from "./locks/verify.ts";
import { protocol } from "./protocol.ts";

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
  beginLater,
  end,
  settle,
  async savepoint(connection, name, action) {
    for (const text of savepoints[action](name)) await connection.query(sql.raw(text));
  },
  lock,
  verifyLocks,
  session,
  tables,
  leases,
  replay,
  quotas,
  queues,
  stock: stocks,
  schedules,
  audit: audits,
  agreements,
  outcome,
  holders,
  inspect,
  query: (connection, statement) => connection.query(statement),
  classify,
  hopeless,
  violated,
  waited,
  migrations: migrationsIn(dialect.names),
  protocol,
  named(schema) {
    const names = namesIn(schema);
    if (names.schema === dialect.names.schema) return undefined;
    return { engine: engineIn(names), on: (connection) => namedConnection(connection, names) };
  },
};

function engineIn(names: Names): Engine<SqlConnection> {
  return {
    ...postgres,
    migrations: migrationsIn(names),
    leases: { ...leases, channel: names.label(leaseChannel) },
    queues: { ...queues, channel: names.label(queueChannel) },
    stock: { ...stocks, ownTables: { ...ownTables, guard: (book) => guardIn(names, book) } },
  };
}
