import type { DriverError, Failure, Violated } from "../../seam/database.ts";
import { notPrimary } from "./primary.ts";

/** Server error numbers; MySQL and MariaDB agree on most. */
const failures: Readonly<Record<number, Failure>> = {
  1213: "deadlock",
  // Rolled back by a deadlock inside XA.
  1614: "deadlock",
  // A deadlock among GET_LOCK waiters (MySQL; MariaDB says 1213).
  3058: "deadlock",
  // MariaDB, innodb_snapshot_isolation: the row changed since the snapshot.
  1020: "serialization",
  // MariaDB: an earlier COMMIT failed that this one had to come after.
  1964: "serialization",
  // Group Replication: another member was first.
  3101: "serialization",
  1205: "lock-timeout",
  // NOWAIT (MySQL; MariaDB says 1205).
  3572: "lock-timeout",
  1062: "unique",
  1586: "unique",
  1216: "foreign-key",
  1217: "foreign-key",
  1451: "foreign-key",
  1452: "foreign-key",
  // MySQL, MariaDB.
  3819: "check",
  4025: "check",
  // KILL QUERY; then max_execution_time (MySQL) and max_statement_time (MariaDB).
  1317: "canceled",
  3024: "canceled",
  1969: "canceled",
  1290: "read-only",
  1792: "read-only",
  1836: "read-only",
  1146: "schema-missing",
  // A column: the table is there, and older than this code.
  1054: "schema-missing",
  // To a database, as a user, to a table, to a column, for want of a privilege, to a routine; and as whom nobody can sign in so.
  1044: "denied",
  1045: "denied",
  1142: "denied",
  1143: "denied",
  1227: "denied",
  1370: "denied",
  1698: "denied",
  // Disk, a table, memory.
  1021: "full",
  1114: "full",
  1037: "full",
  1038: "full",
  1041: "full",
  // A file that cannot be opened, read or written; a table or an index that is damaged.
  1016: "storage",
  1024: "storage",
  1026: "storage",
  1034: "storage",
  1194: "storage",
  1195: "storage",
  1712: "storage",
  1877: "storage",
  // Of the server, of the user.
  1040: "too-many-connections",
  1203: "too-many-connections",
  1226: "too-many-connections",
  // Killed, shut down, aborted, network, gone away, lost during query, idle for too long.
  1053: "lost",
  1152: "lost",
  1158: "lost",
  1159: "lost",
  1160: "lost",
  1161: "lost",
  1184: "lost",
  1927: "lost",
  2006: "lost",
  2013: "lost",
  3169: "lost",
  4031: "lost",
};

const names: Readonly<Record<string, Failure>> = {
  PROTOCOL_CONNECTION_LOST: "lost",
  ER_CONNECTION_KILLED: "lost",
  ER_SERVER_SHUTDOWN: "lost",
};

/** Numbers that mean this only with these words, whatever language the rest is in. */
const worded: readonly {
  readonly errnos: readonly number[];
  readonly words: RegExp;
  readonly failure: Failure;
}[] = [
  // "Got error 149 … during COMMIT" (a deadlock), "Got error 153 … during ROLLBACK" (no savepoint with that name), "… from
  // storage engine": Group Replication has undone the transaction, to apply what another member had committed.
  { errnos: [1180, 1181, 1030], words: /\b(?:149|153)\b/, failure: "serialization" },
  // "Got error 28 … during COMMIT", "… from storage engine": no space left on the device.
  { errnos: [1180, 1181, 1030], words: /\b28\b/, failure: "full" },
  // A number is out of range, in a condition of ours.
  { errnos: [1690], words: notPrimary, failure: "read-only" },
  // "WSREP has not yet prepared node for application use": Galera. Elsewhere it is an unknown command.
  { errnos: [1047], words: /\bWSREP\b/, failure: "unavailable" },
];

export function classify(error: DriverError): Failure | undefined {
  const { errno, code, message } = error as DriverError & { errno?: unknown };
  if (typeof errno === "number" && failures[errno]) return failures[errno];
  for (const { errnos, words, failure } of worded)
    if (errnos.includes(errno as number) && words.test(String(message))) return failure;
  return typeof code === "string" && Object.hasOwn(names, code) ? names[code] : undefined;
}

/** Settings that statements of ours cannot go on under, by the errors that tell of them. */
const settings: Readonly<Record<number, string>> = {
  1665:
    "binlog_format is STATEMENT, and the server refuses to write at READ COMMITTED then, as every transaction of Holdfast's does. " +
    "Set binlog_format to MIXED or ROW, in the server's settings or, with the right to it, in what the pool sends first",
  1568:
    "A transaction is still open on this connection: somebody began it, and gave the connection back to the pool without COMMIT or " +
    "ROLLBACK. In a session with autocommit off every read does so, and with completion_type CHAIN every COMMIT. Turn that off, or look for " +
    "the code that does",
};

export function hopeless(error: DriverError): string | undefined {
  const { errno } = error as DriverError & { errno?: unknown };
  return typeof errno === "number" ? settings[errno] : undefined;
}

/** Whether a server is read only, and not a transaction. */
export function isReplica(error: object): boolean {
  const { errno } = error as { errno?: unknown };
  return errno === 1290 || errno === 1836 || errno === 1690;
}

/** In words only: "… for key 'product.name'", MariaDB without the table; "… CONSTRAINT `name` FOREIGN KEY …". */
export function violated(error: object): Violated {
  const text = (error as { sqlMessage?: string }).sqlMessage ?? (error as Error).message;
  const key = /for key '(?:([^'.]+)\.)?([^']+)'/.exec(text);
  if (key) return { table: key[1], constraint: key[2] };
  const [, table, constraint] =
    /fails \(`[^`]*`\.`([^`]*)`, CONSTRAINT `([^`]*)`/.exec(text) ??
    /CONSTRAINT ()[`']([^`']*)/i.exec(text) ??
    [];
  return { table: table || undefined, constraint };
}

/** MariaDB has one number for both. */
export function waited(error: object, flavour?: string): boolean | undefined {
  const { errno } = error as { errno?: unknown };
  if (errno === 3572) return false;
  return errno === 1205 && flavour === "mysql" ? true : undefined;
}
