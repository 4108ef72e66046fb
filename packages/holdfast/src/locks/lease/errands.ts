import { require } from "../../seam/capabilities.ts";
import type { Connection } from "../../seam/database.ts";
import { type Holder, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import type { Grip, KeptLease, LeaseInfo, Leases } from "../../seam/leases.ts";
import type { Notifier } from "../../batch/notifier.ts";
import { withConnection } from "../../transaction/one-shot.ts";
import { present, presenting, whyOf } from "../../transaction/present.ts";
import { retryPolicy, retrying } from "../../transaction/retry.ts";
import type { InstanceContext } from "../../transaction/scope.ts";

/** How long the server may take to answer, besides the wait. */
export const graceMs = 5000;
/** How long an error may wait for what it could say. */
export const tellMs = 1000;

/** Claims, releases and questions are all safe to repeat. */
const policy = retryPolicy({ attempts: 10, baseMs: 20, maxMs: 250 });

/** Whether it was ours until then. */
export type Released = "ours" | "not ours" | "perhaps";

interface Asking {
  readonly wantedUntil?: number;
  readonly stop?: AbortSignal;
  /** What it is about, for people. */
  readonly about?: string;
  /** Of what writes: what follows if its answer is lost and it may have been done. */
  readonly instead?: string;
}

/** A token lets its owner give the lease back: it is nobody else's. */
export function shown({ name, holder, fence, mode, waiting, since, until, over }: KeptLease): LeaseInfo {
  return { name, holder, fence, mode, waiting, since, until, over };
}

/** What the leases of one instance ask of its database, on any connection. All of it is safe to repeat. */
export class Errands<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #notifier: Notifier<Native, C>;
  /** What must be over before the client may be closed. */
  readonly #busy = new Set<Promise<unknown>>();

  constructor(context: InstanceContext<Native, C>, notifier: Notifier<Native, C>) {
    this.#context = context;
    this.#notifier = notifier;
  }

  /** Throws if this database keeps none. */
  async ready(): Promise<void> {
    const { database } = this.#context;
    if (!this.#context.trusted()) await presenting(database, ["Leases"], () => this.#context.placed());
    const { leases } =
      this.#context.known() ?? (await presenting(database, ["Leases"], () => this.#context.capabilities()));
    require(leases, "Leases");
  }

  /** Where a transaction has the only connection, or is the only writer, a lease would wait for it, and it for the lease. */
  refuseInside(instead: string): void {
    const { database, current } = this.#context;
    const { single, client } = database.traits;
    const alone = single || this.#context.known()?.granularity === "database";
    if (alone && current.getStore())
      throw new UsageError(
        `A lease is written outside of transactions, and ${single ? `${client} has one connection for everybody` : "this one keeps everybody else from writing"}: it would wait for itself. ${instead}.`,
      );
  }

  store(): Leases<C> {
    const { engine } = this.#context.database;
    if (!engine.leases) throw new UnsupportedError(`Leases: ${engine.name} does not keep any`);
    return engine.leases;
  }

  /** Again after a failure that may pass: so many times, or for as long as it is wanted. */
  async ask<T>(
    giveUpAt: number,
    oneShot: (connection: C) => Promise<T>,
    { wantedUntil, stop, about = "Leases", instead }: Asking = {},
  ): Promise<T> {
    const { database } = this.#context;
    const started = performance.now();
    return retrying(
      ({ sent }) => {
        const ms = Math.ceil(Math.min(10_000, Math.max(1000, giveUpAt - performance.now())));
        return withConnection(this.#context, oneShot, ms, { sent });
      },
      {
        why: (error) => whyOf(database, error),
        on: policy.on,
        policy,
        wantedUntil,
        until: giveUpAt,
        wanted: () => !stop?.aborted,
        failed: (error, { attempts, perhaps }) => {
          const told = { names: [about], attempts, waitedMs: performance.now() - started };
          const lost = perhaps && instead !== undefined && { perhaps: { instead } };
          throw present(database, error, { ...told, ...lost });
        },
      },
    );
  }

  /** Once. Resolves to until when it lasts; undefined: it is not ours any more. */
  async renew(
    grip: Grip,
    ttlMs: number,
    withinMs: number,
  ): Promise<{ until: Date | undefined; sentAt: number }> {
    let sentAt = performance.now();
    const until = await this.track(
      withConnection(
        this.#context,
        (connection) => {
          sentAt = performance.now();
          return this.store().renew(connection, grip, ttlMs);
        },
        withinMs,
      ),
    );
    return { until, sentAt };
  }

  async release({ resource, token }: Pick<Grip, "resource" | "token">, atLeastMs: number): Promise<Released> {
    const giveUpAt = performance.now() + graceMs;
    let tries = 0;
    const ours = await this.track(
      this.ask(
        giveUpAt,
        (connection) => {
          tries++;
          return this.store().release(connection, { resource, token }, atLeastMs);
        },
        { about: "The end of a lease", instead: "If it was not given back, it runs out by itself." },
      ),
    );
    // Those of this process need not wait for the server to tell them.
    this.#notifier.notify(resource);
    // If an answer was lost, it may well have been us who gave it back.
    return ours ? "ours" : tries > 1 ? "perhaps" : "not ours";
  }

  /** Who is in the way: told if it can be found out quickly, never at the cost of the error itself. */
  async holders(resource: string): Promise<readonly Holder[]> {
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<readonly LeaseInfo[]>((resolve) => {
      timer = setTimeout(() => resolve([]), tellMs);
    });
    const asked = this.track(
      withConnection(this.#context, (connection) =>
        this.store().list(connection, { resources: [resource] }),
      ).catch(() => []),
    );
    try {
      const found = await Promise.race([asked, late]);
      return found
        .filter(({ waiting }) => !waiting)
        .map(({ holder, mode, fence, since }) => ({
          pid: holder,
          application: mode === "permit" ? "permit" : mode === "shared" ? "shared lease" : "lease",
          state: `fence ${fence}`,
          since,
        }));
    } finally {
      clearTimeout(timer);
    }
  }

  retryable(error: unknown): boolean {
    const failure = classify(this.#context.database, error);
    return failure !== undefined && policy.on.has(failure);
  }

  /** As the caller is told of it. */
  told(error: unknown, lease: string): unknown {
    return present(this.#context.database, error, { names: [`The lease ${lease}`] });
  }

  /** It is waited for by {@link done}. */
  track<T>(work: Promise<T>): Promise<T> {
    const tracked = work.catch(() => {}).finally(() => this.#busy.delete(tracked));
    this.#busy.add(tracked);
    return work;
  }

  /** Resolves when nothing is under way. */
  async done(): Promise<void> {
    while (this.#busy.size > 0) await Promise.allSettled(this.#busy);
  }
}
