/** Clients whose statements are synchronous calls, as far as tests that hold statements back must understand them. */

/** One statement that is about to be executed by such a call. */
export interface HookedCall<T> {
  /** With its values. */
  readonly text: string;
  /** The copy of the database's library that executes it: two in one process do not see each other's locks. */
  readonly library: string;
  /** What the application called: its callers count. */
  readonly above: (...args: never[]) => unknown;
  execute(): T;
  /** What was read, as text. */
  rows(result: T): readonly (readonly string[])[];
  /** An error that says "locked": how long the call would have waited, in milliseconds. Undefined: another error. */
  patience(error: unknown): number | undefined;
}

/** Every call goes through it, and takes as long as it takes. */
export interface StatementHook {
  pass<T>(call: HookedCall<T>): T;
}

/** What an engine does to its clients in this thread. */
export interface HookedStatements {
  /** Those whose calls go through the gate, for people. */
  readonly clients: readonly string[];
  /** Whether one of the thread's connections is inside a transaction. */
  inTransaction(): boolean;
  /** Ends transactions that were left open, as the end of a process would. */
  rollBack(): void;
}

/** `statement-hook.ts` of an engine exports it as `hookStatements`. */
export type HookStatements = (hook: StatementHook) => HookedStatements;
