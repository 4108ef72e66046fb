import {
  type Strategy,
  type Support,
  type Unsupported,
  isSupported,
  require,
  unsupported,
} from "../core/capabilities.ts";
import type { Connection, Pinned, SessionLocks, Wait } from "../core/database.ts";
import {
  LockLostError,
  LockNotAvailableError,
  LockTimeoutError,
  UnsupportedError,
  message,
} from "../core/errors.ts";
import { emit } from "../core/events.ts";
import { interruptible } from "../core/interrupt.ts";
import type { LockRequest } from "../core/key.ts";
import { Queue } from "../core/queue.ts";
import { Refused } from "../core/refused.ts";
import { type Home, checkSupport } from "../core/scope.ts";

/** A lock of a session: held until it is released, its connection dies, or the process ends. */
export interface Held extends AsyncDisposable {
  readonly keys: readonly string[];
  /** Aborts when the lock can no longer be relied on. Pass it to whatever the lock protects. */
  readonly signal: AbortSignal;
  /** Gives the lock back. Throws `LockLostError` if the server says that it was no longer held. */
  release(): Promise<void>;
}

const heartbeatMs = 5000;

/**
 * Session locks share connections: a lock that is free is taken on one that already holds others. What must be
 * waited for gets a connection of its own, since a waiting connection cannot give anything back.
 */
export class Sessions<Native, C extends Connection> {
  readonly #home: Home<Native, C>;
  readonly #members = new Set<Member<Native, C>>();
  #verified: Promise<Support<Strategy>> | undefined;

  constructor(home: Home<Native, C>) {
    this.#home = home;
  }

  async hold(requests: readonly LockRequest[], wait: Wait, signal?: AbortSignal): Promise<Held> {
    const started = performance.now();
    const locks = await this.#session(requests);
    const label = this.#home.label(requests);
    const member =
      (await this.#onShared(locks, requests, signal)) ??
      (await this.#onOwn(locks, requests, wait, label, signal));
    emit("holdfast:session:held", () => ({
      locks: this.#home.names(requests),
      waitedMs: performance.now() - started,
    }));
    return this.#held(member, locks, requests);
  }

  async #session(requests: readonly LockRequest[]): Promise<SessionLocks<C>> {
    checkSupport(requests, await this.#home.capabilities(), false);
    require(await this.support(), "Session locks");
    return this.#home.database.engine.session as SessionLocks<C>;
  }

  /** Found out once, by experiment: poolers that lend sessions out look like servers. */
  async support(): Promise<Support<Strategy>> {
    const { sessionLocks } = await this.#home.capabilities();
    if (!isSupported(sessionLocks)) return sessionLocks;
    const experiment = (this.#verified ??= this.#experiment().then((gap) => gap ?? sessionLocks));
    try {
      return await experiment;
    } catch (error) {
      this.#verified = undefined;
      throw error;
    }
  }

  async #experiment(): Promise<Unsupported | undefined> {
    const session = this.#home.database.engine.session as SessionLocks<C>;
    const patience = AbortSignal.timeout(10_000);
    const a = await this.#connect(patience);
    try {
      const b = await this.#connect(patience);
      try {
        await session.verify(a.connection, b.connection);
        return undefined;
      } finally {
        await b.release();
      }
    } catch (error) {
      if (error instanceof UnsupportedError) return unsupported(error.message);
      // A session lock keeps a connection: a pool that never has two to give would starve on it anyway.
      if (patience.aborted) return unsupported("the pool did not give two connections within 10 s");
      throw error;
    } finally {
      await a.release();
    }
  }

  #connect(signal?: AbortSignal): Promise<Pinned<Native, C>> {
    const { database } = this.#home;
    return (database.connect as NonNullable<typeof database.connect>)({ locks: [], wait: "nowait", signal });
  }

  async #onShared(
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    signal?: AbortSignal,
  ): Promise<Member<Native, C> | undefined> {
    // Taken twice by one session a lock is granted twice: only a session that has none of them can exclude.
    const member = [...this.#members].find(
      (m) => !m.pinned.connection.lost.aborted && requests.every(({ key }) => !m.keys.has(key.id)),
    );
    if (!member) return undefined;
    const capabilities = await this.#home.capabilities();
    for (const { key } of requests) member.keys.add(key.id);
    try {
      const grant = await member.queue.run(
        () =>
          locks.take(member.pinned.connection, {
            locks: requests,
            wait: "nowait",
            label: "",
            joined: false,
            capabilities,
          }),
        signal,
      );
      if (grant.granted) return member;
    } catch (error) {
      signal?.throwIfAborted();
      if (!member.pinned.connection.lost.aborted) throw error;
    }
    this.#forget(member, requests);
    return undefined;
  }

