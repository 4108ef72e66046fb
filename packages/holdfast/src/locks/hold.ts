import {
  type Capabilities,
  type Strategy,
  type Support,
  type Unsupported,
  isSupported,
  require,
  unsupported,
} from "../seam/capabilities.ts";
import type { Connection, Pinned, SessionLocks, Wait } from "../seam/database.ts";
import { LockLostError, NoConnectionError, UnsupportedError, message } from "../seam/errors.ts";
import { explained } from "../seam/failure.ts";
import { type Traces, emit, nextHold, traced } from "../events/events.ts";
import { apart } from "../context/inside.ts";
import { Silence, graceMs, interruptible, within } from "../waiting/interrupt.ts";
import type { LockRequest } from "../seam/key.ts";
import { notConnected } from "../transaction/one-shot.ts";
import { present, presenting } from "../transaction/present.ts";
import * as protection from "../seam/protections.ts";
import { Turns, unlessAborted } from "../waiting/turns.ts";
import { Refused, refusal } from "../waiting/refused.ts";
import { checkSupport, stillKept } from "../transaction/lock-support.ts";
import type { InstanceContext } from "../transaction/scope.ts";

/** A lock of a session: held until it is released, its connection dies, or the process ends. */
export interface Held extends AsyncDisposable {
  readonly keys: readonly string[];
  /** Aborts when the lock can no longer be relied on. Pass it to whatever the lock protects. */
  readonly signal: AbortSignal;
  /** Gives the lock back. Throws `LockLostError` if the server says that it was no longer held. */
  release(): Promise<void>;
}

const heartbeatMs = 5000;
/** How long a pool may take to give a connection, whatever the wait for the lock is. */
const poolMs = 10_000;

interface Opening {
  readonly signal: AbortSignal | undefined;
  readonly told: Traces["holdfast:lock"] | undefined;
  /** Told that it has to wait for its locks. */
  readonly waits: () => void;
}

/** A connection that holds locks. */
interface Member<Native, C extends Connection> {
  readonly pinned: Pinned<Native, C>;
  /** Statements on it, one at a time. */
  readonly queue: Turns;
  readonly keys: Set<string>;
  /** Those to be told when it is lost. */
  readonly losers: Set<(cause: unknown) => void>;
  timer?: NodeJS.Timeout;
  onLost?: () => void;
}

/**
 * Session locks share connections: a lock that is free is taken on one that already holds others. What must be
 * waited for gets a connection of its own, since a waiting connection cannot give anything back.
 */
