import { type Capabilities, require } from "../../seam/capabilities.ts";
import { emit } from "../../events/events.ts";
import type { Begun, Connection, Later, Pinned } from "../../seam/database.ts";
import { ConnectionLostError, DeadlineExceededError } from "../../seam/errors.ts";
import { type Locked, type Section } from "../../context/section.ts";
import { isOpaque } from "../../seam/thrown.ts";
import type { Deadline } from "../../waiting/deadline.ts";
import { Silence, graceMs, interruptible, within } from "../../waiting/interrupt.ts";
import { Refused } from "../../waiting/refused.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { runInClient } from "../client-transaction.ts";
import { checkSupport, isAtCommit, isNamed, stillKept } from "../lock-support.ts";
import { type Plan, checkPlan } from "../plan.ts";
import type { InstanceContext } from "../scope.ts";
import type { Body } from "../types.ts";
import { leavesOpen, lookUpCommit } from "./commit-outcome.ts";
import { askIfKilled } from "./ended-by.ts";
import { type Ran, failureOf } from "./errors.ts";
import { RunningBody } from "./running-body.ts";
import { type Committed, ServerTransaction } from "./server-transaction.ts";

/** How a body ended that is to be committed: `thrown`, its work is undone, and only its locks are. */
type Ended<T> = { readonly value: T } | { readonly thrown: unknown };

/** One run of a plan: gets a connection, begins, runs the body, ends. */
export class Attempt<Native, C extends Connection> implements Ran<Native, C> {
  readonly context: InstanceContext<Native, C>;
  readonly plan: Plan;
  readonly deadline: Deadline;
  readonly attempt: number;
  readonly #server: ServerTransaction<Native, C>;
  #body: RunningBody<Native, C> | undefined;
  #section: Section | undefined;
  #connection: C | undefined;
  /** When its locks were granted. */
  #lockedAt: number | undefined;
  /** The body has ended well: from here on only COMMIT can fail. */
  #done = false;
  #killed: Promise<boolean | undefined> | undefined;

  constructor(context: InstanceContext<Native, C>, plan: Plan, deadline: Deadline, attempt: number) {
    this.context = context;
    this.plan = plan;
    this.deadline = deadline;
    this.attempt = attempt;
    this.#server = new ServerTransaction(this);
  }

  get body(): RunningBody<Native, C> | undefined {
    return this.#body;
  }

  /** Whether somebody ended it on purpose counts. */
  get mayBeKilled(): boolean {
    return !this.plan.retry.afterKill && this.context.database.engine.wasKilled !== undefined;
  }

  /** Whether somebody did, as was asked when its connection was lost under the body. Undefined: it was not, or nobody could tell. */
  get killed(): Promise<boolean | undefined> | undefined {
    return this.#killed;
  }

  /** What the server had of it; undefined: it never had a connection. */
  get opened(): { readonly connection: C; readonly begun: Begun | undefined } | undefined {
    return this.#connection && { connection: this.#connection, begun: this.#server.begun };
  }

  async execute<T>(body: Body<Native, T>): Promise<T> {
    const { locks, isolation } = this.plan;
    // Before a connection is ours: which of several databases this is may have to be written down in all of them.
    if (this.context.guard && !this.context.trusted())
      await unlessAborted(this.context.renewed(), this.deadline.signal, () => {});
    if (locks.some(({ key }) => isNamed(key))) {
      checkSupport(locks, await this.context.capabilities(), false);
      require(await this.context.sessionSupport(), "A lock of the session, which must be taken before BEGIN");
    } else if (locks.length > 0 && isolation !== "read committed") await this.#checkSessions();
    const started = performance.now();
    const { transaction } = this.context.database;
    const names = () => this.context.names(this.plan.locks);
    try {
      const value = transaction ? await this.#inClient(body) : await this.#onPinned(body);
      emit("holdfast:transaction:end", () => ({
        attempt: this.attempt,
        locks: names(),
        outcome: "commit",
        durationMs: performance.now() - started,
        ...this.#held(),
      }));
      return value;
    } catch (error) {
      emit("holdfast:transaction:end", () => ({
        attempt: this.attempt,
        locks: names(),
        outcome: "rollback",
        durationMs: performance.now() - started,
        ...this.#held(),
        // Already told as holdfast:lock:refused.
        ...((isOpaque(error) || !(error instanceof Refused)) && { error }),
      }));
      throw error;
    } finally {
      this.#section?.end();
    }
  }

