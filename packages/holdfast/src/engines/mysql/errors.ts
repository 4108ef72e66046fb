import type { DriverError, Failure } from "../../core/database.ts";

/** Server error numbers; MySQL and MariaDB agree on these but for NOWAIT (3572 on MySQL, 1205 on MariaDB). */
const failures: Readonly<Record<number, Failure>> = {
  1213: "deadlock",
  // A deadlock among GET_LOCK waiters.
  3058: "deadlock",
  1205: "lock-timeout",
  3572: "lock-timeout",
  // MariaDB, innodb_snapshot_isolation: the row changed since the snapshot.
  1020: "serialization",
  1062: "unique",
  1451: "foreign-key",
  1452: "foreign-key",
  3819: "check",
  4025: "check",
  1317: "canceled",
  1290: "read-only",
  1792: "read-only",
  1146: "schema-missing",
  // Killed, shut down, gone away, lost during query.
  1927: "lost",
  1053: "lost",
  2006: "lost",
  2013: "lost",
};

const names: Readonly<Record<string, Failure>> = {
  PROTOCOL_CONNECTION_LOST: "lost",
  ER_CONNECTION_KILLED: "lost",
  ER_SERVER_SHUTDOWN: "lost",
};

export function classify(error: DriverError): Failure | undefined {
  const { errno, code } = error as DriverError & { errno?: unknown };
  if (typeof errno === "number" && failures[errno]) return failures[errno];
  return typeof code === "string" && Object.hasOwn(names, code) ? names[code] : undefined;
}
