/** What the queues of one instance share: who tells of new jobs, who looks for dead workers, and who is asked. */
import { Bell } from "../core/bell.ts";
import {
  type About,
  type CallOptions,
  type Place,
  type Together,
  known,
  placeOf,
  send,
  sendTogether,
  waitedInVain,
} from "../core/calls.ts";
import { Coalescer } from "../core/coalesce.ts";
import type { Connection } from "../core/database.ts";
import { again, errandMs, undone, withConnection } from "../core/errand.ts";
import { NoConnectionError, UnsupportedError } from "../core/errors.ts";
import { Silence, within } from "../core/interrupt.ts";
import type { Lockable } from "../core/key.ts";
import { type Home, detached, homeOf } from "../core/scope.ts";
import { Rounds } from "./rounds.ts";
import type { Added, How, Leased, NewJob, QueueStore } from "./store.ts";

/** A lock of a session. Its signal aborts when the session is lost. */
export interface Session extends AsyncDisposable {
  readonly signal: AbortSignal;
}

/** What is needed of an instance of Holdfast besides its database. */
export interface Instance {
  hold(lock: Lockable, options: { readonly signal: AbortSignal }): Promise<Session>;
  transaction<T>(options: { readonly signal?: AbortSignal }, body: (tx: never) => Promise<T>): Promise<T>;
}

/** Others are told of new jobs at once, and then at most this often: each message makes every commit wait in line. */
const tellMs = 20;
/** How long several calls wait together for one of their keys. Then they part, and those who need it wait on. */
const briefMs = 200;
/** How long a transaction waits for what is done beside it. */
const besideMs = 300;

const desks = new WeakMap<object, Desk>();

export function deskOf(hf: unknown, call = "queue"): Desk {
  const home = homeOf(hf, call);
  let desk = desks.get(home);
  if (!desk) desks.set(home, (desk = new Desk(home, hf as Instance)));
  return desk;
}

interface Line {
  readonly coalescer: Coalescer<readonly NewJob[], readonly Added[]>;
  toldAt: number;
  timer: NodeJS.Timeout | undefined;
}

export class Desk {
  readonly home: Home<unknown, Connection>;
  readonly instance: Instance;
  readonly bell: Bell<unknown, Connection>;
  readonly #numbers = new Map<string, Promise<number>>();
  readonly #lines = new Map<string, Line>();
  readonly #marks: Coalescer<Leased, boolean>;
  readonly rounds = new Rounds(this);

