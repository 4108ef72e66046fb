import { type Capabilities, type Strategy, type Support, require } from "../seam/capabilities.ts";
import type { Connection, SessionLocks, Wait } from "../seam/database.ts";
import { LockLostError, NoConnectionError } from "../seam/errors.ts";
import { type Traces, emit, nextHold, traced } from "../events/events.ts";
import { Silence, interruptible, within } from "../waiting/interrupt.ts";
import type { LockRequest } from "../seam/key.ts";
import { presenting } from "../transaction/present.ts";
import { unlessAborted } from "../waiting/turns.ts";
import { Refused, refusal } from "../waiting/refused.ts";
import { checkSupport, stillKept } from "../transaction/lock-support.ts";
import type { InstanceContext } from "../transaction/scope.ts";
import { answered, connectSession, poolMs } from "./session/connect.ts";
import { type Held, heldBy } from "./session/held.ts";
import { Member } from "./session/member.ts";
import { SessionSupport } from "./session/support.ts";

export type { Held } from "./session/held.ts";

interface Opening {
  readonly signal: AbortSignal | undefined;
  readonly told: Traces["holdfast:lock"] | undefined;
  /** Told that it has to wait for its locks. */
  readonly waits: () => void;
}

/**
 * Session locks share connections: a lock that is free is taken on one that already holds others. What must be
 * waited for gets a connection of its own, since a waiting connection cannot give anything back.
 */
export class Sessions<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #support: SessionSupport<Native, C>;
  readonly #members = new Set<Member<Native, C>>();
  /** While a connection is being opened that others may share, until it is known whether they can. */
  #opening: Promise<void> | undefined;
  #closed = false;

  constructor(context: InstanceContext<Native, C>) {
    this.#context = context;
    this.#support = new SessionSupport(context);
  }

  /** Whether they hold here. */
  support(): Promise<Support<Strategy>> {
    return this.#support.told();
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
    require(await this.#support.verified(), "Session locks");
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
    if (this.#context.trusted() !== before)
      await member
        .run((connection) => stillKept(this.#context, connection, before))
        .catch(async (error: unknown) => {
          await member.clear(requests);
          member.forget(requests);
          throw error;
        });
    const hold = nextHold();
    emit("holdfast:session:held", () => ({
      hold,
      locks: this.#context.names(requests),
      waitedMs: performance.now() - started,
    }));
    return heldBy(member, this.#context, locks, requests, hold);
  }

  /** On a connection that is there: a pool may have no other one to ask on. */
  async #renewed(): Promise<Capabilities> {
    for (const member of this.#members)
      if (!member.isLost) return member.run((connection) => this.#context.renewed(connection, true));
    return this.#context.renewed();
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
    const member = [...this.#members].find((each) => !each.isLost && each.hasNone(requests));
    if (!member) return undefined;
    member.mark(requests);
    try {
      const names = this.#context.shown(requests);
      const call = { locks: requests, wait: "nowait", names, joined: false, capabilities } as const;
      const grant = await member.ask((connection) => locks.take(connection, call), signal);
      if (grant.granted) return member;
      member.forget(requests);
      return undefined;
    } catch (error) {
      if (!member.isLost) await member.clear(requests);
      member.forget(requests);
      signal?.throwIfAborted();
      if (!member.isLost) throw error;
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
    const pinned = await connectSession(this.#context, { signal });
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
      if (error instanceof Refused) throw await this.#refused(error, requests, told);
      throw error;
    }
    return new Member(pinned, locks, requests, this.#members);
  }

  async #refused(
    refused: Refused,
    requests: readonly LockRequest[],
    told: Traces["holdfast:lock"] | undefined,
  ): Promise<Error> {
    const { reason, waitedMs } = refused;
    const keys = this.#context.names(requests);
    if (told) told.outcome = reason;
    emit("holdfast:session:refused", () => ({ locks: keys, waitedMs, reason }));
    return refusal(refused, { keys, holders: await this.#context.holders(requests) });
  }

  async close(): Promise<void> {
    this.#closed = true;
    await Promise.all([...this.#members].map((member) => member.lose(new Error("the instance was closed"))));
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
