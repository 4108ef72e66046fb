/** Who holds what, and who waits for whom: the contract behind `hf.inspect()`. */
/** A session of the server (a process, where the file itself is the database). */
export interface Session {
  readonly id: string;
  /** What the session says of itself; empty if nothing, or if this user may not see it. */
  readonly application: string;
  readonly state: string;
  /** When its transaction began; undefined if it is in none, or the server does not tell. */
  readonly since: Date | undefined;
}

export interface LockView {
  readonly kind: "advisory" | "lock row" | "row" | "table" | "lease" | "database";
  /** The name of a key where it is known, else the server's own word for what is locked. */
  readonly name: string;
  readonly mode: string;
  readonly granted: boolean;
  readonly session: Session;
  /** How long it has been waited for; undefined if it is held, or the server does not tell. */
  readonly waitingMs: number | undefined;
  /** Ids of the sessions in the way. */
  readonly blockedBy: readonly string[];
}
