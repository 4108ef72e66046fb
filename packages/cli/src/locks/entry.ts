/** What is seen of a lock: who holds it, or waits for it. */
import type { LockView, Session } from "holdfast";
import type { ExecRun } from "../exec/record.ts";

export type LockKind = LockView["kind"] | "schedule" | "queue";

/** A session with what is known of whoever has it. */
export interface Who extends Session {
  readonly user: string;
  /** Its address; behind a pooler, the pooler's. */
  readonly client: string;
  /** What it runs, or ran last, without values. Empty: the server does not tell. */
  readonly statement: string;
  /** What it does is hidden from this user. */
  readonly hidden: boolean;
  /** It is in another database of the server: locks of GET_LOCK are everybody's. */
  readonly elsewhere: boolean;
  /** A worker of the server's, such as autovacuum: nobody's connection, so nobody can end it. */
  readonly worker: boolean;
  /** It is `holdfast exec`, which holds its locks for as long as a command runs. */
  readonly exec?: { readonly run: ExecRun | undefined } | undefined;
}

/** A lock or a lease that is held or waited for. */
export interface Entry extends Omit<LockView, "kind" | "session"> {
  readonly kind: LockKind;
  readonly session: Who;
  /** Until when it lasts if it is not renewed: of leases. */
  readonly until?: Date | undefined;
  /** The number of the lease, to refuse a late holder by. */
  readonly fence?: number | undefined;
}