  constructor(home: Home<unknown, Connection>, instance: Instance) {
    this.home = home;
    this.instance = instance;
    this.bell = new Bell(home, "queues");
    home.started.finally(() => this.bell.close());
    this.#marks = new Coalescer({
      inFlight: 2,
      most: 500,
      run: (of) => this.ask((connection, how) => this.store.completion.completed(connection, of, how)),
    });
  }

  get store(): QueueStore<Connection> {
    const { engine } = this.home.database;
    if (!engine.queues) throw new UnsupportedError(`queue: ${engine.name} does not have queues yet`);
    return engine.queues;
  }

  /** Of workers: by itself, and not again if it may have been done. */
  async ask<T>(work: (connection: Connection, how: How) => Promise<T>, on = undone): Promise<T> {
    const how = this.#how({ scope: undefined, waitMs: errandMs });
    const errand = async (connection: Connection) => {
      await known(this.home, connection, how.free);
      return work(connection, how);
    };
    return again(this.home.database, () => withConnection(this.home, errand), on);
  }

  /** A client that hands out no connection runs whatever it is sent in a transaction of its own. */
  #how({ scope, waitMs }: Pick<Place, "scope" | "waitMs">): How {
    return { free: scope === undefined && this.home.database.connect !== undefined, waitMs };
  }

  /** Of callers: in their transaction, if they are in one. What it does may be done again. */
  async call<T>(
    options: CallOptions,
    name: string,
    work: (connection: Connection, number: number, how: How) => Promise<T>,
  ): Promise<T> {
    const place = placeOf(this.home, options, "queue");
    const number = await this.number(name, place);
    return send(this.home, place, aboutOf(name), (connection, { waitMs }) =>
      work(connection, number, this.#how({ scope: place.scope, waitMs })),
    );
  }

  completed(mark: Leased): Promise<boolean> {
    return this.#marks.add(mark);
  }

  /**
   * Of a queue that somebody calls: found once, and made if it is new. Beside the caller's transaction, or others who
   * add to the same new queue would wait for its end; inside it, if there is no other connection.
   */
  async number(name: string, place: Pick<Place, "scope"> = { scope: undefined }): Promise<number> {
    const { scope } = place;
    const open = (connection: Connection, inside: Place["scope"], waitMs: number) =>
      this.store.open(connection, name, undefined, this.#how({ scope: inside, waitMs }));
    const inside = (of: NonNullable<Place["scope"]>) =>
      of.work(({ connection }) => open(connection, of, errandMs));
    if (scope && this.home.database.traits.single) return inside(scope);
    let asking = this.#numbers.get(name);
    if (!asking) {
      const apart = placeOf(this.home, { separate: true }, "queue");
      asking = send(this.home, apart, aboutOf(name), (connection, { waitMs }) =>
        open(connection, undefined, waitMs),
      );
      this.#numbers.set(name, asking);
      asking.catch(() => this.#numbers.delete(name));
    }
    if (!scope) return asking;
    try {
      return await within(besideMs, asking);
    } catch (error) {
      // Everybody who holds a connection may be waiting for one more.
      if (error instanceof Silence || error instanceof NoConnectionError) return inside(scope);
      throw error;
    }
  }

  async add(name: string, jobs: readonly NewJob[], options: CallOptions): Promise<readonly Added[]> {
    const place = placeOf(this.home, options, "enqueue");
    if (!place.scope)
      return detached(this.home, () => this.#line(name).coalescer.add(jobs, place.signal, place.waitMs));
    const number = await this.number(name, place);
    // It is told when the transaction is committed.
    return send(this.home, place, aboutOf(name, jobs), (connection, { waitMs }) =>
      this.store.add(connection, number, jobs, { tell: name, joined: true, free: false, waitMs }),
    );
  }

  #line(name: string): Line {
    let line = this.#lines.get(name);
    if (line) return line;
    const sending: Together<readonly NewJob[], readonly Added[]> = {
      about: (jobs) => aboutOf(name, jobs),
      once: true,
      decide: (connection, calls, { waitMs }) => this.#addAll(connection, name, calls, waitMs),
    };
    line = {
      toldAt: 0,
      timer: undefined,
      coalescer: new Coalescer({
        inFlight: 2,
        most: 500,
        together: 64,
        names: keysOf,
        run: async (calls, terms) => {
          await this.number(name);
          const answers = await sendTogether(this.home, sending, calls, terms);
          this.bell.ring(name);
          return answers;
        },
        late: (jobs, waitedMs, cause) => waitedInVain(this.home, aboutOf(name, jobs), waitedMs, cause),
      }),
    };
    this.#lines.set(name, line);
    return line;
  }

  async #addAll(
    connection: Connection,
    name: string,
    calls: readonly (readonly NewJob[])[],
    waitMs: number,
  ): Promise<readonly (readonly Added[])[]> {
    const number = await this.number(name);
    const brief = calls.length > 1 && new Set(calls.flatMap(keysOf)).size > 1;
    const added = await this.store.add(connection, number, calls.flat(), {
      tell: this.#tells(name),
      joined: false,
      ...this.#how({ scope: undefined, waitMs: brief ? Math.min(waitMs, briefMs) : waitMs }),
    });
    let next = 0;
    return calls.map((jobs) => added.slice(next, (next += jobs.length)));
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
      void this.ask(async (connection) => this.store.ring?.(connection, name)).catch(() => {});
    }, tellMs);
    return undefined;
  }

  /** Others may have something to do now: workers of this process at once, those of others at most every 20 ms. */
  async tell(name: string): Promise<void> {
    this.bell.ring(name);
    if (this.#tells(name) === undefined) return;
    await this.ask(async (connection) => this.store.ring?.(connection, name));
  }
}

/** Those without a key need nothing that others could have: they stay together. */
function keysOf(jobs: readonly NewJob[]): string[] {
  const keys = jobs.flatMap((job) => (job.key === undefined ? [] : [job.key]));
  return keys.length > 0 ? keys : [""];
}

function aboutOf(queue: string, jobs: readonly NewJob[] = []): About {
  return { names: keysOf(jobs).map((key) => (key === "" ? `queue ${queue}` : `queue ${queue}:${key}`)) };
}
