import type { Engine, SqlConnection } from "../../seam/database.ts";
import { namedConnection, prefixNames } from "../../seam/names.ts";
import { sql } from "../../seam/sql.ts";
import { auditStore } from "../sql/audit.ts";
import { queueStore } from "../sql/queue/index.ts";
import { quotaStore } from "../sql/quota/index.ts";
import { scheduleStore } from "../sql/schedule.ts";
import { stockStore } from "../sql/stock/index.ts";
import { dialect, lexis } from "./dialect.ts";
import { classify, hopeless, violated, waited } from "./errors.ts";
import { inspect } from "./inspect.ts";
import { wasKilled } from "./killed.ts";
import { limit } from "./limits.ts";
import { leases, whereabouts } from "./leases.ts";
import { holders, lock, session } from "./locks.ts";
import { outcome } from "./outcome.ts";
import { verifyReads } from "./primary.ts";
import { probe } from "./probe.ts";
import { replay } from "./replay.ts";
import { migrationsIn } from "./schema.ts";
import { storeDialect } from "./store-dialect.ts";
import { tables } from "./tables.ts";
import { assertTransaction, withSettings } from "./waits.ts";
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
  keepsUndoneLocks: true,
  assertTransaction,
  whereabouts,
  lock,
  keepLocks,
  session,
  withSettings,
  verifyReads,
  tables,
  leases,
  replay,
  quotas: quotaStore(storeDialect),
  stock: stockStore(storeDialect),
  queues: queueStore(storeDialect),
  schedules: scheduleStore(storeDialect),
  audit: auditStore(storeDialect),
  outcome,
  wasKilled,
  limit,
  holders,
  inspect,
  query: (connection, statement) => connection.query(statement, true),
  lexis,
  classify,
  hopeless,
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