  async #onOwn(
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    wait: Wait,
    label: string,
    signal?: AbortSignal,
  ): Promise<Member<Native, C>> {
    const capabilities = await this.#home.capabilities();
    const pinned = await this.#connect(signal);
    const { connection } = pinned;
    try {
      const grant = await interruptible(connection, signal, () =>
        locks.take(connection, { locks: requests, wait, label, joined: false, capabilities }),
      );
      if (!grant.granted) throw new Refused(grant.reason, wait === "nowait" ? 0 : wait, grant.cause);
    } catch (error) {
      const clean =
        !connection.lost.aborted &&
        (await locks
          .clear(connection, requests)
          .then(() => true)
          .catch(() => false));
      await pinned.release(!clean);
      if (!(error instanceof Refused)) throw error;
      const blocked = { keys: this.#home.names(requests), holders: await this.#home.holders(requests) };
      if (error.reason === "busy") throw new LockNotAvailableError(blocked);
      throw new LockTimeoutError({ ...blocked, waitedMs: error.waitedMs }, error.cause);
    }
    const member: Member<Native, C> = {
      pinned,
      queue: new Queue(),
      keys: new Set(requests.map(({ key }) => key.id)),
      label,
      timer: undefined,
    };
    member.timer = setInterval(() => void this.#beat(member, locks), heartbeatMs).unref();
    connection.lost.addEventListener("abort", () => void this.#retire(member, true), { once: true });
    this.#members.add(member);
    return member;
  }

  /** A cable pulled out says nothing: only a statement that is not answered shows it. */
  async #beat(member: Member<Native, C>, locks: SessionLocks<C>): Promise<void> {
    const { connection } = member.pinned;
    let timer: NodeJS.Timeout | undefined;
    const silence = new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new Error(`no answer for ${heartbeatMs} ms`)), heartbeatMs);
    });
    try {
      await Promise.race([member.queue.run(() => locks.ping(connection)), silence]);
    } catch (error) {
      for (const lose of member.losers ?? []) lose(error);
      await this.#retire(member, true);
    } finally {
      clearTimeout(timer);
    }
  }

  #forget(member: Member<Native, C>, requests: readonly LockRequest[]): void {
    for (const { key } of requests) member.keys.delete(key.id);
    if (member.keys.size === 0) void this.#retire(member, member.pinned.connection.lost.aborted);
  }

  async #retire(member: Member<Native, C>, broken: boolean): Promise<void> {
    if (!this.#members.delete(member)) return;
    clearInterval(member.timer);
    await member.pinned.release(broken);
  }

  #held(member: Member<Native, C>, locks: SessionLocks<C>, requests: readonly LockRequest[]): Held {
    const home = this.#home;
    const { connection } = member.pinned;
    const keys = home.names(requests);
    const controller = new AbortController();
    let over = false;
    const lose = (cause: unknown) => {
      if (over || controller.signal.aborted) return;
      controller.abort(new LockLostError(keys, `its connection is gone (${message(cause)})`, cause));
      emit("holdfast:session:lost", () => ({ locks: keys, error: cause }));
    };
    const onLost = () => lose(connection.lost.reason);
    (member.losers ??= new Set()).add(lose);
    if (connection.lost.aborted) onLost();
    connection.lost.addEventListener("abort", onLost, { once: true });
    const release = async () => {
      if (over) return;
      over = true;
      connection.lost.removeEventListener("abort", onLost);
      member.losers?.delete(lose);
      if (controller.signal.aborted) throw controller.signal.reason;
      let given = false;
      try {
        given = await member.queue.run(() => locks.give(connection, requests));
      } finally {
        if (given) this.#forget(member, requests);
        else await this.#retire(member, true);
      }
      if (!given) throw new LockLostError(keys, "the server says that this session did not hold it any more");
      emit("holdfast:session:released", () => ({ locks: keys }));
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
    await Promise.all([...this.#members].map((member) => this.#retire(member, true)));
  }
}

interface Member<Native, C extends Connection> {
  readonly pinned: Pinned<Native, C>;
  readonly queue: Queue;
  readonly keys: Set<string>;
  readonly label: string;
  timer: NodeJS.Timeout | undefined;
  losers?: Set<(cause: unknown) => void>;
}
