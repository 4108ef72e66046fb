/** `hf.transactionSync`: a transaction whose body is over when it returns. */
import type { Connection, Row, SyncCall, SyncClient, SyncInside, Wait } from "../seam/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError } from "../seam/errors.ts";
import { type Lockable, type LockRequest, canonical, wanted } from "../seam/key.ts";
import { type Statement, sql } from "../seam/sql.ts";
import { emit } from "../events/events.ts";
import { checkNames } from "../input/options.ts";
import { Refused, refusal } from "../waiting/refused.ts";
import { checkWait } from "../waiting/wait.ts";
import { HeldLocks } from "./scope/held-locks.ts";
import { checkSupport } from "./lock-support.ts";
import { present } from "./present.ts";
import type { InstanceContext } from "./scope.ts";

export interface SyncOptions {
  /** Held from before the body until the transaction has ended. */
  readonly lock?: Lockable | readonly Lockable[];
  /** How long the process may stand still until they are free: milliseconds, or "nowait". Default: the instance's, 5 s. */
  readonly wait?: Wait;
  readonly readOnly?: boolean;
}

/** What a body works with that is over when it returns. */
export interface SyncTransaction<Native> {
  /** The client's own transaction: write with it as you always do. */
  readonly client: Native;
  /** Whether this transaction took the lock and still has it. */
  holds(lock: Lockable): boolean;
  /** Runs a statement built with `sql`. */
  query<R extends Row = Row>(statement: Statement): R[];
}

export type SyncBody<Native, T> = (tx: SyncTransaction<Native>) => T;

const names = new Set(["lock", "wait", "readOnly"]);

class SyncScope<Native> implements SyncTransaction<Native> {
  readonly readOnly: boolean;
  readonly #inside: SyncInside<Native>;
  readonly #held: HeldLocks;
  #isOver = false;

  constructor(
    inside: SyncInside<Native>,
    locks: readonly LockRequest[],
    readOnly: boolean,
    outer?: SyncScope<Native>,
  ) {
    this.#inside = inside;
    this.#held = new HeldLocks(locks, outer && outer.#held);
    this.readOnly = readOnly;
  }

  get client(): Native {
    return this.#inside.native;
  }

  holds(lock: Lockable): boolean {
    return canonical(lock).every((request) => this.#held.has(request));
  }

  query<R extends Row = Row>(statement: Statement): R[] {
    if (this.#isOver) throw new NotInTransactionError("this transaction is over: its body has ended.");
    return [...this.#inside.query(statement)] as R[];
  }

  /** A savepoint of this one. Who writes to the file has all of its locks. */
  nest<T>(run: (inner: SyncScope<Native>) => T, locks: readonly LockRequest[], depth: number): T {
    const savepoint = (text: string) => void this.query(sql.raw(`${text} holdfast_${depth}`));
    savepoint("SAVEPOINT");
    const inner = new SyncScope(this.#inside, locks, this.readOnly, this);
    try {
      const value = run(inner);
      savepoint("RELEASE");
      return value;
    } catch (error) {
      try {
        savepoint("ROLLBACK TO");
        savepoint("RELEASE");
      } catch {
        // The whole transaction was rolled back, as its end will tell.
      }
      throw error;
    }
  }

  run<T>(body: SyncBody<Native, T>): T {
    try {
      const value = body(this);
      if (typeof (value as PromiseLike<unknown> | undefined)?.then === "function") {
        // What it still does fails, since the transaction is over.
        (value as PromiseLike<unknown>).then(undefined, () => {});
        throw new UsageError(
          "hf.transactionSync: the body returned a promise, and the transaction ends when it returns. Use hf.transaction(…).",
        );
      }
      return value;
    } finally {
      this.#isOver = true;
    }
  }
}

export class SyncTransactions<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #open: SyncScope<Native>[] = [];

  constructor(context: InstanceContext<Native, C>) {
    this.#context = context;
  }

  run<T>(options: SyncOptions, body: SyncBody<Native, T>): T {
    checkNames("hf.transactionSync", options, names);
    const { started, current, database, guard } = this.#context;
    const locks = wanted(options);
    const wait = options.wait === undefined ? this.#context.wait : checkWait(options.wait);
    const readOnly = options.readOnly ?? false;
    if (!database.sync)
      throw new UnsupportedError(
        `hf.transactionSync: the calls of ${database.traits.client} are answered later. Use hf.transaction(…)`,
      );
    if (guard)
      throw new UnsupportedError(
        "hf.transactionSync: this database is one of several. Use hf.transaction(…)",
      );
    checkSupport(locks, database.sync.locks, false);
    const outer = this.#open.at(-1);
    if (outer) {
      if (outer.readOnly && (!readOnly || locks.length > 0))
        throw new UsageError("hf.transactionSync: the transaction around this one is read-only");
      return outer.nest((tx) => this.#within(tx, body), locks, this.#open.length);
    }
    if (current.getStore())
      throw new UsageError(
        "hf.transactionSync inside the body of hf.transaction, which writes to the file already: use its `tx.client`, or `tx.transaction(…)` for a savepoint.",
      );
    started.begin("hf.transactionSync");
    try {
      return this.#whole(database.sync, { locks, wait, readOnly }, body);
    } finally {
      started.end();
    }
  }

  #whole<T>(
    client: SyncClient<Native>,
    plan: Pick<SyncCall, "locks" | "wait" | "readOnly">,
    body: SyncBody<Native, T>,
  ): T {
    const context = this.#context;
    const { database } = context;
    const names = () => context.names(plan.locks);
    const begun = performance.now();
    let lockedAt: number | undefined;
    let thrown: { readonly error: unknown } | undefined;
    const ended = (outcome: "commit" | "rollback", failed?: { readonly error: unknown }) =>
      emit("holdfast:transaction:end", () => ({
        attempt: 1,
        locks: names(),
        outcome,
        durationMs: performance.now() - begun,
        ...(lockedAt !== undefined && { heldMs: performance.now() - lockedAt }),
        ...failed,
      }));
    emit("holdfast:transaction:begin", () => ({ attempt: 1, locks: names(), isolation: context.isolation }));
    try {
      const value = client.run({ ...plan, names }, (inside) => {
        if (plan.locks.length > 0) {
          const now = (lockedAt = performance.now());
          emit("holdfast:lock:granted", () => ({ locks: names(), waitedMs: now - begun }));
        }
        try {
          return this.#within(new SyncScope(inside, plan.locks, plan.readOnly), body);
        } catch (error) {
          thrown = { error };
          throw error;
        }
      });
      ended("commit");
      return value;
    } catch (error) {
      if (error instanceof Refused) {
        const { reason, waitedMs } = error;
        emit("holdfast:lock:refused", () => ({ locks: names(), waitedMs, reason }));
        ended("rollback");
        throw refusal(error, { keys: names(), holders: [] });
      }
      ended("rollback", { error });
      // What a body throws is the caller's own.
      throw thrown?.error === error ? error : present(database, error, { names: names() });
    }
  }

  #within<T>(scope: SyncScope<Native>, body: SyncBody<Native, T>): T {
    this.#open.push(scope);
    try {
      return scope.run(body);
    } finally {
      this.#open.pop();
    }
  }
}