  #held(): { heldMs?: number } {
    return this.#lockedAt === undefined ? {} : { heldMs: performance.now() - this.#lockedAt };
  }

  /** Before a connection is ours: the experiment needs two, and a small pool might not have three. */
  async #checkSessions(): Promise<void> {
    const { isolation } = this.plan;
    const { lockFirstIsolation } = await this.context.capabilities();
    if (!lockFirstIsolation.includes(isolation)) return;
    require(await this.context.sessionSupport(), `A lock under ${isolation}, which must be taken before BEGIN`);
  }

  async #onPinned<T>(body: Body<Native, T>): Promise<T> {
    const { database } = this.context;
    const { locks, wait } = this.plan;
    const connect = database.connect as NonNullable<typeof database.connect>;
    const { signal } = this.deadline;
    const connecting = this.context.wrongConnection.taking(() =>
      connect({ use: "transaction", locks, wait, signal }),
    );
    const pinned = await connecting.catch((error: unknown) => {
      throw error instanceof DeadlineExceededError
        ? error.while("it was still waiting for a connection")
        : error;
    });
    let reusable = false;
    let outcome: Ended<T>;
    let committed: Committed;
    try {
      try {
        outcome = await this.#performed(pinned, () => pinned.native, false, body, pinned.hold);
      } catch (error) {
        reusable = await this.#server.rollBack(pinned);
        throw error;
      }
      committed = await this.#server.commit(pinned);
      ({ reusable } = committed);
      if (committed.failed) throw committed.failed.error;
    } finally {
      const released = pinned.release(!reusable);
      // A connection that nobody answers on any more is not waited for.
      if (released) await within(graceMs, released).catch(() => {});
    }
    // Only now: a pool may have no other connection to ask on.
    return this.#answer(outcome, committed.unanswered);
  }

  async #inClient<T>(body: Body<Native, T>): Promise<T> {
    const { database } = this.context;
    const { locks, wait, isolation, readOnly } = this.plan;
    // With one connection for everybody, the question would wait for whoever has it, and for longer than the lock may.
    const known = database.traits.single ? this.context.known() : await this.context.capabilities();
    let outcome: Ended<T> | undefined;
    const options = {
      use: "transaction" as const,
      locks,
      wait,
      isolation,
      readOnly,
      deadlineMs: this.#server.deadlineMs,
      isolationIsDefault: known?.defaultIsolation === isolation,
    };
    const time = { signal: this.deadline.signal, leftMs: () => this.deadline.leftMs };
    try {
      await this.context.wrongConnection.taking((granted) =>
        runInClient(database, options, time, async (lent) => {
          granted();
          const { connection, native, begun = true } = lent;
          const flushing: Body<Native, T> = async (tx) => {
            const value = await body(tx);
            await database.flush?.(native);
            return value;
          };
          const whole = database.flush ? flushing : body;
          const ended = await this.#performed(lent, () => native, begun, whole);
          await this.#server.settle(connection);
          outcome = ended;
          this.#done = true;
        }),
      );
    } catch (error) {
      if (!this.#done || !leavesOpen(failureOf(this, error), this.#server.begun)) throw error;
      return this.#answer(outcome as unknown as Ended<T>, { error });
    }
    return this.#answer(outcome as unknown as Ended<T>, undefined);
  }

  async #answer<T>(outcome: Ended<T>, unanswered: Committed["unanswered"]): Promise<T> {
    if ("value" in outcome) {
      if (unanswered) await lookUpCommit(this, this.#server.begun ?? {}, this.#body?.scope, unanswered.error);
      return outcome.value;
    }
    // There was nothing to keep, but whether the body was right to throw is not known.
    throw unanswered ? new ConnectionLostError(this.attempt, unanswered.error) : outcome.thrown;
  }

  /**
   * Where locks exclude at COMMIT only, another node may have committed what the body has not seen. If it returns, COMMIT tells.
   * If it throws, what it threw may be wrong for the same reason: then its work is undone, and its locks alone are committed,
   * which fails if others had them.
   */
  async #performed<T>(
    lent: Pick<Pinned<Native, C>, "connection" | "seal">,
    native: () => Native,
    begun: boolean,
    body: Body<Native, T>,
    hold?: Pinned<Native, C>["hold"],
  ): Promise<Ended<T>> {
    const { connection } = lent;
    try {
      return { value: await this.#perform(connection, native, begun, body, hold) };
    } catch (error) {
      const locks = this.#body?.scope.taken ?? [];
      const failure = failureOf(this, error);
      const rightAnyway =
        locks.length === 0 ||
        !isAtCommit(this.context) ||
        this.#server.isAbandoned ||
        connection.lost.aborted ||
        this.deadline.signal.aborted ||
        (failure !== undefined && this.plan.retry.on.has(failure));
      if (rightAnyway) throw error;
      // What the body has left behind must not come after its work is undone.
      await this.#server.seal(lent);
      if (this.#server.isAbandoned) throw error;
      this.context.database.forget?.(native());
      await this.#server.keepLocks(connection, locks);
      return { thrown: error };
    }
  }

  async #perform<T>(
    connection: C,
    native: () => Native,
    begun: boolean,
    body: Body<Native, T>,
    hold: Pinned<Native, C>["hold"],
  ): Promise<T> {
    const { context, plan } = this;
    const { engine } = context.database;
    const { locks, wait, isolation, readOnly, site } = plan;
    this.#connection = connection;
    const server = this.#server;
    const capabilities = this.#known() ?? (await this.#asked(connection, !begun));
    context.guard?.(locks);
    const lockFirst = checkPlan(plan, capabilities);
    emit("holdfast:transaction:begin", () => ({
      attempt: this.attempt,
      locks: context.names(locks),
      isolation,
    }));
    const section = (this.#section = context.watch?.section(site));
    const locked: Locked | undefined = section && locks.length > 0 ? { kind: "key", keys: locks } : undefined;
    // There may be a transaction around it, which holds something.
    if (locked && wait !== "nowait") section?.asks(locked, site);
    const later =
      hold && locks.length === 0
        ? engine.beginLater?.(connection, capabilities, () => server.open(begun, lockFirst, capabilities))
        : undefined;
    if (later && hold) return this.#lazily(later, native(), hold, body);
    const started = performance.now();
    const grant = await server.begin(connection, begun, lockFirst, capabilities);
    const waitedMs = performance.now() - started;
    server.begun = grant.begun;
    if (!grant.granted) {
      const { reason, cause } = grant;
      emit("holdfast:lock:refused", () => ({ locks: context.names(locks), waitedMs, reason }));
      throw new Refused(reason, Math.round(waitedMs), cause);
    }
    if (locks.length > 0) {
      if (context.trusted() !== capabilities) await stillKept(context, connection, capabilities);
      this.#lockedAt = started + waitedMs;
      emit("holdfast:lock:granted", () => ({ locks: context.names(locks), waitedMs }));
    }
    if (locked) section?.took(locked, site);
    else if (!readOnly && capabilities.granularity === "database")
      section?.took({ kind: "database", name: "database" }, site);
    return this.#run(connection, native(), body);
  }

  /** What locks rest on must have been asked not long ago. */
  get #needsTrust(): boolean {
    return this.plan.locks.length > 0 || this.context.guard !== undefined;
  }

  #known(): Capabilities | undefined {
    return this.#needsTrust ? this.context.trusted() : this.context.known();
  }

  #asked(connection: C, free: boolean): Promise<Capabilities> {
    const { context } = this;
    const ask = () =>
      this.#needsTrust ? context.renewed(connection, free) : context.capabilities(connection, free);
    return interruptible(connection, this.deadline.signal, ask, this.#server.abandon);
  }

  /** With a transaction that begins when something is first sent in it: a body that sends nothing opens none. */
  async #lazily<T>(
    later: Later<C>,
    native: Native,
    hold: NonNullable<Pinned<Native, C>["hold"]>,
    body: Body<Native, T>,
  ): Promise<T> {
    let isHeld = false;
    const touched = () => {
      if (!isHeld) hold(later.begin());
      isHeld = true;
    };
    let ended: { readonly value: T } | { readonly error: unknown };
    try {
      ended = { value: await this.#run(later.connection, native, body, touched) };
    } catch (error) {
      ended = { error };
    }
    const opening = this.#server.began(later);
    try {
      if (opening) this.#server.begun = await opening;
    } catch (error) {
      if (error instanceof Silence) this.#server.abandon();
      // It is why the body failed, or what it swallowed, unless it was told to stop.
      if (this.deadline.signal.aborted && "error" in ended) throw ended.error;
      if (this.#body) this.#body.thrown = undefined;
      throw error;
    }
    if ("error" in ended) throw ended.error;
    return ended.value;
  }

  #run<T>(connection: C, native: Native, body: Body<Native, T>, touched?: () => void): Promise<T> {
    this.deadline.signal.throwIfAborted();
    const section = this.#section;
    const onLost = this.mayBeKilled ? () => void (this.#killed = askIfKilled(this)) : undefined;
    const running = new RunningBody(this, {
      connection,
      native,
      touched,
      section,
      server: this.#server,
      onLost,
    });
    this.#body = running;
    return running.run(body);
  }
}
