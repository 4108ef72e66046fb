import {
  type Strategy,
  type Support,
  type Unsupported,
  isSupported,
  unsupported,
} from "../../seam/capabilities.ts";
import type { Connection, Pinned, SessionLocks } from "../../seam/database.ts";
import { NoConnectionError, UnsupportedError } from "../../seam/errors.ts";
import { explained } from "../../seam/failure.ts";
import * as protection from "../../seam/protections.ts";
import { Silence, within } from "../../waiting/interrupt.ts";
import { sleep } from "../../waiting/wait.ts";
import type { Instance } from "../../transaction/instance.ts";
import { connectSession, poolMs } from "./connect.ts";

/** How long one connection is kept while another is waited for. */
const soonMs = 1000;

/** Whether locks of a session hold. Found out once, by experiment: poolers that lend sessions out look like servers. */
export class SessionSupport<Native, C extends Connection> {
  readonly #context: Instance<Native, C>;
  #verified: Promise<Support<Strategy>> | undefined;

  constructor(context: Instance<Native, C>) {
    this.#context = context;
  }

  /** Throws if there were no connections to try it with. */
  async verified(): Promise<Support<Strategy>> {
    const { sessionLocks } = await this.#context.capabilities();
    if (!isSupported(sessionLocks)) return sessionLocks;
    if ((this.#context.database.room?.()?.max ?? 2) < 2)
      return unsupported("the pool has one connection, and a session lock would keep it from everybody else");
    const gap = await this.#context.noTransactions();
    if (gap) return gap;
    this.#verified ??= this.#experiment().then((gap) => gap ?? sessionLocks);
    try {
      return await this.#verified;
    } catch (error) {
      this.#verified = undefined;
      throw error;
    }
  }

  /** The same, where it is no error. */
  async told(): Promise<Support<Strategy>> {
    try {
      return await this.verified();
    } catch (error) {
      // A session lock keeps a connection: a pool that has not two to give would starve on it. It may have, later.
      // Told by the clock, and not by the client.
      if (error instanceof NoConnectionError && error.cause === undefined)
        return unsupported("the pool did not give two connections for it");
      throw error;
    }
  }

  /**
   * Two connections at a time. A call that keeps one while it waits for another may wait for one that does the same: so the
   * first one is given back if the second does not come soon, and both are asked for again.
   */
  async #two(): Promise<readonly [Pinned<Native, C>, Pinned<Native, C>]> {
    const until = performance.now() + poolMs;
    for (;;) {
      const a = await connectSession(this.#context);
      try {
        return [a, await connectSession(this.#context, { ms: soonMs })];
      } catch (error) {
        await a.release(false);
        const late = error instanceof NoConnectionError && error.cause === undefined;
        if (!late) throw error;
        if (performance.now() > until) throw new NoConnectionError(poolMs);
        await sleep(soonMs * Math.random());
      }
    }
  }

  async #experiment(): Promise<Unsupported | undefined> {
    const session = this.#context.database.engine.session as SessionLocks<C>;
    const [a, b] = await this.#two();
    let broken = true;
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
      await Promise.all([a, b].map(async (each) => each.release(broken)));
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
}