export class Sessions<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #members = new Set<Member<Native, C>>();
  #verified: Promise<Support<Strategy>> | undefined;
  /** While a connection is being opened that others may share, until it is known whether they can. */
  #opening: Promise<void> | undefined;
  #closed = false;

  constructor(context: InstanceContext<Native, C>) {
    this.#context = context;
  }

  hold(requests: readonly LockRequest[], wait: Wait, signal?: AbortSignal): Promise<Held> {
    const { database } = this.#context;
    return presenting(
      database,
      this.#context.names(requests),
      () => this.#hold(requests, wait, signal),
      signal,
    );
  }

  async #hold(requests: readonly LockRequest[], wait: Wait, signal?: AbortSignal): Promise<Held> {
    const started = performance.now();
    this.#context.guard?.(requests);
    const before = this.#context.trusted() ?? (await this.#renewed());
    checkSupport(requests, before, false);
    require(await this.#support(), "Session locks");
    const locks = this.#context.database.engine.session as SessionLocks<C>;
    const member = await traced(
      "holdfast:lock",
      () => ({ kind: "session", locks: this.#context.names(requests) }),
      async (told) => {
        const found = await this.#onAny(locks, requests, wait, signal, told);
        if (told) told.outcome = "granted";
        return found;
      },
    );
    const { connection } = member.pinned;
    if (this.#context.trusted() !== before)
      await member.queue
        .run(() => stillKept(this.#context, connection, before))
        .catch(async (error: unknown) => {
          await member.queue
            .run(() => answered(connection, locks.clear(connection, requests)))
            .catch((e: unknown) => this.#lose(member, e));
          this.#forget(member, requests);
          throw error;
        });
    const hold = nextHold();
    emit("holdfast:session:held", () => ({
      hold,
      locks: this.#context.names(requests),
      waitedMs: performance.now() - started,
    }));
    return this.#held(member, locks, requests, hold);
  }

  /** On a connection that is there: a pool may have no other one to ask on. */
  async #renewed(): Promise<Capabilities> {
    for (const { queue, pinned } of this.#members)
      if (!pinned.connection.lost.aborted)
        return queue.run(() => this.#context.renewed(pinned.connection, true));
    return this.#context.renewed();
  }

  async support(): Promise<Support<Strategy>> {
    try {
      return await this.#support();
    } catch (error) {
      // A session lock keeps a connection: a pool that has not two to give would starve on it. It may have, later.
      // Told by the clock, and not by the client.
      if (error instanceof NoConnectionError && error.cause === undefined)
        return unsupported("the pool did not give two connections for it");
      throw error;
    }
  }

  /** Found out once, by experiment: poolers that lend sessions out look like servers. */
  async #support(): Promise<Support<Strategy>> {
    const { sessionLocks } = await this.#context.capabilities();
    if (!isSupported(sessionLocks)) return sessionLocks;
    if ((this.#context.database.room?.()?.max ?? 2) < 2)
      return unsupported("the pool has one connection, and a session lock would keep it from everybody else");
    this.#verified ??= this.#experiment().then((gap) => gap ?? sessionLocks);
    try {
      return await this.#verified;
    } catch (error) {
      this.#verified = undefined;
      throw error;
    }
  }

  async #experiment(): Promise<Unsupported | undefined> {
    const session = this.#context.database.engine.session as SessionLocks<C>;
    const a = await this.#connect();
    let broken = true;
    try {
      const b = await this.#connect();
      try {
        // Some clients wait for the pool only with their first statement.
        if (protection.locksVerified) await within(poolMs, this.#verifyLocks(a.connection, b.connection));
        await within(poolMs, session.verify(a.connection, b.connection));
        broken = false;
        return undefined;
      } catch (error) {
        if (error instanceof Silence) throw new NoConnectionError(poolMs);
        const refused = explained(this.#context.database, error);
        if (!(refused instanceof UnsupportedError)) throw error;
        // What it has ended is not given back to others.
        broken = refused !== error;
        return unsupported(refused.message);
      } finally {
        await b.release(broken);
      }
    } finally {
      await a.release(broken);
    }
  }

  /** Those of transactions too, since there are two connections at hand: locks of sessions are no better than they. */
  async #verifyLocks(a: C, b: C): Promise<void> {
    try {
      await this.#context.database.engine.verifyLocks?.(a, b);
    } catch (error) {
      if (error instanceof UnsupportedError) this.#context.distrust(unsupported(error.message));
      throw error;
    }
  }

  async #connect(signal?: AbortSignal): Promise<Pinned<Native, C>> {
    const { database } = this.#context;
    const patience = AbortSignal.timeout(poolMs);
    const connect = database.connect as NonNullable<typeof database.connect>;
    try {
      return await this.#context.wrongConnection.taking(() =>
        connect({
          use: "session",
          locks: [],
          wait: "nowait",
          signal: signal ? AbortSignal.any([patience, signal]) : patience,
        }),
      );
    } catch (error) {
      if (patience.aborted && !signal?.aborted) throw new NoConnectionError(poolMs);
      throw signal?.aborted ? error : notConnected(database, error);
    }
  }

  /**
   * On a connection that is there, or on a new one. Those that come together do not open one each, which would be all that a
   * pool has: one of them does, and the others wait until it has its locks, or has to wait for them.
   */
  async #onAny(
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    wait: Wait,
    signal?: AbortSignal,
    told?: Traces["holdfast:lock"],
  ): Promise<Member<Native, C>> {
    for (;;) {
      const shared = await this.#onShared(locks, requests, signal);
      if (shared) return shared;
      if (!this.#opening) break;
      await within(
        poolMs,
        unlessAborted(this.#opening, signal, () => {}),
      ).catch((error: unknown) => {
        throw error instanceof Silence ? new NoConnectionError(poolMs) : error;
      });
    }
    const opened = Promise.withResolvers<void>();
    this.#opening = opened.promise;
    const done = () => {
      if (this.#opening === opened.promise) this.#opening = undefined;
      opened.resolve();
    };
    try {
      return await this.#onOwn(locks, requests, wait, { signal, told, waits: done });
    } finally {
      done();
    }
  }

  async #onShared(
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    signal?: AbortSignal,
  ): Promise<Member<Native, C> | undefined> {
    const capabilities = await this.#context.capabilities();
    // Taken twice by one session a lock is granted twice: only a session that has none of them can exclude. No
    // `await` between the choice and the mark, or two calls would choose the same one.
    const member = [...this.#members].find(
      ({ pinned, keys }) => !pinned.connection.lost.aborted && requests.every(({ key }) => !keys.has(key.id)),
    );
    if (!member) return undefined;
    for (const { key } of requests) member.keys.add(key.id);
    const { connection } = member.pinned;
    try {
      const call = { locks: requests, wait: "nowait", names: [], joined: false, capabilities } as const;
      const grant = await member.queue.run(() => answered(connection, locks.take(connection, call)), signal);
      if (grant.granted) return member;
      this.#forget(member, requests);
      return undefined;
    } catch (error) {
      if (!connection.lost.aborted) {
        await member.queue
          .run(() => answered(connection, locks.clear(connection, requests)))
          .catch((e: unknown) => this.#lose(member, e));
      }
      this.#forget(member, requests);
      signal?.throwIfAborted();
      if (!connection.lost.aborted) throw error;
      return undefined;
    }
  }

  async #onOwn(
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    wait: Wait,
    { signal, told, waits }: Opening,
  ): Promise<Member<Native, C>> {
    const capabilities = await this.#context.capabilities();
    const names = this.#context.shown(requests);
    const pinned = await this.#connect(signal);
    const { connection } = pinned;
    const started = performance.now();
    let silent = false;
    const take = (patience: Wait) =>
      interruptible(
        connection,
        signal,
        () => {
          const call = { locks: requests, wait: patience, names, joined: false, capabilities };
          // Some clients wait for the pool only with their first statement.
          const ms = poolMs + (patience === "nowait" ? 0 : patience);
          return answered(connection, locks.take(connection, call), ms);
        },
        () => (silent = true),
      );
    try {
      let grant = await take("nowait");
      if (!grant.granted && wait !== "nowait") {
        // Nobody can share it while it waits.
        waits();
        grant = await take(wait);
      }
      if (!grant.granted)
        throw new Refused(grant.reason, Math.round(performance.now() - started), grant.cause);
      if (this.#closed)
        throw new LockLostError(this.#context.names(requests), "the instance was closed meanwhile");
    } catch (error) {
      const clean =
        !silent &&
        !connection.lost.aborted &&
        (await succeeds(answered(connection, locks.clear(connection, requests))));
      await pinned.release(!clean);
      if (!(error instanceof Refused)) throw error;
      const { reason, waitedMs } = error;
      if (told) told.outcome = reason;
      emit("holdfast:session:refused", () => ({ locks: this.#context.names(requests), waitedMs, reason }));
      const blocked = { keys: this.#context.names(requests), holders: await this.#context.holders(requests) };
      throw refusal(error, blocked);
    }
    return this.#join(pinned, locks, requests);
  }

  #join(
    pinned: Pinned<Native, C>,
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
  ): Member<Native, C> {
    const member: Member<Native, C> = {
      pinned,
      queue: new Turns(),
      keys: new Set(requests.map(({ key }) => key.id)),
      losers: new Set(),
    };
    // It goes on after whatever transaction the lock is asked for in.
    member.timer = apart(() => setInterval(() => void this.#beat(member, locks), heartbeatMs)).unref();
    member.onLost = () => void this.#lose(member, pinned.connection.lost.reason);
    pinned.connection.lost.addEventListener("abort", member.onLost, { once: true });
    this.#members.add(member);
    return member;
  }

  /** A cable pulled out says nothing: only a statement that is not answered shows it. */
  async #beat(member: Member<Native, C>, locks: SessionLocks<C>): Promise<void> {
    try {
      await within(
        heartbeatMs,
        member.queue.run(() =>
          answered(member.pinned.connection, locks.ping(member.pinned.connection), heartbeatMs),
        ),
      );
    } catch (error) {
      await this.#lose(member, error);
    }
  }

  async #lose(member: Member<Native, C>, cause: unknown): Promise<void> {
    // Whoever is told goes on by itself, and not in what its connection was opened in.
    apart(() => {
      for (const lose of member.losers) lose(cause);
    });
    await this.#retire(member, true);
  }

  #forget(member: Member<Native, C>, requests: readonly LockRequest[]): void {
    for (const { key } of requests) member.keys.delete(key.id);
    if (member.keys.size === 0) void this.#retire(member, member.pinned.connection.lost.aborted);
  }

  async #retire(member: Member<Native, C>, broken: boolean): Promise<void> {
    if (!this.#members.delete(member)) return;
    clearInterval(member.timer);
    const { pinned, onLost } = member;
    if (onLost) pinned.connection.lost.removeEventListener("abort", onLost);
    await pinned.release(broken);
  }

  #held(
    member: Member<Native, C>,
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    hold: number,
  ): Held {
    const since = performance.now();
    const tellLost = (error: unknown) =>
      emit("holdfast:session:lost", () => ({
        hold,
        locks: keys,
        heldMs: performance.now() - since,
        error,
      }));
    const { connection } = member.pinned;
    const keys = this.#context.names(requests);
    const controller = new AbortController();
    let over = false;
    const lose = (cause: unknown) => {
      if (over || controller.signal.aborted) return;
      controller.abort(new LockLostError(keys, `its connection is gone (${message(cause)})`, cause));
      tellLost(cause);
    };
    member.losers.add(lose);
    if (connection.lost.aborted) lose(connection.lost.reason);
    const release = async () => {
      if (over) return;
      over = true;
      member.losers.delete(lose);
      controller.signal.throwIfAborted();
      const given = await member.queue
        .run(() => answered(connection, locks.give(connection, requests)))
        .catch(async (error: unknown) => {
          tellLost(error);
          await this.#lose(member, error);
          throw present(this.#context.database, error, { names: keys });
        });
      // A session that has lost one lock behind our back may have lost all: those who share it must know.
      if (given) this.#forget(member, requests);
      else await this.#lose(member, new Error("its session had lost another lock"));
      if (!given) {
        const lost = new LockLostError(keys, "the server says that this session did not hold it any more");
        tellLost(lost);
        throw lost;
      }
      emit("holdfast:session:released", () => ({ hold, locks: keys, heldMs: performance.now() - since }));
    };
    return {
      keys,
      signal: controller.signal,
      release,
      async [Symbol.asyncDispose]() {
        // Whoever listens to `signal` knows already; a second error here would hide the block's own.
        await release().catch((error: unknown) => {
          if (!(error instanceof LockLostError)) throw error;
        });
      },
    };
  }

  async close(): Promise<void> {
    this.#closed = true;
    await Promise.all(
      [...this.#members].map((member) => this.#lose(member, new Error("the instance was closed"))),
    );
  }
}

/**
 * What the server says, if it says so in time and the connection lives for so long: a client may forget whom it owes an
 * answer when its connection ends, and whoever comes next on the same connection would wait, too.
 */
async function answered<T>(connection: Connection, running: Promise<T>, ms = graceMs): Promise<T> {
  const { lost } = connection;
  let onLost: (() => void) | undefined;
  const gone = new Promise<never>((_, reject) => {
    onLost = () => reject(lost.reason as Error);
    if (lost.aborted) onLost();
    else lost.addEventListener("abort", onLost, { once: true });
  });
  running.catch(() => {});
  try {
    return await within(ms, Promise.race([running, gone]));
  } finally {
    if (onLost) lost.removeEventListener("abort", onLost);
  }
}

async function succeeds(attempt: Promise<unknown>): Promise<boolean> {
  try {
    await attempt;
    return true;
  } catch {
    return false;
  }
}
