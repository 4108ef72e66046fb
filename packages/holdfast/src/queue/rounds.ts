/**
 * What all workers of an instance do together: say that they live, look for those of others that do not, and look for jobs
 * while they have none. One statement a second, whatever the number of queues.
 */
import { hostname } from "node:os";
import { isSupported } from "../seam/capabilities.ts";
import type { Connection } from "../seam/database.ts";
import { emit } from "../events/events.ts";
import { within } from "../waiting/interrupt.ts";
import { NoConnectionError } from "../seam/errors.ts";
import { Pauses } from "../transaction/retry.ts";
import type { InstanceContext } from "../transaction/scope.ts";
import { sleep } from "../waiting/wait.ts";
import type { Instance, WorkSession } from "./instance.ts";
import type { How, QueueStore, JobPlace } from "./store.ts";

/** What the rounds need of the queues of their instance. */
interface RoundsContext {
  readonly context: InstanceContext<unknown, Connection>;
  readonly instance: Instance;
  readonly notifier: { hears(): boolean; notify(queue: string): void };
  readonly store: QueueStore<Connection>;
  ask<T>(work: (connection: Connection, how: How) => Promise<T>): Promise<T>;
  /** Of what a worker has. */
  keep<T>(work: (connection: Connection, how: How) => Promise<T>): Promise<T>;
}

/** One worker, as the others of its instance need to know it. */
export interface Member {
  /** The number of its queue, and its own; undefined: it is not enlisted. */
  readonly queue: number;
  readonly id: number | undefined;
  readonly ttlMs: number;
  readonly pollMs: number;
  /** While it has nothing to do: where it expects to find something. */
  readonly idle: JobPlace | undefined;
  /** The lock that it is enlisted with. */
  lock: string | undefined;
  wake(): void;
  /** It has been given up for dead. */
  lose(): Promise<void>;
  trouble(error: unknown): void;
}

const sweepMs = 1000;
/** A look at everything may have to walk over many rows that are dead: it takes up a tenth of the time at the most. */
const wholeShare = 10;
/** What is due to be asked soon is asked now. */
const slackMs = 50;
/** How long the last one to leave waits for what is under way. */
const partMs = 1000;
/** After a session could not be had. */
const secureMs = { least: 1000, most: 60_000 };

export class Rounds {
  readonly #batcher: RoundsContext;
  readonly #members = new Set<Member>();
  #stop: AbortController | undefined;
  #going: Promise<unknown> | undefined;
  #beating: NodeJS.Timeout | undefined;
  #beatAt = 0;
  #sweptAt = -Infinity;
  #wholeAt = 0;
  #held: { readonly lock: string; readonly session: WorkSession } | undefined;

  constructor(batcher: RoundsContext) {
    this.#batcher = batcher;
  }

