import type { DriverError, Failure, SqlConnection, Violated } from "../../seam/database.ts";
import { FileBusyError, SchemaMissingError, message } from "../../seam/errors.ts";

/** By name, as most clients write them, and by number, as node:sqlite does: https://sqlite.org/rescode.html */
const codes: readonly (readonly [number, string, Failure])[] = [
  [5, "SQLITE_BUSY", "lock-timeout"],
  [261, "SQLITE_BUSY_RECOVERY", "lock-timeout"],
  // Another connection has written since this one's snapshot: no waiting helps, only the whole transaction again.
  [517, "SQLITE_BUSY_SNAPSHOT", "serialization"],
  [773, "SQLITE_BUSY_TIMEOUT", "lock-timeout"],
  [6, "SQLITE_LOCKED", "lock-timeout"],
  [262, "SQLITE_LOCKED_SHAREDCACHE", "lock-timeout"],
  [2067, "SQLITE_CONSTRAINT_UNIQUE", "unique"],
  [1555, "SQLITE_CONSTRAINT_PRIMARYKEY", "unique"],
  [2579, "SQLITE_CONSTRAINT_ROWID", "unique"],
  [787, "SQLITE_CONSTRAINT_FOREIGNKEY", "foreign-key"],
  [275, "SQLITE_CONSTRAINT_CHECK", "check"],
  [8, "SQLITE_READONLY", "read-only"],
  [264, "SQLITE_READONLY_RECOVERY", "read-only"],
  [520, "SQLITE_READONLY_CANTLOCK", "read-only"],
  [776, "SQLITE_READONLY_ROLLBACK", "read-only"],
  [1032, "SQLITE_READONLY_DBMOVED", "read-only"],
  [1288, "SQLITE_READONLY_CANTINIT", "read-only"],
  [1544, "SQLITE_READONLY_DIRECTORY", "read-only"],
  [9, "SQLITE_INTERRUPT", "canceled"],
  [3, "SQLITE_PERM", "denied"],
  [23, "SQLITE_AUTH", "denied"],
  [7, "SQLITE_NOMEM", "full"],
  [13, "SQLITE_FULL", "full"],
];
const failures = new Map<string | number, Failure>(
  codes.flatMap(([number, name, failure]) => [[number, failure] as const, [name, failure] as const]),
);

/** Codes of which all kinds mean the same: the lowest byte of a kind's number is that of its code. */
const families: readonly (readonly [number, RegExp, Failure])[] = [
  [10, /^SQLITE_IOERR(?:_|$)/, "storage"],
  [11, /^SQLITE_CORRUPT(?:_|$)/, "storage"],
  [26, /^SQLITE_NOTADB$/, "storage"],
];

function familyOf(code: unknown): Failure | undefined {
  return families.find(([number, name]) =>
    typeof code === "number" ? (code & 0xff) === number : typeof code === "string" && name.test(code),
  )?.[2];
}

/** The writer's place was taken for too long for a statement that is safe to send again. */
export class StillBusy extends Error {
  readonly code = "HOLDFAST_BUSY";
  constructor(cause: unknown) {
    super("the file has another writer", { cause });
  }
}

/** As SQLite's own of a statement: it was to end, and nothing of it was done. */
export class Interrupted extends Error {
  readonly code = "SQLITE_INTERRUPT";
  constructor() {
    super("It was not to be waited for any longer");
  }
}

export function classify({ code }: DriverError): Failure | undefined {
  if (code === "HOLDFAST_BUSY") return "serialization";
  // Of @libsql/client, whose transaction is an object that ends.
  if (code === "TRANSACTION_CLOSED") return "not-in-transaction";
  return code === undefined ? undefined : (failures.get(code) ?? familyOf(code));
}

export function failureOf(connection: SqlConnection, error: unknown): Failure | undefined {
  return classify(connection.unwrap?.(error) ?? (error as DriverError));
}

export function isBusy(connection: SqlConnection, error: unknown): boolean {
  return error instanceof FileBusyError || failureOf(connection, error) === "lock-timeout";
}

/** Of a statement about tables of ours: the code of one that is not there is that of every mistake in SQL. */
export function explained(error: unknown): unknown {
  const name = /no such table: (?:main\.)?(\w+)/.exec(message(error))?.[1];
  return name === undefined ? error : new SchemaMissingError(`The table ${name}`, error);
}

/** "UNIQUE constraint failed: product.name, product.maker", and "CHECK constraint failed: name". */
export function violated(error: object): Violated {
  const [, rule, list = ""] = /(\w+) constraint failed: (.*)$/.exec(message(error)) ?? [];
  if (rule === "CHECK") return { constraint: list };
  const columns = list.split(", ").filter((name) => name.includes("."));
  if (columns.length === 0) return {};
  return {
    table: columns[0]?.split(".")[0],
    columns: columns.map((name) => name.slice(name.indexOf(".") + 1)),
  };
}
