import type { Database, Row } from "../../seam/database.ts";
import { type SqliteDriver, fromHandles } from "../../engines/sqlite/handles.ts";
import type { SqliteConnection } from "../../engines/sqlite/index.ts";

/** The part of a better-sqlite3 Database that is used here. */
export interface SqliteHandle {
  readonly inTransaction: boolean;
  readonly open: boolean;
  readonly name: string;
  readonly memory: boolean;
  prepare(text: string): {
    readonly reader: boolean;
    all(...values: unknown[]): unknown[];
    run(...values: unknown[]): { changes: number };
  };
  exec(text: string): unknown;
  close(): unknown;
}

const driver: SqliteDriver<SqliteHandle> = {
  client: "better-sqlite3",
  call: "fromBetterSqlite3",
  is(value) {
    const handle = value as Partial<SqliteHandle> | null;
    return (
      typeof handle === "object" &&
      handle !== null &&
      typeof handle.prepare === "function" &&
      typeof handle.inTransaction === "boolean"
    );
  },
  inTransaction: (handle) => handle.inTransaction,
  prepare(handle, text) {
    const prepared = handle.prepare(text);
    if (prepared.reader) return (values) => ({ rows: prepared.all(...values) as Row[], affected: 0 });
    return (values) => ({ rows: [], affected: prepared.run(...values).changes });
  },
  exec: (handle, text) => void handle.exec(text),
  file: (handle) => (handle.memory || handle.name === "" ? undefined : handle.name),
  reopen(handle, file) {
    const Handle = handle.constructor as new (name: string, options: object) => SqliteHandle;
    return new Handle(file, { fileMustExist: true, timeout: 0 });
  },
  close: (handle) => void handle.close(),
};

/**
 * A better-sqlite3 Database, or a function that opens one. With a function every transaction gets a handle of its
 * own (up to `handles`, 4 by default); with one Database transactions queue up for it, and whatever else the
 * program runs on that handle meanwhile becomes part of the transaction.
 */
export function fromBetterSqlite3<Handle extends SqliteHandle>(
  source: Handle | (() => Handle),
  { handles = 4 } = {},
): Database<Handle, SqliteConnection> {
  return fromHandles(driver as unknown as SqliteDriver<Handle>, source, handles);
}
