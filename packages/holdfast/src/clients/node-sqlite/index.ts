import type { Database, DriverError, Row } from "../../seam/database.ts";
import { message } from "../../seam/errors.ts";
import { type SqliteDriver, type PreparedHandle, fromHandles } from "../../engines/sqlite/handles.ts";
import type { SqliteConnection } from "../../engines/sqlite/index.ts";

/** The part of a DatabaseSync of node:sqlite that is used here. */
export interface NodeSqliteHandle {
  /** Since Node 22.16. */
  readonly isTransaction?: boolean;
  prepare(text: string): {
    all(...values: never[]): unknown[];
    run(...values: never[]): { changes: number | bigint };
    /** Since Node 22.16. */
    columns?(): unknown[];
    /** Since Node 24. */
    setReturnArrays?(enabled: boolean): void;
  };
  exec(text: string): void;
  close(): void;
}

function prepare(handle: NodeSqliteHandle, text: string): PreparedHandle {
  const prepared = handle.prepare(text);
  // Whatever the handle was opened with.
  prepared.setReturnArrays?.(false);
  if (prepared.columns?.().length === 0)
    return (values) => ({ rows: [], affected: Number(prepared.run(...(values as never[])).changes) });
  // Its rows have no prototype, unlike everybody else's.
  return (values) => ({
    rows: (prepared.all(...(values as never[])) as Row[]).map((row) => ({ ...row })),
    affected: 0,
  });
}

const driver: SqliteDriver<NodeSqliteHandle> = {
  client: "node:sqlite",
  call: "fromNodeSqlite",
  is(value) {
    const handle = value as Partial<NodeSqliteHandle> | null;
    return (
      typeof handle === "object" &&
      handle !== null &&
      typeof handle.prepare === "function" &&
      typeof handle.exec === "function" &&
      // That would be another client's.
      !("inTransaction" in handle)
    );
  },
  inTransaction(handle) {
    if (handle.isTransaction !== undefined) return handle.isTransaction;
    // Older ones do not tell. This one takes no lock, and fails inside of another one.
    try {
      handle.exec("BEGIN DEFERRED");
    } catch (error) {
      if (/within a transaction/.test(message(error))) return true;
      throw error;
    }
    handle.exec("ROLLBACK");
    return false;
  },
  prepare,
  exec: (handle, text) => handle.exec(text),
  file(handle) {
    // Not by the table of that name, which is read with the schema, and so not while somebody else commits.
    const row = prepare(handle, "PRAGMA database_list")([]).rows.find(({ name }) => name === "main");
    return typeof row?.file === "string" && row.file !== "" ? row.file : undefined;
  },
  reopen(handle, file) {
    const Handle = handle.constructor as new (name: string) => NodeSqliteHandle;
    const other = new Handle(file);
    other.exec("PRAGMA busy_timeout = 0");
    return other;
  },
  close: (handle) => handle.close(),
  // The code of its errors is the same for all of them; SQLite's own is beside it.
  unwrap(error) {
    const { code, errcode } = error as DriverError & { errcode?: number };
    return code === "ERR_SQLITE_ERROR" && typeof errcode === "number"
      ? { code: errcode, message: message(error) }
      : undefined;
  },
};

/**
 * A DatabaseSync of node:sqlite, or a function that opens one. With a function every transaction gets a handle of its
 * own (up to `handles`, 4 by default); with one DatabaseSync transactions queue up for it, and whatever else the
 * program runs on that handle meanwhile becomes part of the transaction.
 */
export function fromNodeSqlite<Handle extends NodeSqliteHandle>(
  source: Handle | (() => Handle),
  { handles = 4 } = {},
): Database<Handle, SqliteConnection> {
  return fromHandles(driver as unknown as SqliteDriver<Handle>, source, handles);
}
