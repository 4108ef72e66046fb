import { require, requireHeld } from "../seam/capabilities.ts";
import { Deadline } from "../waiting/deadline.ts";
import { notConnected, withConnection } from "./one-shot.ts";
import type { Begun, Connection, Failure, Isolation, Later, Open, Pinned, Wait } from "../seam/database.ts";
import { type Traces, emit, traced } from "../events/events.ts";
import {
  CommitUnknownError,
  ConnectionLostError,
  DeadlineExceededError,
  FileBusyError,
  HoldfastError,
  LockTimeoutError,
  PoolExhaustedError,
  SerializationError,
  TransactionAbortedError,
  UsageError,
  WrongConnectionError,
} from "../seam/errors.ts";
import { chain, classify, explained, waited } from "../seam/failure.ts";
import { runInClient } from "./client-transaction.ts";
import { Silence, graceMs, interruptible, within } from "../waiting/interrupt.ts";
import type { LockRequest, Lockable } from "../seam/key.ts";
import { present } from "./present.ts";
import { Refused, refusal } from "../waiting/refused.ts";
import { asWritten } from "../seam/replay.ts";
import { type RetryOptions, type RetryPolicy, retrying, wasRolledBack } from "./retry.ts";
import {
  type InstanceContext,
  Scope,
  type Transaction,
  checkSupport,
  failureWithin,
  stillKept,
} from "./scope.ts";
import { type Locked, type Section, sections } from "../context/section.ts";
import type { CallSite } from "../context/call-site.ts";
import { isOpaque } from "../seam/thrown.ts";
import { sleep } from "../waiting/wait.ts";
import * as protection from "../seam/protections.ts";

export interface TransactionOptions {
  /** Taken before the body runs, in one canonical order, held until the transaction has ended. */
  readonly lock?: Lockable | readonly Lockable[];
  /** How long to wait for the locks: milliseconds, or "nowait". Default: the instance's, 5 s. */
  readonly wait?: Wait;
  /** Default "read committed". */
  readonly isolation?: Isolation;
  readonly readOnly?: boolean;
  /** Milliseconds for the whole call, retries and waits included. Enforced by the server too. Default 60 s. */
  readonly deadline?: number;
  /** Gives up: cancels what runs on the server, rolls back, rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
  /** `false`: never run the body twice. */
  readonly retry?: RetryOptions | false;
  /** Inside another transaction of this instance: a connection of its own instead of a savepoint. */
  readonly separate?: boolean;
}

/** Whatever opens transactions: an instance of Holdfast. */
export interface Transactor<Native> {
  transaction<T>(options: TransactionOptions, body: (tx: Transaction<Native>) => Promise<T>): Promise<T>;
}

export interface Plan {
  readonly locks: readonly LockRequest[];
  readonly wait: Wait;
  readonly isolation: Isolation;
  readonly readOnly: boolean;
  readonly deadlineMs: number;
  readonly signal: AbortSignal | undefined;
  readonly retry: RetryPolicy;
  /** The call, if it means that nobody else is at it while its body runs. */
  readonly alone?: string | undefined;
  /** Where it was called. */
  readonly site: CallSite | undefined;
}

/** After an abort the body gets this long to end by itself; then its connection is taken away. */
const bodyGraceMs = 1000;
/** The server evicts a little later than we give up ourselves: a rollback keeps the connection, an eviction costs it. */
const serverGraceMs = 250;
/** Where there is no other connection to go on with, also the grace of a body that does not end by itself. */
const singleGraceMs = bodyGraceMs + 1000;
const resolveMs = 15_000;

/** As the caller wrote it. */
const written = ({ key, mode }: LockRequest): LockRequest => ({ key: asWritten(key), mode });

/** Of what a body threw, these are told in words of ours. */
const told: ReadonlySet<Failure> = new Set<Failure>([
  "deadlock",
  "serialization",
  "unavailable",
  "lost",
  "deadline",
  "aborted",
]);

/** How a body ended that is to be committed: `thrown`, its work is undone, and only its locks are. */
type Ended<T> = { readonly value: T } | { readonly thrown: unknown };

type Body<Native, T> = (tx: Transaction<Native>) => Promise<T>;

/** Runs a plan until it is committed, fails for good, or is out of attempts or time. */
export function runTransaction<Native, C extends Connection, T>(
  context: InstanceContext<Native, C>,
  plan: Plan,
  body: Body<Native, T>,
): Promise<T> {
  return traced(
    "holdfast:transaction",
    () => ({ locks: context.names(plan.locks), isolation: plan.isolation, attempts: 1 }),
    (told) => runAttempts(context, plan, body, told),
  );
}

