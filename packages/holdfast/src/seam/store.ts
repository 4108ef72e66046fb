/** How the store of a pattern is to go about a call. */
export interface How {
  /** How long it may wait for somebody else's transaction. */
  readonly waitMs: number;
  /**
   * The connection is in no transaction: the store opens a short one, and ends it. False: it is inside of the caller's, or of
   * one that the client has begun.
   */
  readonly free: boolean;
  /** Several calls, about several things: whom one of them has to wait for, the others need not. They are sent apart then. */
  readonly several?: boolean;
}

/** Some engines answer at once. */
export type Soon<T> = T | Promise<T>;
