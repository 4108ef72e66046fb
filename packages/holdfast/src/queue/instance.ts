import type { Isolation } from "../seam/database.ts";
import type { Lockable } from "../seam/key.ts";

/** A lock of a session. Its signal aborts when the session is lost. */
export interface WorkSession extends AsyncDisposable {
  readonly signal: AbortSignal;
}

/** What is needed of an instance of Holdfast besides its database. */
export interface Instance {
  hold(lock: Lockable, options: { readonly signal: AbortSignal }): Promise<WorkSession>;
  transaction<T>(
    options: { readonly signal?: AbortSignal; readonly isolation: Isolation },
    body: (tx: never) => Promise<T>,
  ): Promise<T>;
}
