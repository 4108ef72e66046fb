/** What the queues of one instance share: who tells of new jobs, who looks for dead workers, and who is asked. */
import { Batcher } from "../batch/batcher.ts";
import { Notifier } from "../batch/notifier.ts";
import { type CallAbout, type CallOptions, type CallPlace, placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { storeOf } from "../transaction/instance.ts";
import { NoConnectionError } from "../seam/errors.ts";
import { Silence, within } from "../waiting/interrupt.ts";
import { rolledBack } from "../transaction/retry.ts";
import { type InstanceContext, type Scope, detached, contextOf } from "../transaction/scope.ts";
import type { Instance } from "./instance.ts";
import { Rounds } from "./rounds.ts";
import type { Added, How, Leased, NewJob, QueueStore } from "./store.ts";

/** Others are told of new jobs at once, and then at most this often: each message makes every commit wait in line. */
const tellMs = 20;
/** How long several calls wait together for one of their keys. Then they part, and those who need it wait on. */
const briefMs = 200;
/** How long a transaction waits for what is done beside it. */
const besideMs = 300;

/** How long to wait at a time for a transaction that has completed a job. */
const settledMs = 1000;

const batchers = new WeakMap<object, QueueBatcher>();

export function queueBatcherOf(hf: unknown, call = "queue"): QueueBatcher {
  const context = contextOf(hf, call);
  let batcher = batchers.get(context);
  if (!batcher) batchers.set(context, (batcher = new QueueBatcher(context, hf as Instance)));
  return batcher;
}

interface Line {
  readonly batcher: Batcher<readonly NewJob[], readonly Added[], number>;
  toldAt: number;
  timer: NodeJS.Timeout | undefined;
}

export class QueueBatcher {
  readonly context: InstanceContext<unknown, Connection>;
  readonly instance: Instance;
  readonly notifier: Notifier<unknown, Connection>;
  /** Queues whose numbers are asked for, on a connection that does not come. */
  readonly #starved = new Set<string>();
  readonly #numbers = new Map<string, Promise<number>>();
  readonly #lines = new Map<string, Line>();
  readonly #marks: Batcher<Leased, boolean>;
  /** Transactions in which jobs were discarded, or replaced. */
  readonly removals = new WeakSet<Scope<unknown, Connection>>();
  readonly rounds = new Rounds(this);

  constructor(context: InstanceContext<unknown, Connection>, instance: Instance) {
    this.context = context;
    this.instance = instance;
    this.notifier = new Notifier(context, "queues");
    context.started.finally(() => {
      for (const line of this.#lines.values()) clearTimeout(line.timer);
      return this.notifier.close();
    });
    this.#marks = new Batcher(context, {
      call: "queue",
      inFlight: 2,
      most: 500,
      about: () => ({ names: ["queue"], anyMap: true }),
      decide: (connection, of, how) => this.store.completion.completed(connection, of, how),
    });
  }

  get store(): QueueStore<Connection> {
    return storeOf(this.context, "queues", "queue");
  }

  /** Of workers: by itself, and not again if it may have been done. `anyway`: it finds what it did before. */
  async ask<T>(
    work: (connection: Connection, how: How) => Promise<T>,
    queue?: string,
    anyway = false,
    anyMap = false,
  ): Promise<T> {
    const about = { names: [queue === undefined ? "queue" : `queue ${queue}`], anyMap };
    const place = placeOf(this.context, { separate: true }, "queue");
    return send(this.context, place, anyway ? about : { ...about, on: rolledBack }, work);
  }

  /** Of what a worker has: it stays the worker's when the map of several databases becomes another one, or what is done would be done again. */
  keep<T>(
    work: (connection: Connection, how: How) => Promise<T>,
    queue?: string,
    anyway = false,
  ): Promise<T> {
    return this.ask(work, queue, anyway, true);
  }

  /** Of callers: in their transaction, if they are in one. What it does may be done again. */
  async call<T>(
    options: CallOptions,
    name: string,
    work: (connection: Connection, number: number, how: How) => Promise<T>,
  ): Promise<T> {
    const place = placeOf(this.context, options, "queue");
    const number = await this.number(name, place);
    return send(this.context, place, aboutOf(name), (connection, how) => work(connection, number, how));
  }

  /** Of callers who only look. Undefined: there is no such queue, and none is made by asking. */
  look<T>(
    name: string,
    work: (connection: Connection, number: number) => Promise<T>,
  ): Promise<T | undefined> {
    const place = placeOf(this.context, {}, "queue");
    return send(this.context, place, aboutOf(name), async (connection) => {
      const number = await this.store.lists.number(connection, name);
      return number === undefined ? undefined : work(connection, number);
    });
  }

  completed(mark: Leased): Promise<boolean> {
    return this.#marks.add(mark, { separate: true });
  }

  /** Not for long: it has a connection meanwhile. Rejects with a `LockTimeoutError` if the transaction is still open. */
  settled(mark: Leased): Promise<boolean> {
    return this.keep((connection, how) =>
      this.store.completion.settled(connection, mark, { ...how, waitMs: Math.min(how.waitMs, settledMs) }),
    );
  }

  /**
   * Of a queue that somebody calls: found once, and made if it is new. Beside the caller's transaction, or others who
   * add to the same new queue would wait for its end; inside it, if there is no other connection.
   */
  async number(name: string, place: Pick<CallPlace, "scope"> = { scope: undefined }): Promise<number> {
    const { scope } = place;
    const open = (connection: Connection, how: How) => this.store.open(connection, name, undefined, how);
    const apart = placeOf(this.context, { separate: true }, "queue");
    const inside = (of: NonNullable<CallPlace["scope"]>) =>
      of.work(
        ({ connection }) => open(connection, { waitMs: apart.waitMs, free: false }),
        undefined,
        aboutOf(name).names,
      );
    if (scope && this.context.database.traits.single) return inside(scope);
    let asking = this.#numbers.get(name);
    if (!asking) {
      // Whoever comes meanwhile waits for it too: it is no part of what the first one is in.
      asking = detached(this.context, () => send(this.context, apart, aboutOf(name), open));
      this.#numbers.set(name, asking);
      asking.catch(() => this.#numbers.delete(name));
    }
    if (!scope) return asking;
    // Whoever comes next would wait in vain, too, and hold its own connection meanwhile.
    if (this.#starved.has(name)) return inside(scope);
    try {
      return await within(besideMs, asking);
    } catch (error) {
      // Everybody who holds a connection may be waiting for one more.
      if (!(error instanceof Silence || error instanceof NoConnectionError)) throw error;
      if (error instanceof Silence && !this.#starved.has(name)) {
        this.#starved.add(name);
        const over = () => void this.#starved.delete(name);
        asking.then(over, over);
      }
      return inside(scope);
    }
  }

  /** A call may remove jobs, in the transaction that it is a part of. */
  removes(options: CallOptions): void {
    const { scope } = placeOf(this.context, options, "queue");
    if (scope) this.removals.add(scope.root);
  }

  add(name: string, jobs: readonly NewJob[], options: CallOptions): Promise<readonly Added[]> {
    if (jobs.some(({ replace }) => replace)) this.removes(options);
    return this.#line(name).batcher.add(jobs, options);
  }

  #line(name: string): Line {
    const known = this.#lines.get(name);
    if (known) return known;
    const line: Line = {
      toldAt: 0,
      timer: undefined,
      batcher: new Batcher<readonly NewJob[], readonly Added[], number>(this.context, {
        call: "enqueue",
        inFlight: 2,
        most: 500,
        together: 64,
        once: true,
        about: (jobs) => aboutOf(name, jobs),
        prepare: (place) => this.number(name, place),
        decide: async (connection, calls, { joined, waitMs, free, prepared: number }) => {
          const brief = calls.length > 1 && new Set(calls.flatMap(keysOf)).size > 1;
          const added = await this.store.add(connection, number, calls.flat(), {
            // In the caller's transaction it is told when that is committed.
            tell: joined ? name : this.#tells(name),
            joined,
            free,
            waitMs: brief ? Math.min(waitMs, briefMs) : waitMs,
          });
          let next = 0;
          return calls.map((jobs) => added.slice(next, (next += jobs.length)));
        },
        done: () => this.notifier.notify(name),
      }),
    };
    this.#lines.set(name, line);
    return line;
  }

  #tells(name: string): string | undefined {
    const line = this.#line(name);
    const now = performance.now();
    if (now - line.toldAt >= tellMs) {
      line.toldAt = now;
      return name;
    }
    line.timer ??= setTimeout(() => {
      line.timer = undefined;
      line.toldAt = performance.now();
      void this.ask(async (connection) => this.store.notify?.(connection, name)).catch(() => {});
    }, tellMs);
    return undefined;
  }

  /** Others may have something to do now: workers of this process at once, those of others at most every 20 ms. */
  async tell(name: string): Promise<void> {
    this.notifier.notify(name);
    if (this.#tells(name) === undefined) return;
    await this.ask(async (connection) => this.store.notify?.(connection, name));
  }
}

/** Those without a key need nothing that others could have: they stay together. */
function keysOf(jobs: readonly NewJob[]): string[] {
  const keys = jobs.flatMap((job) => (job.key === undefined ? [] : [job.key]));
  return keys.length > 0 ? keys : [""];
}

function aboutOf(queue: string, jobs: readonly NewJob[] = []): CallAbout {
  return { names: keysOf(jobs).map((key) => (key === "" ? `queue ${queue}` : `queue ${queue}:${key}`)) };
}
