/** What a schedule asks of its database, and what that said last. */
import { randomUUID } from "node:crypto";
import { placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { storeOf } from "../transaction/instance.ts";
import type { How, Soon } from "../seam/store.ts";
import { oneShotMs } from "../transaction/one-shot.ts";
import { retryPolicy } from "../transaction/retry.ts";
import type { InstanceContext } from "../transaction/scope.ts";
import type { ScheduleDefinition } from "./definition.ts";
import type { Reports } from "./reports.ts";
import type { RunKeeper } from "./run.ts";
import type { Schedules, ScheduleStanding, ScheduleStep } from "./store.ts";

const longestWait = 5000;

/** What is sent is safe to repeat: by its token, or because it is done already. */
const policy = retryPolicy({ attempts: 6, baseMs: 50, maxMs: 1000 });

export class ScheduleCalls implements RunKeeper {
  readonly context: InstanceContext<unknown, Connection>;
  /** As messages name it. */
  readonly about: { readonly names: readonly [string] };
  /** The newest tick that was decided upon, when the database was asked last. */
  last = 0;
  readonly #terms: ScheduleDefinition<never>["terms"];
  readonly #reports: Reports;
  /** The database's clock, and ours that never jumps, at the same moment. */
  #clock = { theirs: 0, ours: 0 };

  constructor(
    context: InstanceContext<unknown, Connection>,
    terms: ScheduleDefinition<never>["terms"],
    reports: Reports,
  ) {
    this.context = context;
    this.about = { names: [`schedule ${terms.schedule}`] };
    this.#terms = terms;
    this.#reports = reports;
  }

  get store(): Schedules<Connection> {
    return storeOf(this.context, "schedules", "schedule");
  }

  /** Nobody is waited for longer: what is asked for can be asked for again. */
  get waitMs(): number {
    const { wait } = this.context;
    return wait === "nowait" ? 1 : Math.min(longestWait, Math.max(1, wait));
  }

  /** By the database's clock. */
  now(): number {
    return this.#clock.theirs + performance.now() - this.#clock.ours;
  }

  /** In the transaction of the same instance whose body calls, if there is one. What it does may be done again. */
  call<T>(work: (connection: Connection, how: How) => Promise<T>): Promise<T> {
    return send(this.context, placeOf(this.context, undefined, "schedule"), this.about, work);
  }

  /** A statement of its own, again after a failure that may pass. */
  async oneShot<T>(work: (connection: Connection, how: How) => Soon<T>, ms?: number): Promise<T> {
    const place = placeOf(this.context, { separate: true }, "schedule");
    // So that the wait is over before it is given up.
    const waitMs = Math.min(place.waitMs, (ms ?? oneShotMs) / 2);
    return send(
      this.context,
      { ...place, waitMs },
      { ...this.about, policy, ...(ms !== undefined && { ms }) },
      async (connection, how) => work(connection, how),
    );
  }

  /** `inside`: of a transaction. */
  async step(
    wish: Pick<ScheduleStep, "take" | "wish" | "as">,
    inside?: { readonly connection: Connection; readonly how: How },
  ): Promise<ScheduleStanding> {
    const step: ScheduleStep = { ...this.#terms, ...wish, token: randomUUID() };
    const work = (connection: Connection, how: How) => this.store.step(connection, step, how);
    const standing = await (inside ? work(inside.connection, inside.how) : this.oneShot(work));
    this.#clock = { theirs: standing.now, ours: performance.now() };
    // What a transaction sees may be undone.
    if (!inside) this.last = standing.last;
    for (const tick of standing.died) this.#reports.died(new Date(tick));
    return standing;
  }
}
