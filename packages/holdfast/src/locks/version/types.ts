import type { Transaction } from "../../transaction/types.ts";

export interface VersionedOptions {
  /** The columns that name a row. Default: the primary key. */
  readonly key?: string | readonly string[];
  /** The integer column that counts up with every write. Default "version". */
  readonly version?: string;
  /** How often to read and decide before giving up with `StaleVersionError`. Default 10. */
  readonly attempts?: number;
}

export interface UpdateOptions<Native = unknown> {
  readonly attempts?: number;
  readonly signal?: AbortSignal | undefined;
  /** Takes part in this transaction. Without it: in the one of the same instance whose body calls, if there is one. */
  readonly tx?: Transaction<Native> | Native;
  /** Inside a transaction's body: apart from it. What is written stays also if that is rolled back. */
  readonly separate?: boolean;
}

/** What to set; nothing: the row stays as it is. */
export type Changes<R> = Partial<R> | undefined;
