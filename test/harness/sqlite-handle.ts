/** What handles of better-sqlite3 and node:sqlite have in common. */
export interface SqliteHandle {
  prepare(text: string): {
    run(...values: unknown[]): unknown;
    get(...values: unknown[]): unknown;
    iterate(...values: unknown[]): Iterator<unknown>;
  };
  exec(text: string): void;
}
