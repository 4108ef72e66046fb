import type { Connection } from "../../seam/database.ts";
import { ConnectionLostError, DeadlineExceededError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import { isOpaque } from "../../seam/thrown.ts";
import { graceMs, within } from "../../waiting/interrupt.ts";
import { type Section, sections } from "../../context/section.ts";
import type { Run } from "../plan.ts";
import { Scope } from "../scope.ts";
import type { Body } from "../types.ts";
import { type ServerTransaction, bodyGraceMs } from "./server-transaction.ts";
import { watchForStalls } from "../stall.ts";

/** Where a body runs. */
export interface Ground<Native, C extends Connection> {
  readonly connection: C;
  readonly native: Native;
  /** Somebody wants the client's own. */
  readonly touched?: (() => void) | undefined;
  readonly section: Section | undefined;
  readonly server: ServerTransaction<Native, C>;
  /** The connection is lost while the body runs. */
  readonly onLost?: (() => void) | undefined;
}

/** A body in its transaction: runs until it ends, or until it has been told to stop and did not. */
export class RunningBody<Native, C extends Connection> {
  readonly scope: Scope<Native, C>;
  /** What it threw. */
  thrown: unknown;
  readonly #run: Run<Native, C>;
  readonly #ground: Ground<Native, C>;
  /** Made when somebody asks for it, which most bodies do not. */
  #stop: AbortController | undefined;
  #cancelling: Promise<void> | undefined;
  #timer: NodeJS.Timeout | undefined;
  #abandon!: (error: unknown) => void;

  constructor(run: Run<Native, C>, ground: Ground<Native, C>) {
    this.#run = run;
    this.#ground = ground;
    const { locks, isolation, readOnly, site } = run.plan;
    this.scope = new Scope(
      run.context,
      {
        connection: ground.connection,
        native: ground.native,
        touched: ground.touched,
        signal: () => this.#signal(),
        stop: run.deadline.signal,
        attempt: run.attempt,
        joined: false,
        isolation,
        readOnly,
        site,
        section: ground.section,
      },
      locks,
    );
  }

  get connection(): C {
    return this.#ground.connection;
  }

  #signal(): AbortSignal {
    if (this.#stop) return this.#stop.signal;
    const { signal: outer } = this.#run.deadline;
    const { lost } = this.connection;
    this.#stop = new AbortController();
    if (outer.aborted) this.#stop.abort(outer.reason);
    else if (lost.aborted) this.#tellLost();
    else if (this.scope.open && !this.#ground.onLost)
      lost.addEventListener("abort", this.#onLost, { once: true });
    return this.#stop.signal;
  }

  readonly #tellLost = () =>
    this.#stop?.abort(new ConnectionLostError(this.#run.attempt, this.connection.lost.reason));

  readonly #onLost = () => {
    this.#ground.onLost?.();
    this.#tellLost();
  };

  readonly #onStop = () => {
    const { reason } = this.#run.deadline.signal;
    this.#stop?.abort(reason);
    this.#cancelling = this.connection.cancel?.().catch(() => {});
    this.#timer = setTimeout(() => {
      this.#ground.server.abandon();
      this.#abandon(reason);
    }, bodyGraceMs);
  };

  async run<T>(body: Body<Native, T>): Promise<T> {
    const { context, deadline } = this.#run;
    const { section } = this.#ground;
    const { scope } = this;
    const outer = deadline.signal;
    outer.addEventListener("abort", this.#onStop, { once: true });
    if (this.#ground.onLost) this.connection.lost.addEventListener("abort", this.#onLost, { once: true });
    const unwatch = context.database.traits.synchronous ? watchForStalls() : undefined;
    try {
      const enter = () => context.current.run(scope, () => Promise.resolve().then(() => body(scope)));
      const running = context.wrongConnection.theirs(() =>
        section ? sections.run(section, enter) : enter(),
      );
      const value = await new Promise<T>((resolve, reject) => {
        this.#abandon = reject;
        running.then(resolve, reject);
      });
      outer.throwIfAborted();
      if (section?.failure) throw section.failure;
      return value;
    } catch (error) {
      this.thrown = error;
      if (!outer.aborted) throw error;
      const { reason } = outer;
      if (!(reason instanceof DeadlineExceededError) || error === reason) throw reason;
      // The body's own error stays visible, as the cause of ours. What we have interrupted is no reason for the deadline.
      const interrupted =
        !isOpaque(error) &&
        (error instanceof DeadlineExceededError || classify(context.database, error) === "canceled");
      throw new DeadlineExceededError(
        deadline.ms,
        error,
        interrupted ? "a statement that was still running was interrupted" : "",
      );
    } finally {
      unwatch?.();
      this.#leave();
      // A cancel that could still be under way would hit our ROLLBACK.
      if (this.#cancelling) await within(graceMs, this.#cancelling).catch(this.#ground.server.abandon);
    }
  }

  #leave(): void {
    const { signal: outer } = this.#run.deadline;
    const { lost } = this.connection;
    clearTimeout(this.#timer);
    outer.removeEventListener("abort", this.#onStop);
    if (this.#stop || this.#ground.onLost) lost.removeEventListener("abort", this.#onLost);
    // What a body sends whose transaction was taken from it is not a forgotten await.
    if (!outer.aborted && !lost.aborted) this.#ground.section?.left();
    this.scope.close(
      this.#ground.server.isAbandoned ? "it was given up after an abort" : "its body has ended",
    );
  }
}