  /** Resolves to the number that it has from now on. */
  async enlist(member: Member): Promise<number> {
    const { store } = this.#batcher;
    const { queue, ttlMs } = member;
    const name = `${hostname()} ${process.pid}`;
    for (;;) {
      const lock = this.#held?.lock;
      const id = await this.#batcher.ask((connection, how) =>
        store.workers.enlist(connection, queue, { ttlMs, name, lock }, how),
      );
      member.lock = lock;
      const now = this.#held?.lock;
      if (now === lock) return id;
      // Lost meanwhile: whoever sweeps takes it for dead.
      if (lock !== undefined) continue;
      member.lock = now;
      if (now !== undefined)
        await this.#batcher.ask((connection, how) => store.workers.locked(connection, [id], now, how));
      return id;
    }
  }

  /** Call what it returns when the worker ends. */
  join(member: Member): () => Promise<void> {
    this.#members.add(member);
    if (!this.#stop) {
      const stop = (this.#stop = new AbortController());
      this.#going = Promise.all([this.#go(stop.signal), this.#secure(stop.signal)]);
    }
    this.#setBeat();
    return () => this.#part(member);
  }

  async #part(member: Member): Promise<void> {
    if (!this.#members.delete(member)) return;
    this.#setBeat();
    if (this.#members.size > 0) return;
    this.#stop?.abort();
    this.#stop = undefined;
    const held = this.#held;
    this.#held = undefined;
    await this.#letGo(held?.session);
    // What is under way has a connection, and whoever has stopped its last worker ends its pool.
    if (this.#going) await within(partMs, this.#going).catch(() => {});
  }

  /** Says that those live who are enlisted, three times in the time that the most impatient of them has. */
  #setBeat(): void {
    clearTimeout(this.#beating);
    if (this.#members.size === 0) return;
    const ttl = Math.min(...[...this.#members].map(({ ttlMs }) => ttlMs));
    // Others that come and go do not put it off.
    const ms = Math.max(0, this.#beatAt + ttl / 3 - performance.now());
    this.#beating = setTimeout(() => {
      void this.#beat();
      this.#setBeat();
    }, ms);
  }

  async #beat(): Promise<void> {
    this.#beatAt = performance.now();
    const members = new Map(
      [...this.#members].flatMap((member) => (member.id === undefined ? [] : [[member.id, member] as const])),
    );
    if (members.size === 0) return;
    const { store } = this.#batcher;
    try {
      const alive = await this.#batcher.keep((connection, how) =>
        store.workers.beat(connection, [...members.keys()], how),
      );
      for (const [id, member] of members)
        if (!alive.has(id) && member.id === id)
          void member.lose().catch((error: unknown) => member.trouble(error));
    } catch (error) {
      this.#trouble(error);
    }
  }

  /** To one of them: the trouble is everybody's. */
  #trouble(error: unknown): void {
    for (const member of this.#members) return member.trouble(error);
  }

  async #go(signal: AbortSignal): Promise<void> {
    const pauses = new Pauses(100, 5000);
    let pause = 0;
    while (!signal.aborted) {
      await sleep(this.#pauseMs() + pause, signal).catch(() => {});
      if (signal.aborted) return;
      try {
        await this.#round();
        pauses.reset();
        pause = 0;
      } catch (error) {
        if (signal.aborted) return;
        this.#trouble(error);
        pause = pauses.next();
      }
    }
  }

  #pauseMs(): number {
    if (this.#batcher.notifier.hears()) return sweepMs;
    const idle = [...this.#members].filter((member) => member.idle);
    return Math.min(sweepMs, ...idle.map(({ pollMs }) => pollMs));
  }

  async #round(): Promise<void> {
    const idle = [...this.#members].flatMap((member) => {
      const { idle: where, queue } = member;
      return where ? [{ member, queue, ...where }] : [];
    });
    const began = performance.now();
    const sweeps = began - this.#sweptAt >= sweepMs - slackMs;
    if (!sweeps && idle.length === 0) return;
    if (sweeps) this.#sweptAt = began;
    const whole = began >= this.#wholeAt;
    const { store, notifier } = this.#batcher;
    const { jobs, queues, ready } = await this.#batcher.ask((connection, how) =>
      store.look(connection, { sweep: sweeps ? (whole ? "thorough" : "yes") : "no", idle, whole }, how),
    );
    if (whole) this.#wholeAt = performance.now() + wholeShare * (performance.now() - began);
    const some = new Set(ready);
    for (const { member, queue } of idle) if (some.has(queue)) member.wake();
    if (queues.length === 0) return;
    emit("holdfast:queue:recovered", () => ({ jobs, queues }));
    for (const queue of queues) {
      notifier.notify(queue);
      await this.#batcher.ask(async (connection) => store.notify?.(connection, queue));
    }
  }

  /**
   * A lock of a session, one for all of them, which the server gives back when the process is gone. Nobody waits for it:
   * without it, others go by signs of life alone.
   */
  async #secure(signal: AbortSignal): Promise<void> {
    const { context, instance, store } = this.#batcher;
    const { sessionLock } = store.workers;
    if (!sessionLock) return;
    for (let pause = secureMs.least; !signal.aborted; pause = Math.min(pause * 2, secureMs.most)) {
      try {
        const support = await context.sessionSupport();
        if (signal.aborted) return;
        if (isSupported(support)) {
          const { lock, key } = sessionLock();
          const session = await instance.hold(key, { signal });
          if (signal.aborted) return await this.#letGo(session);
          pause = secureMs.least;
          this.#held = { lock, session };
          const lost = Promise.withResolvers<void>();
          session.signal.addEventListener("abort", () => lost.resolve(), { once: true });
          if (session.signal.aborted) lost.resolve();
          const members = [...this.#members].filter(({ id }) => id !== undefined);
          if (members.length > 0) {
            // From the moment at which it may be written there.
            for (const member of members) member.lock = lock;
            const ids = members.flatMap(({ id }) => id ?? []);
            await this.#batcher
              .keep((connection, how) => store.workers.locked(connection, ids, lock, how))
              .catch((error: unknown) => this.#trouble(error));
          }
          await Promise.race([lost.promise, aborted(signal)]);
          if (signal.aborted) return;
          // Whoever sweeps finds the lock free, and gives our jobs to others: at any moment from now on.
          this.#held = undefined;
          await this.#letGo(session);
          for (const member of this.#members)
            if (member.lock === lock) void member.lose().catch((error: unknown) => member.trouble(error));
          continue;
        }
      } catch (error) {
        if (signal.aborted) return;
        // Whoever has all connections needs them more.
        if (!(error instanceof NoConnectionError)) this.#trouble(error);
      }
      await sleep(pause, signal).catch(() => {});
    }
  }

  async #letGo(session: WorkSession | undefined): Promise<void> {
    try {
      await session?.[Symbol.asyncDispose]();
    } catch {
      // It was lost before.
    }
  }
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener("abort", () => resolve(), { once: true });
  });
}
