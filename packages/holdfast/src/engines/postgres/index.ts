import type { Capabilities } from "../../seam/capabilities.ts";
import type { Engine, SqlConnection } from "../../seam/database.ts";
import { namedConnection } from "../../seam/names.ts";
import { type Names, sql } from "../../seam/sql.ts";
import { agreements } from "./agreements.ts";
import { audits } from "./audit.ts";
import { dialect, lexis, namesIn } from "./dialect.ts";
import { classify, hopeless, violated, waited } from "./errors.ts";
import { hiddenIn } from "./hidden.ts";
import { begin, end, isEnded, settle } from "./transaction/index.ts";
import { inspect } from "./inspect.ts";
import { checking } from "./map.ts";
import { wasKilled } from "./killed.ts";
import { limit } from "./limits.ts";
import { beginLater } from "./transaction/later.ts";
import { holders, lock } from "./locks/index.ts";
import { leaseChannel, leases } from "./leases/index.ts";
import { outcome } from "./transaction/outcome.ts";
import { verifyReads, verifyTransactions } from "./pooler.ts";
import { mayBeKept, probe } from "./probe.ts";
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

/** A function that waits for a row must see what was committed meanwhile: with one snapshot for all of it, it could only fail. */
async function apart<T>(
  connection: SqlConnection,
  { defaultIsolation }: Capabilities,
  call: () => Promise<T>,
): Promise<T> {
  if (defaultIsolation === "read committed" || defaultIsolation === "read uncommitted") return call();
  await connection.query(sql.raw("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"));
  try {
    const value = await call();
    await connection.query(sql.raw("COMMIT"));
    return value;
  } catch (error) {
    // A connection that is gone has rolled back by itself.
    await connection.query(sql.raw("ROLLBACK")).catch(() => {});
    throw error;
  }
}

export const postgres: Engine<SqlConnection> = {
  name: "postgres",
  checking,
  probe,
  verifyReads,
  begin,
  beginLater,
  end,
  settle,
  isEnded,
  async savepoint(connection, name, action) {
    for (const text of savepoints[action](name)) await connection.query(sql.raw(text));
  },
  async assertTransaction(connection) {
    // Outside of a transaction this fails (25P01). Inside it changes nothing.
    if (connection.isInTransaction?.() !== true)
      await connection.query(sql.raw("LOCK TABLE pg_catalog.pg_am IN ACCESS SHARE MODE"));
  },
  async whereabouts(connection) {
    const { rows } = await connection.query(
      sql`SELECT pg_catalog.concat(pg_catalog.current_database(), ' of server ', (SELECT system_identifier FROM pg_catalog.pg_control_system())) AS place`,
    );
    return String(rows[0]?.["place"]);
  },
  lock,
  verifyLocks,
  verifyTransactions,
  session,
  tables,
  leases,
  replay,
  apart,
  quotas,
  queues,
  stock: stocks,
  schedules,
  audit: audits,
  agreements,
  outcome,
  wasKilled,
  limit,
  holders,
  inspect,
  query: (connection, statement) => connection.query(statement),
  lexis,
  classify,
  hopeless,
  mayBeKept,
  hidden: hiddenIn(dialect.names),
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
    hidden: hiddenIn(names),
    migrations: migrationsIn(names),
    leases: { ...leases, channel: names.label(leaseChannel) },
    queues: { ...queues, channel: names.label(queueChannel) },
    stock: { ...stocks, ownTables: { ...ownTables, guard: (book) => guardIn(names, book) } },
  };
}
