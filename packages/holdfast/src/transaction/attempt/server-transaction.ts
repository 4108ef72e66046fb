import { leavesOpen } from "./commit-outcome.ts";
import type { Capabilities } from "../../seam/capabilities.ts";
import type { Begun, Connection, Later, LockGrant, Open, Pinned } from "../../seam/database.ts";
import { ConnectionLostError, TransactionAbortedError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import { traced } from "../../events/events.ts";
import { graceMs, interruptible, within } from "../../waiting/interrupt.ts";
import type { LockRequest } from "../../seam/key.ts";
import type { Run } from "../plan.ts";

/** After an abort the body gets this long to end by itself; then its connection is taken away. */
export const bodyGraceMs = 1000;
/** The server evicts a little later than we give up ourselves: a rollback keeps the connection, an eviction costs it. */
const serverGraceMs = 250;
/** Where there is no other connection to go on with, also the grace of a body that does not end by itself. */
const singleGraceMs = bodyGraceMs + 1000;

/** How COMMIT ended. */
export interface Committed {
  /** The connection is fit for others. */
  readonly reusable: boolean;
  /** COMMIT was sent, and its answer lost. */
  readonly unanswered?: { readonly error: unknown };
  /** Nothing was kept. */
  readonly failed?: { readonly error: unknown };
}

/**
 * The transaction of a run as its server has it: how it is begun and ended, and whether its connection is fit for others
 * afterwards.
 */
export class ServerTransaction<Native, C extends Connection> {
  readonly #run: Run<Native, C>;
  /** What the engine has said of it. */
  begun: Begun | undefined;
  /** BEGIN has been sent, or was about to be. */
  #opening = false;
  /** Locks were to be taken on the session, before BEGIN. */
  #lockFirst = false;
  #isAbandoned = false;

  constructor(run: Run<Native, C>) {
    this.#run = run;
  }

  /** Something on its connection has not ended, such as the body after an abort: it must not be given to anybody else. */
  readonly abandon = (): void => {
    this.#isAbandoned = true;
  };

  get isAbandoned(): boolean {
    return this.#isAbandoned;
  }

  /** Until when the server keeps it. */
  get deadlineMs(): number {
    const { context, deadline } = this.#run;
    return deadline.leftMs + (context.database.traits.single ? singleGraceMs : serverGraceMs);
  }

  /** What the engine is told to begin it. `begun`: its client has written BEGIN. */
  open(begun: boolean, lockFirst: boolean, capabilities: Capabilities): Open {
    const { context, plan, deadline } = this.#run;
    const { locks, wait, isolation, readOnly } = plan;
    const { deadlineMs } = this;
    return {
      begun,
      lockFirst,
      isolation,
      readOnly,
      deadlineMs,
      locks,
      wait: wait === "nowait" ? wait : Math.min(wait, deadlineMs),
      names: context.shown(locks),
      capabilities,
      signal: deadline.signal,
      run: plan,
    };
  }

  /** With its locks. What it resolves to becomes `begun`. */
  begin(
    connection: C,
    begun: boolean,
    lockFirst: boolean,
    capabilities: Capabilities,
  ): Promise<LockGrant & { begun?: Begun }> {
    const { context, plan, deadline } = this.#run;
    const { engine } = context.database;
    const { locks } = plan;
    this.#opening = true;
    this.#lockFirst = lockFirst;
    const begin = () =>
      interruptible(
        connection,
        deadline.signal,
        () => engine.begin(connection, this.open(begun, lockFirst, capabilities)),
        this.abandon,
      );
    if (locks.length === 0) return begin();
    return traced(
      "holdfast:lock",
      () => ({ kind: "transaction", locks: context.names(locks) }),
      async (told) => {
        const grant = await begin();
        if (told) told.outcome = grant.granted ? "granted" : grant.reason;
        return grant;
      },
    );
  }

  /** The same for one that began with the first statement of a body, which has ended. Undefined: it has sent none. */
  began(later: Later<C>): Promise<Begun> | undefined {
    const opening = later.end();
    this.#opening = opening !== undefined;
    return opening && within(this.#run.deadline.leftMs + graceMs, opening);
  }

  /** The body sends nothing more. Undefined: nothing is under way. */
  seal(lent: Pick<Pinned<Native, C>, "seal">): Promise<void> | undefined {
    const sealing = lent.seal?.();
    // What is not answered now keeps the connection from everybody.
    return sealing ? within(graceMs, sealing).catch(this.abandon) : undefined;
  }

  /** Undoes what the body did, and keeps its locks. */
  async keepLocks(connection: C, locks: readonly LockRequest[]): Promise<void> {
    const { context, deadline } = this.#run;
    const { engine } = context.database;
    await interruptible(
      connection,
      deadline.signal,
      async () => engine.keepLocks?.(connection, locks, context.shown(locks)),
      this.abandon,
    );
  }

  /** Before the client's own COMMIT: throws if the transaction is no longer what was begun. */
  settle(connection: C): Promise<void> {
    const { context, deadline } = this.#run;
    const settling = context.database.engine.settle?.(connection, this.begun ?? {});
    return within(deadline.leftMs + graceMs, settling ?? Promise.resolve());
  }

  async commit(pinned: Pinned<Native, C>): Promise<Committed> {
    const { context, deadline, attempt } = this.#run;
    const { database } = context;
    const { connection } = pinned;
    const { lost } = connection;
    if (this.#opening && lost.aborted)
      return { reusable: false, failed: { error: new ConnectionLostError(attempt, lost.reason) } };
    const sealing = this.seal(pinned);
    if (sealing) await sealing;
    if (!this.#opening) return { reusable: true };
    try {
      const ending = database.engine.end(connection, "commit", this.begun ?? {});
      return { reusable: await within(deadline.leftMs + graceMs, ending) };
    } catch (error) {
      const failure = classify(database, error);
      // The engine knows better where the loss came before COMMIT was sent.
      if (error instanceof ConnectionLostError) return { reusable: false, failed: { error } };
      const known = error instanceof TransactionAbortedError;
      if (!known && (leavesOpen(failure, this.begun) || lost.aborted))
        return { reusable: false, unanswered: { error } };
      // The server has ended it already where it turned COMMIT into ROLLBACK.
      const reusable = known || (await this.#undo(connection));
      return { reusable, failed: { error } };
    }
  }

  /** Resolves to whether the connection is fit for others. */
  async rollBack(pinned: Pinned<Native, C>): Promise<boolean> {
    const sealing = this.seal(pinned);
    if (sealing) await sealing;
    return this.#undo(pinned.connection);
  }

  async #undo(connection: C): Promise<boolean> {
    const { context, plan } = this.#run;
    const { engine } = context.database;
    if (this.#isAbandoned || connection.lost.aborted) return false;
    if (!this.#opening) return true;
    try {
      const clean = await within(graceMs, engine.end(connection, "rollback", this.begun ?? {}));
      // Locks of the session, taken before BEGIN by a call that did not come to its end, outlive the rollback.
      if (this.#lockFirst && !this.begun)
        await within(graceMs, engine.session?.clear(connection, plan.locks) ?? Promise.resolve());
      return clean;
    } catch {
      return false;
    }
  }
}