async function runAttempts<Native, C extends Connection, T>(
  context: InstanceContext<Native, C>,
  plan: Plan,
  body: Body<Native, T>,
  told: Traces["holdfast:transaction"] | undefined,
): Promise<T> {
  const deadline = new Deadline(plan.deadlineMs, plan.signal);
  const { retry } = plan;
  const locks = () => context.names(plan.locks);
  let before: { failure: string; delayMs: number } | undefined;
  let run!: Attempt<Native, C>;
  try {
    return await retrying(
      ({ attempt }) => {
        run = new Attempt(context, plan, deadline, attempt);
        if (!before) return run.execute(body);
        if (told) told.attempts = attempt;
        const why = before;
        return traced(
          "holdfast:retry",
          () => ({ attempt, locks: locks(), ...why }),
          () => run.execute(body),
        );
      },
      {
        why: (error) => run.failure(error),
        on: retry.on,
        policy: retry,
        attempts: (failure) =>
          wasRolledBack.includes(failure) && isAtCommit(context) ? retry.attemptsAtCommit : retry.attempts,
        wanted: () => !deadline.signal.aborted,
        signal: deadline.signal,
        again({ why: failure, attempt, delayMs }) {
          emit("holdfast:transaction:retry", () => ({ attempt, locks: locks(), failure, delayMs }));
          before = { failure, delayMs };
        },
        async failed(error) {
          throw (await run.present(error)).error;
        },
      },
    );
  } finally {
    deadline.clear();
  }
}

/** Whether two can have a lock at the same time, on different nodes, until one of them commits. */
function isAtCommit(context: { known(): { readonly exclusion: string } | undefined }): boolean {
  return context.known()?.exclusion === "at commit";
}

function misuse(error: unknown): HoldfastError | undefined {
  for (const each of chain(error))
    if (each instanceof WrongConnectionError || each instanceof PoolExhaustedError) return each;
  return undefined;
}

