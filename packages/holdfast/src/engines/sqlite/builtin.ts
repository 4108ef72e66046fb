/** The SQLite that is part of the runtime; undefined where there is none. */
export function builtinSqlite(): typeof import("node:sqlite") | undefined {
  // Without the warning of older ones that it is new: the application may not even use it.
  const { emitWarning } = process;
  process.emitWarning = () => {};
  try {
    return process.getBuiltinModule("node:sqlite");
  } finally {
    process.emitWarning = emitWarning;
  }
}
