import { randomUUID } from "node:crypto";
import { isSupported } from "../seam/capabilities.ts";
import type { Leases } from "../seam/leases.ts";
import type { Connection } from "../seam/database.ts";
import { withConnection } from "../transaction/one-shot.ts";
import { apart } from "../context/inside.ts";
import { Silence, within } from "../waiting/interrupt.ts";
import type { InstanceContext } from "../transaction/scope.ts";

/** How long the server may take to be listened to, and to tell us what we told it. */
const answerMs = 2000;
/** A connection that died without a word rings no more: it is tried this often. */
const heartbeatMs = 10_000;
/** Kept for whoever comes soon after the last one who waited. */
const lingerMs = 1000;
/** A pooler that lends sessions out will not have changed its mind soon. A server that restarts may be back. */
const deafMs = { never: 300_000, lost: 5000 };

/** One who waits for a resource. */
export class Ear {
  /** It rang since this was set to false. */
  rung = false;
  #wake: (() => void) | undefined;

  notify(): void {
    this.rung = true;
    this.#wake?.();
  }

  /** Until it rings, or the time is over. Rejects if the signal aborts. `idly`: does not keep the process. */
  sleep(ms: number, signal: AbortSignal, idly = false): Promise<void> {
    if (this.rung) return Promise.resolve();
    return new Promise((resolve, reject) => {
      const end = () => {
        clearTimeout(timer);
        signal.removeEventListener("abort", end);
        this.#wake = undefined;
        if (signal.aborted) reject(signal.reason as Error);
        else resolve();
      };
      const timer = setTimeout(end, ms);
      if (idly) timer.unref();
      this.#wake = end;
      signal.addEventListener("abort", end, { once: true });
      if (signal.aborted) end();
    });
  }
}

/**
 * Wakes those who wait when the server tells them: of a release, of a new job. One connection for all of them, open only while somebody
 * waits, and believed only after it has heard what we sent ourselves: through a pooler that lends sessions out,
 * listening succeeds and nothing is ever heard. Whoever waits looks again and again all the same, only less often.
 */
export class Notifier<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #of: "leases" | "queues";
  readonly #ears = new Map<string, Set<Ear>>();
  #waiting = 0;
  #linger: NodeJS.Timeout | undefined;
  #line: { readonly stop: AbortController; hears: boolean; readonly ended: Promise<void> } | undefined;
  #deafUntil = 0;

  /** `of`: whose channel of the engine's it is. */
  constructor(context: InstanceContext<Native, C>, of: "leases" | "queues") {
    this.#context = context;
    this.#of = of;
  }

  /** Whether those who wait will be woken, as far as is known. Begins to listen if somebody wants it. */
  hears(): boolean {
    if (!this.#line && this.#waiting > 0 && performance.now() >= this.#deafUntil) this.#open();
    return this.#line?.hears ?? false;
  }

  ear(resource: string): Ear {
    const ear = new Ear();
    const ears = this.#ears.get(resource);
    if (ears) ears.add(ear);
    else this.#ears.set(resource, new Set([ear]));
    return ear;
  }

  forget(resource: string, ear: Ear): void {
    const ears = this.#ears.get(resource);
    ears?.delete(ear);
    if (ears?.size === 0) this.#ears.delete(resource);
  }

  notify(resource: string): void {
    for (const ear of this.#ears.get(resource) ?? []) ear.notify();
  }

  /** Somebody has waited long enough for a connection to be worth it. Call what it returns when they no longer do. */
  listen(): () => void {
    this.#waiting++;
    clearTimeout(this.#linger);
    this.hears();
    let over = false;
    return () => {
      if (over) return;
      over = true;
      if (--this.#waiting > 0) return;
      this.#linger = setTimeout(() => this.#line?.stop.abort(), lingerMs).unref();
    };
  }

  async close(): Promise<void> {
    this.#deafUntil = Infinity;
    clearTimeout(this.#linger);
    this.#line?.stop.abort();
    await this.#line?.ended;
  }

  #open(): void {
    const stop = new AbortController();
    const line = { stop, hears: false, ended: Promise.resolve() };
    /** A server that does not answer in time may do so later. A pooler that passes nothing on will not. */
    let comesBack = false;
    const run = async () => {
      try {
        const listening = await this.#connect(stop.signal).catch((error: unknown) => {
          comesBack = error instanceof Silence;
          throw error;
        });
        while (listening && !stop.signal.aborted && (await this.#test(stop.signal))) {
          comesBack = line.hears = true;
          await pause(heartbeatMs, stop.signal);
        }
      } catch {
        // Nobody depends on it.
      } finally {
        line.hears = false;
        this.#line = undefined;
        if (!stop.signal.aborted)
          this.#deafUntil = Math.max(
            this.#deafUntil,
            performance.now() + (comesBack ? deafMs.lost : deafMs.never),
          );
        stop.abort();
      }
    };
    this.#line = line;
    // For everybody who waits: it is no part of what the first of them is in.
    line.ended = apart(run);
  }

  /** Who tells, and on which channel. */
  #source(): Pick<Leases<C>, "channel" | "notify"> | undefined {
    const source = this.#context.database.engine[this.#of];
    return source && isSupported(source) ? source : undefined;
  }

  async #connect(signal: AbortSignal): Promise<boolean> {
    const { database } = this.#context;
    const { channel, notify } = this.#source() ?? {};
    const { wake } = this.#context.known() ?? (await this.#context.capabilities());
    if (!database.listen || channel === undefined || !notify || !isSupported(wake)) return false;
    await within(
      answerMs,
      database.listen(channel, (resource) => this.notify(resource), signal),
    );
    return true;
  }

  /** Whether what we send comes back to us. */
  async #test(signal: AbortSignal): Promise<boolean> {
    const source = this.#source();
    const payload = `test ${randomUUID()}`;
    const ear = this.ear(payload);
    try {
      await withConnection(
        this.#context,
        async (connection) => source?.notify?.(connection, payload),
        answerMs,
      );
      await ear.sleep(answerMs, signal, true);
      return ear.rung;
    } finally {
      this.forget(payload, ear);
    }
  }
}

/** Does not keep the process, and does not throw. */
function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms).unref();
    signal.addEventListener("abort", end, { once: true });
    if (signal.aborted) end();
  });
}