class Attempt<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #plan: Plan;
  readonly #deadline: Deadline;
  readonly #attempt: number;
  #begun: Begun | undefined;
  #connection: C | undefined;
  /** BEGIN has been sent, or was about to be. */
  #opening = false;
  /** When its locks were granted. */
  #lockedAt: number | undefined;
  /** Locks were to be taken on the session, before BEGIN. */
  #lockFirst = false;
  #scope: Scope<Native, C> | undefined;
  #section: Section | undefined;
  /** What the body threw. */
  #thrown: unknown;
  /** The body has ended well: from here on only COMMIT can fail. */
  #done = false;
  /** The body did not end after an abort; its connection must not be given to anybody else. */
  #abandoned = false;

  constructor(context: InstanceContext<Native, C>, plan: Plan, deadline: Deadline, attempt: number) {
    this.#context = context;
    this.#plan = plan;
    this.#deadline = deadline;
    this.#attempt = attempt;
  }

  failure(error: unknown) {
    if (isOpaque(error)) return undefined;
    if (error instanceof Refused) return error.reason === "busy" ? undefined : "lock-timeout";
    if (error instanceof SerializationError) return "serialization";
    const { database } = this.#context;
    // An ORM wraps what is thrown in its callbacks.
    const own = [...chain(error)].find((each) => each instanceof HoldfastError);
    if (own instanceof LockTimeoutError || own instanceof FileBusyError) return "lock-timeout";
    const within = own && failureWithin(this.#scope, own);
    if (own && !within && !(own instanceof ConnectionLostError)) return undefined;
    // A body talks to others too: that one of them hung up says nothing of our connection.
    const sockets = this.#thrown !== error || this.#connection?.lost.aborted === true;
    const failure = within ?? classify(database, error, sockets);
    // What was not to wait is not to wait now.
    if (failure === "lock-timeout" && waited(database, error, this.#context.known()?.flavour) !== true)
      return undefined;
    return failure;
  }

  async execute<T>(body: Body<Native, T>): Promise<T> {
    if (this.#plan.locks.length > 0 && this.#plan.isolation !== "read committed") await this.#checkSessions();
    const started = performance.now();
    const { transaction } = this.#context.database;
    const names = () => this.#context.names(this.#plan.locks);
    try {
      const value = transaction ? await this.#inClient(body) : await this.#onPinned(body);
      emit("holdfast:transaction:end", () => ({
        attempt: this.#attempt,
        locks: names(),
        outcome: "commit",
        durationMs: performance.now() - started,
        ...this.#held(),
      }));
      return value;
    } catch (error) {
      emit("holdfast:transaction:end", () => ({
        attempt: this.#attempt,
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

  get #graceMs(): number {
    return this.#context.database.traits.single ? singleGraceMs : serverGraceMs;
  }

  #held(): { heldMs?: number } {
    return this.#lockedAt === undefined ? {} : { heldMs: performance.now() - this.#lockedAt };
  }

  /** Before a connection is ours: the experiment needs two, and a small pool might not have three. */
  async #checkSessions(): Promise<void> {
    const { isolation } = this.#plan;
    const { lockFirstIsolation } = await this.#context.capabilities();
    if (!lockFirstIsolation.includes(isolation)) return;
    require(await this.#context.sessionSupport(), `A lock under ${isolation}, which must be taken before BEGIN`);
  }

  async #onPinned<T>(body: Body<Native, T>): Promise<T> {
    const { database } = this.#context;
    const { engine } = database;
    const { locks, wait } = this.#plan;
    const connect = database.connect as NonNullable<typeof database.connect>;
    const { signal } = this.#deadline;
    const connecting = this.#context.wrongConnection.taking(() =>
      connect({ use: "transaction", locks, wait, signal }),
    );
    const pinned = await connecting.catch((error: unknown) => {
      throw error instanceof DeadlineExceededError
        ? error.while("it was still waiting for a connection")
        : error;
    });
    const { connection } = pinned;
    let reusable = false;
    let unanswered: { error: unknown } | undefined;
    let outcome: Ended<T>;
    try {
      try {
        outcome = await this.#performed(pinned, () => pinned.native, false, body, pinned.hold);
      } catch (error) {
        await this.#seal(pinned);
        reusable = await this.#undo(connection);
        throw error;
      }
      if (this.#opening && connection.lost.aborted)
        throw new ConnectionLostError(this.#attempt, connection.lost.reason);
      await this.#seal(pinned);
      try {
        reusable =
          !this.#opening ||
          (await within(
            this.#deadline.leftMs + graceMs,
            engine.end(connection, "commit", this.#begun ?? {}),
          ));
      } catch (error) {
        const failure = classify(database, error);
        // The engine knows better where the loss came before COMMIT was sent.
        if (error instanceof ConnectionLostError) throw error;
        if (failure === "lost" || failure === "deadline" || connection.lost.aborted) unanswered = { error };
        else {
          // The server has ended it already where it turned COMMIT into ROLLBACK.
          reusable = error instanceof TransactionAbortedError || (await this.#undo(connection));
          throw error;
        }
      }
    } finally {
      // A connection that nobody answers on any more is not waited for.
      await within(graceMs, Promise.resolve(pinned.release(!reusable))).catch(() => {});
    }
    // Only now: a pool may have no other connection to ask on.
    return this.#answer(outcome, unanswered);
  }

  async #answer<T>(outcome: Ended<T>, unanswered: { readonly error: unknown } | undefined): Promise<T> {
    if ("value" in outcome) {
      if (unanswered) await this.#resolve(unanswered.error);
      return outcome.value;
    }
    // There was nothing to keep, but whether the body was right to throw is not known.
    throw unanswered ? new ConnectionLostError(this.#attempt, unanswered.error) : outcome.thrown;
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
      const { database, shown } = this.#context;
      const locks = this.#scope?.taken ?? [];
      const failure = this.failure(error);
      const rightAnyway =
        locks.length === 0 ||
        !isAtCommit(this.#context) ||
        this.#abandoned ||
        connection.lost.aborted ||
        this.#deadline.signal.aborted ||
        (failure !== undefined && this.#plan.retry.on.has(failure));
      if (rightAnyway) throw error;
      // What the body has left behind must not come after its work is undone.
      await this.#seal(lent);
      if (this.#abandoned) throw error;
      database.forget?.(native());
      await interruptible(
        connection,
        this.#deadline.signal,
        async () => database.engine.keepLocks?.(connection, locks, shown(locks)),
        () => (this.#abandoned = true),
      );
      return { thrown: error };
    }
  }

  async #seal(lent: Pick<Pinned<Native, C>, "seal">): Promise<void> {
    const sealing = lent.seal?.();
    // What is not answered now keeps the connection from everybody.
    if (sealing) await within(graceMs, sealing).catch(() => (this.#abandoned = true));
  }

  /** Resolves to whether the connection is fit for others. */
  async #undo(connection: C): Promise<boolean> {
    const { engine } = this.#context.database;
    if (this.#abandoned || connection.lost.aborted) return false;
    if (!this.#opening) return true;
    try {
      const clean = await within(graceMs, engine.end(connection, "rollback", this.#begun ?? {}));
      // Locks of the session, taken before BEGIN by a call that did not come to its end, outlive the rollback.
      if (this.#lockFirst && !this.#begun)
        await within(graceMs, engine.session?.clear(connection, this.#plan.locks) ?? Promise.resolve());
      return clean;
    } catch {
      return false;
    }
  }

  async #inClient<T>(body: Body<Native, T>): Promise<T> {
    const { database } = this.#context;
    const { locks, wait, isolation, readOnly } = this.#plan;
    // With one connection for everybody, the question would wait for whoever has it, and for longer than the lock may.
    const known = database.traits.single ? this.#context.known() : await this.#context.capabilities();
    let outcome: Ended<T> | undefined;
    const options = {
      use: "transaction" as const,
      locks,
      wait,
      isolation,
      readOnly,
      deadlineMs: this.#deadline.leftMs + this.#graceMs,
      isolationIsDefault: known?.defaultIsolation === isolation,
    };
    const time = { signal: this.#deadline.signal, leftMs: () => this.#deadline.leftMs };
    try {
      await this.#context.wrongConnection.taking((granted) =>
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
          await within(
            this.#deadline.leftMs + graceMs,
            database.engine.settle?.(connection, this.#begun ?? {}) ?? Promise.resolve(),
          );
          outcome = ended;
          this.#done = true;
        }),
      );
    } catch (error) {
      const failure = this.#done ? this.failure(error) : undefined;
      if (failure !== "lost" && failure !== "deadline") throw error;
      return this.#answer(outcome as unknown as Ended<T>, { error });
    }
    return this.#answer(outcome as unknown as Ended<T>, undefined);
  }

  async #perform<T>(
    connection: C,
    native: () => Native,
    begun: boolean,
    body: Body<Native, T>,
    hold: Pinned<Native, C>["hold"],
  ): Promise<T> {
    const { engine } = this.#context.database;
    const { locks, wait, isolation, readOnly } = this.#plan;
    const silent = () => (this.#abandoned = true);
    const { trusted, known, renewed, guard, capabilities: facts } = this.#context;
    const [found, ask] = locks.length > 0 || guard ? [trusted(), renewed] : [known(), facts];
    const capabilities =
      found ??
      (await interruptible(connection, this.#deadline.signal, () => ask(connection, !begun), silent));
    guard?.(locks);
    checkSupport(locks, capabilities, false);
    if (this.#plan.alone !== undefined) requireHeld(capabilities, this.#plan.alone);
    if (!capabilities.isolation.includes(isolation)) {
      throw new UsageError(
        `Isolation "${isolation}" is not one of this server's: ${capabilities.isolation.join(", ")}`,
      );
    }
    const lockFirst = locks.length > 0 && capabilities.lockFirstIsolation.includes(isolation);
    this.#lockFirst = lockFirst;
    if (!lockFirst && locks.length > 0 && !capabilities.lockIsolation.includes(isolation)) {
      throw new UsageError(
        `A lock under ${isolation} protects nothing: the transaction's snapshot is taken before the wait for the lock ends, so ` +
          `the check would read what was true before. Use ${[...capabilities.lockIsolation, ...capabilities.lockFirstIsolation].join(" or ")}.`,
        "HF_ISOLATION",
      );
    }
    emit("holdfast:transaction:begin", () => ({
      attempt: this.#attempt,
      locks: this.#context.names(locks),
      isolation,
    }));
    const open = (): Open => {
      const deadlineMs = this.#deadline.leftMs + this.#graceMs;
      return {
        begun,
        lockFirst,
        isolation,
        readOnly,
        deadlineMs,
        locks,
        wait: wait === "nowait" ? wait : Math.min(wait, deadlineMs),
        names: this.#context.shown(locks),
        capabilities,
        signal: this.#deadline.signal,
      };
    };
    const { site } = this.#plan;
    const section = (this.#section = this.#context.watch?.section(site));
    const locked: Locked | undefined = section && locks.length > 0 ? { kind: "key", keys: locks } : undefined;
    // There may be a transaction around it, which holds something.
    if (locked && wait !== "nowait") section?.asks(locked, site);
    const later =
      hold && locks.length === 0 ? engine.beginLater?.(connection, capabilities, open) : undefined;
    if (later && hold) return this.#lazily(later, native(), hold, body);
    this.#opening = true;
    const started = performance.now();
    const begin = () =>
      interruptible(connection, this.#deadline.signal, () => engine.begin(connection, open()), silent);
    const grant =
      locks.length === 0
        ? await begin()
        : await traced(
            "holdfast:lock",
            () => ({ kind: "transaction", locks: this.#context.names(locks) }),
            async (told) => {
              const grant = await begin();
              if (told) told.outcome = grant.granted ? "granted" : grant.reason;
              return grant;
            },
          );
    const waitedMs = performance.now() - started;
    this.#begun = grant.begun;
    if (!grant.granted) {
      emit("holdfast:lock:refused", () => ({
        locks: this.#context.names(locks),
        waitedMs,
        reason: grant.reason,
      }));
      throw new Refused(grant.reason, Math.round(waitedMs), grant.cause);
    }
    if (locks.length > 0) {
      if (trusted() !== capabilities) await stillKept(this.#context, connection, capabilities);
      this.#lockedAt = started + waitedMs;
      emit("holdfast:lock:granted", () => ({ locks: this.#context.names(locks), waitedMs }));
    }
    if (locked) section?.took(locked, site);
    else if (!readOnly && capabilities.granularity === "database")
      section?.took({ kind: "database", name: "database" }, site);
    return this.#watch(connection, native(), body);
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
      ended = { value: await this.#watch(later.connection, native, body, touched) };
    } catch (error) {
      ended = { error };
    }
    const opening = later.end();
    this.#opening = opening !== undefined;
    try {
      if (opening) this.#begun = await within(this.#deadline.leftMs + graceMs, opening);
    } catch (error) {
      if (error instanceof Silence) this.#abandoned = true;
      // It is why the body failed, or what it swallowed, unless it was told to stop.
      if (this.#deadline.signal.aborted && "error" in ended) throw ended.error;
      this.#thrown = undefined;
      throw error;
    }
    if ("error" in ended) throw ended.error;
    return ended.value;
  }

  /** Runs the body until it ends, or until it has been told to stop and did not. */
  async #watch<T>(connection: C, native: Native, body: Body<Native, T>, touched?: () => void): Promise<T> {
    const { locks, isolation, readOnly } = this.#plan;
    this.#connection = connection;
    this.#deadline.signal.throwIfAborted();
    const outer = this.#deadline.signal;
    // Made when somebody asks for it, which most bodies do not.
    let stop: AbortController | undefined;
    const onLost = () => stop?.abort(new ConnectionLostError(this.#attempt, connection.lost.reason));
    const signal = (): AbortSignal => {
      if (stop) return stop.signal;
      stop = new AbortController();
      if (outer.aborted) stop.abort(outer.reason);
      else if (connection.lost.aborted) onLost();
      else if (scope.open) connection.lost.addEventListener("abort", onLost, { once: true });
      return stop.signal;
    };
    const scope = new Scope(
      this.#context,
      {
        connection,
        native,
        touched,
        signal,
        stop: outer,
        attempt: this.#attempt,
        joined: false,
        isolation,
        readOnly,
        site: this.#plan.site,
        section: this.#section,
      },
      locks,
    );
    this.#scope = scope;
    let cancelling: Promise<void> | undefined;
    let timer: NodeJS.Timeout | undefined;
    let abandon!: (error: unknown) => void;
    const onStop = () => {
      stop?.abort(outer.reason);
      cancelling = connection.cancel?.().catch(() => {});
      timer = setTimeout(() => {
        this.#abandoned = true;
        abandon(outer.reason);
      }, bodyGraceMs);
    };
    outer.addEventListener("abort", onStop, { once: true });
    try {
      const section = this.#section;
      const enter = () => this.#context.current.run(scope, () => Promise.resolve().then(() => body(scope)));
      const running = this.#context.wrongConnection.theirs(() =>
        section ? sections.run(section, enter) : enter(),
      );
      const value = await new Promise<T>((resolve, reject) => {
        abandon = reject;
        running.then(resolve, reject);
      });
      outer.throwIfAborted();
      if (section?.failure) throw section.failure;
      return value;
    } catch (error) {
      this.#thrown = error;
      if (!outer.aborted) throw error;
      const { reason } = outer;
      // The body's own error stays visible, as the cause of ours.
      throw reason instanceof DeadlineExceededError && error !== reason
        ? new DeadlineExceededError(this.#deadline.ms, error)
        : reason;
    } finally {
      clearTimeout(timer);
      outer.removeEventListener("abort", onStop);
      if (stop) connection.lost.removeEventListener("abort", onLost);
      // What a body sends whose transaction was taken from it is not a forgotten await.
      if (!outer.aborted && !connection.lost.aborted) this.#section?.left();
      scope.close(this.#abandoned ? "it was given up after an abort" : "its body has ended");
      // A cancel that could still be under way would hit our ROLLBACK.
      if (cancelling) await within(graceMs, cancelling).catch(() => (this.#abandoned = true));
    }
  }

  /** COMMIT was sent and its answer lost. Returns if the server says that it was kept. */
  async #resolve(error: unknown): Promise<void> {
    const { engine } = this.#context.database;
    const identity = this.#begun?.identity;
    // A transaction without identity has written nothing that could be lost.
    if (identity === undefined && this.#plan.readOnly) return;
    if (!engine.outcome || identity === undefined)
      throw new CommitUnknownError("this engine keeps no record of it to ask", error);
    if (!protection.commitLookedUp) throw new ConnectionLostError(this.#attempt, error);
    const until = performance.now() + resolveMs;
    let last: unknown = error;
    let detail = "the server could not tell what became of it";
    for (let i = 0; performance.now() < until; i++) {
      try {
        const ask = engine.outcome.bind(engine);
        // On a connection that has nothing to do with the lost one.
        const outcome = await withConnection(this.#context, async (connection) => {
          const outcome = await ask(connection, identity);
          const kept = outcome === "ended" ? await this.#scope?.wasKept(connection) : undefined;
          return kept === undefined ? outcome : kept ? "committed" : "aborted";
        });
        if (outcome !== "in progress")
          emit("holdfast:commit:resolved", () => ({ outcome: outcome === "ended" ? "unknown" : outcome }));
        if (outcome === "committed") return;
        if (outcome === "aborted") throw new ConnectionLostError(this.#attempt, error);
        if (outcome === "ended")
          detail = "the server has recovered from a crash since, or another has taken its place";
        if (outcome === "ended" || outcome === "unknown") break;
      } catch (askError) {
        if (askError instanceof ConnectionLostError) throw askError;
        last = askError;
      }
      await sleep(Math.min(500, 20 * 2 ** i));
    }
    throw new CommitUnknownError(detail, last);
  }

  /** In a box: what a body threw may be anything, and a promise of a promise is resolved to what that is resolved to. */
  async present(error: unknown): Promise<{ readonly error: unknown }> {
    if (isOpaque(error)) return { error };
    const shown = await this.#shown(error);
    // The server keeps the deadline too, and ends the session: after a pause of the whole process it comes first.
    return shown.error instanceof ConnectionLostError && this.#deadline.over
      ? { error: new DeadlineExceededError(this.#deadline.ms, shown.error) }
      : shown;
  }

  async #shown(error: unknown): Promise<{ readonly error: unknown }> {
    if (!(error instanceof Refused)) return { error: this.#named(error) };
    const { locks } = this.#plan;
    const holders = await this.#context.holders(locks);
    return { error: refusal(error, { keys: this.#context.names(locks), holders }) };
  }

  #named(error: unknown): unknown {
    if (error instanceof HoldfastError || error === this.#deadline.signal.reason) return error;
    // An ORM wraps what its driver throws, and so what the guard throws in its place.
    const guard = misuse(error);
    if (guard) return guard;
    const { database } = this.#context;
    const failure = this.failure(error);
    const dealtWith = failure !== undefined && told.has(failure);
    // What the body threw is the caller's own, and so is what its COMMIT brings to light.
    if (!dealtWith && this.#scope) return this.#thrown === error ? error : explained(database, error);
    return present(
      database,
      notConnected(database, error),
      {
        names: dealtWith && this.#scope ? [] : this.#context.names(this.#plan.locks.map(written)),
        attempts: this.#attempt,
        waitedMs: this.#deadline.ms,
        atCommit: isAtCommit(this.#context),
      },
      failure,
    );
  }
}
