import { hash, randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { require } from "../seam/capabilities.ts";
import type { Connection, Wait } from "../seam/database.ts";
import { withConnection } from "../transaction/one-shot.ts";
import {
  FileBusyError,
  type Holder,
  LeaseLostError,
  LockNotAvailableError,
  LockTimeoutError,
  OutcomeUnknownError,
  StaleFenceError,
  UnsupportedError,
  UsageError,
  message,
} from "../seam/errors.ts";
import { type Traces, emit, nextHold, traced } from "../events/events.ts";
import { apart } from "../context/inside.ts";
import { within } from "../waiting/interrupt.ts";
import { classify } from "../seam/failure.ts";
import { type Key, type LockRequest, type Lockable, canonical } from "../seam/key.ts";
import { checkRows, checkWhole, optionalText } from "../input/values.ts";
import type {
  LeaseClaim,
  ClaimResult,
  Grip,
  KeptLease,
  LeaseInfo,
  LeaseMode,
  Leases,
} from "../seam/leases.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { Turns, unlessAborted } from "../waiting/turns.ts";
import { present, presenting, whyOf } from "../transaction/present.ts";
import { retryPolicy, retrying } from "../transaction/retry.ts";
import { type InstanceContext, type Transaction, scopeOf } from "../transaction/scope.ts";
import { checkWait, milliseconds, sleep } from "../waiting/wait.ts";
import { watched } from "../waiting/watched-signal.ts";
import { Notifier } from "../batch/notifier.ts";
import * as protection from "../seam/protections.ts";

export interface LeaseOptions {
  /**
   * How long it lasts unless it is renewed, by the database's clock, in milliseconds from 100 to 86,400,000 (a day).
   * After a crash of its holder nobody gets it sooner. Default 30,000.
   */
  readonly ttl?: number;
  /** How long to wait for it: milliseconds, "nowait" to throw at once, "skip" to get undefined at once. Default: the instance's. */
  readonly wait?: Wait | "skip";
  /** Gives up the wait. It has no effect on a lease that was granted. */
  readonly signal?: AbortSignal | undefined;
  /** After a release too, nobody else gets it before this many milliseconds since it was granted. Default 0. */
  readonly atLeastFor?: number;
  /** `false`: it is not renewed unless `renew()` is called. Default true. */
  readonly renew?: boolean;
  /** Who holds it, for people. Default: host name and process id. */
  readonly holder?: string;
}

/** Which leases are listed. */
export interface LeaseFilter {
  /** Those too that ran out and were never given back. */
  readonly over?: boolean;
  /** As it is shown; a key is known by more than that. */
  readonly name?: string;
  readonly fence?: number;
  /** How many at the most. */
  readonly limit?: number;
}

/** Held until it is released, or runs out: by the database's clock, whatever becomes of this process. */
export interface Lease extends AsyncDisposable {
  readonly name: string;
  /** Grows from grant to grant, and never goes back. Pass it to systems that can refuse an older one. */
  readonly fence: number;
  /** When it was granted, by the database's clock. */
  readonly since: Date;
  /** Until when it lasts if it is not renewed again, by the database's clock. */
  readonly until: Date;
  /** Aborts before anybody else can get the lease. Pass it to whatever the lease protects. */
  readonly signal: AbortSignal;
  /** Makes it last for `ttl` from now on, and for as long with every later renewal. Never makes it shorter. */
  renew(ttl?: number): Promise<void>;
  /** Throws if it can no longer be relied on, or was released. */
  throwIfLost(): void;
  /** Gives it back. Throws `LeaseLostError` if the server says that it was no longer ours. */
  release(): Promise<void>;
}

/** How a lease is kept, once it is granted. */
export interface LeaseTerms {
  readonly ttlMs: number;
  readonly atLeastMs: number;
  readonly renew: boolean;
  readonly holder: string;
}

/** What is wanted of a key. */
export interface LeaseWish {
  readonly key: Key;
  readonly mode: LeaseMode;
  readonly weight: number;
  readonly capacity: number;
}

const names = new Set(["ttl", "wait", "signal", "atLeastFor", "renew", "holder"]);
const longestTtl = 86_400_000;
/** An exclusive lease takes it all, a shared one 1 of it. */
const whole = 2 ** 30;

/** A place in line ends this soon if nobody asks for it any more: a waiter that died holds the others up for so long. */
const lineMs = 3000;
/** How often to look again: at first and at most, where nothing tells of releases; and where something does. */
const poll = { first: 50, most: 250, heard: 1000, least: 25 };
/** How long the server may take to answer, besides the wait. */
const graceMs = 5000;

/** How long an error may wait for what it could say. */
const tellMs = 1000;

/** Claims, releases and questions are all safe to repeat. */
const policy = retryPolicy({ attempts: 10, baseMs: 20, maxMs: 250 });

/** The holder stops this long before the lease runs out: for clocks that run at different speeds, and for stopping. */
function marginMs(ttlMs: number): number {
  return Math.max(ttlMs / 10, 25);
}

export function checkTerms(
  options: Pick<LeaseOptions, "ttl" | "atLeastFor" | "renew" | "holder">,
): LeaseTerms {
  const { ttl = 30_000, atLeastFor = 0, renew = true, holder = `${hostname()}:${process.pid}` } = options;
  if (typeof renew !== "boolean") throw new UsageError(`renew must be true or false, not ${String(renew)}`);
  if (typeof holder !== "string" || holder === "" || holder.includes("\0") || !holder.isWellFormed())
    throw new UsageError("holder must be a text that is not empty, without NUL characters");
  return {
    ttlMs: checkTtl(ttl),
    atLeastMs: atMostADay(atLeastFor, "atLeastFor", 0),
    renew,
    holder: holder.slice(0, 200),
  };
}

function checkTtl(ttl: unknown): number {
  return atMostADay(ttl, "ttl", 100);
}

function atMostADay(value: unknown, what: string, least: number): number {
  const ms = milliseconds(value, what, least);
  if (ms > longestTtl)
    throw new UsageError(`${what} must be a day at the most (${longestTtl} ms), not ${ms}`);
  return ms;
}

/** A lease and a semaphore of one key are two things. Long ids are hashed: an index has no place for them. */
function resourceOf(key: Key, mode: LeaseMode): string {
  const id = key.id.length > 100 ? `#${hash("sha256", key.id, "hex")}` : key.id;
  return `${mode === "permit" ? "permit" : "lease"} ${id}`;
}

function requestOf({ key, mode }: Pick<LeaseWish, "key" | "mode">): LockRequest {
  return { key, mode: mode === "shared" ? "shared" : "exclusive" };
}

/** Whether it was ours until then. */
type Released = "ours" | "not ours" | "perhaps";

/** What a lease needs of the manager that gave it. */
interface Counter {
  /** Throws inside a transaction that would have to end first. */
  refuseInside(instead: string): void;
  renew(grip: Grip, ttlMs: number, withinMs: number): Promise<{ until: Date | undefined; sentAt: number }>;
  release(grip: Grip, atLeastMs: number): Promise<Released>;
  retryable(error: unknown): boolean;
  /** As the caller is told of it. */
  told(error: unknown, lease: string): unknown;
  forget(lease: Granted): void;
}

const grips = new WeakMap<object, Grip>();

class Granted implements Lease {
  readonly name: string;
  readonly fence: number;
  readonly since: Date;
  /** In events. */
  readonly hold = nextHold();
  readonly #began = performance.now();
  readonly #counter: Counter;
  readonly #grip: Grip;
  readonly #terms: LeaseTerms;
  readonly #controller = new AbortController();
  readonly #signal: AbortSignal;
  readonly #queue = new Turns();
  #until: Date;
  #ttlMs: number;
  /** By this process's own clock that never jumps: the application's idea of the date may be an hour off. */
  #trustUntil: number;
  #watch: NodeJS.Timeout | undefined;
  #next: NodeJS.Timeout | undefined;
  /** Why the last renewal failed, and how many have in a row. */
  #trouble: unknown;
  #failures = 0;
  #lost: LeaseLostError | undefined;
  #over = false;
  #releasing: Promise<void> | undefined;

  constructor(
    counter: Counter,
    name: string,
    grip: Grip,
    terms: LeaseTerms,
    grant: ClaimResult & { granted: true },
    sentAt: number,
  ) {
    this.#counter = counter;
    this.#grip = grip;
    this.#terms = terms;
    this.#ttlMs = terms.ttlMs;
    this.#trustUntil = trust(sentAt, terms.ttlMs);
    this.name = name;
    this.fence = grant.fence;
    this.since = grant.since;
    this.#until = grant.until;
    this.#signal = watched(this.#controller.signal, () => this.#look());
    grips.set(this, grip);
    // It goes on after whatever transaction it is asked for in.
    apart(() => {
      this.#arm();
      if (terms.renew) this.#schedule(sentAt + terms.ttlMs / 3 - performance.now());
    });
  }

  get until(): Date {
    return this.#until;
  }

  get signal(): AbortSignal {
    this.#look();
    return this.#signal;
  }

  throwIfLost(): void {
    this.#look();
    if (this.#lost) throw this.#lost;
    if (this.#over) throw new LeaseLostError(this.name, this.fence, "it was released");
  }

  /** After a pause of the whole process code may run before timers do: whoever looks, looks at the clock too. */
  #look(): void {
    if (performance.now() < this.#trustUntil) return;
    const why = this.#trouble === undefined ? "" : ` (${message(this.#trouble)})`;
    this.#lose(`it was not renewed in time${why}, so somebody else may get it at any moment`, this.#trouble);
  }

  #lose(detail: string, cause?: unknown): void {
    if (this.#over || this.#lost) return;
    this.#stop();
    this.#counter.forget(this);
    const error = (this.#lost = new LeaseLostError(this.name, this.fence, detail, cause));
    this.#controller.abort(error);
    this.#tellLost(error);
  }

  get #heldMs(): number {
    return performance.now() - this.#began;
  }

  #tellLost(error: unknown): void {
    const { hold, name: lease, fence } = this;
    emit("holdfast:lease:lost", () => ({ hold, lease, fence, heldMs: this.#heldMs, error }));
  }

  #stop(): void {
    clearTimeout(this.#watch);
    clearTimeout(this.#next);
  }

  #arm(): void {
    clearTimeout(this.#watch);
    const fire = () => {
      this.#look();
      // A timer may be early, and the deadline may have moved on.
      if (!this.#over && !this.#lost) this.#arm();
    };
    this.#watch = setTimeout(fire, Math.max(1, this.#trustUntil - performance.now())).unref();
  }

  #schedule(ms: number): void {
    clearTimeout(this.#next);
    this.#next = setTimeout(() => void this.#keep(), Math.max(1, ms)).unref();
  }

  async #keep(): Promise<void> {
    try {
      await this.#renewOnce(this.#ttlMs);
    } catch {
      // Whatever it was: the clock decides when it is too late.
      if (!this.#over && !this.#lost) this.#schedule(this.#soon());
    }
  }

  /** At once, then less and less often. */
  #soon(): number {
    return Math.min(this.#ttlMs / 20, 1000, 25 * 2 ** this.#failures) * (0.5 + Math.random());
  }

  async renew(ttl?: number): Promise<void> {
    if (this.#over)
      throw new UsageError(`The lease ${this.name} (fence ${this.fence}) was released: it cannot be renewed`);
    const ttlMs = ttl === undefined ? this.#ttlMs : checkTtl(ttl);
    this.#counter.refuseInside("It is renewed by itself; renew it by hand before or after the transaction");
    await retrying(
      async () => {
        await this.#renewOnce(ttlMs);
        this.throwIfLost();
      },
      {
        why: (error) => (this.#counter.retryable(error) ? "passes" : undefined),
        on: new Set(["passes"]),
        // Until it is lost.
        attempts: Infinity,
        wanted: () => !this.#lost && !this.#over,
        pauseMs: () => this.#soon(),
        failed: async (error) => {
          this.throwIfLost();
          throw this.#counter.told(error, this.name);
        },
      },
    );
  }

  /** Rejects if it is lost, or not known to be renewed. Does nothing once it is released. */
  async #renewOnce(ttlMs: number): Promise<void> {
    return this.#queue.run(async () => {
      this.#look();
      if (this.#lost) throw this.#lost;
      if (this.#over) return;
      try {
        // Two tries have room, so that one on a connection that is dead is not the only one.
        const patience = Math.min(this.#trustUntil - performance.now(), Math.max(ttlMs / 3, 500));
        const { until, sentAt } = await this.#counter.renew(this.#grip, ttlMs, Math.ceil(patience));
        if (this.#over) return;
        // Its time may have passed while the answer was under way: then it stays lost.
        this.#look();
        if (!until) this.#lose("the server says that it is no longer ours");
        if (this.#lost) throw this.#lost;
        this.#until = until as Date;
        this.#ttlMs = ttlMs;
        this.#trustUntil = Math.max(this.#trustUntil, trust(sentAt, ttlMs));
        this.#trouble = undefined;
        this.#failures = 0;
        // By hand, it may have been in a transaction.
        apart(() => {
          this.#arm();
          if (this.#terms.renew) this.#schedule(sentAt + ttlMs / 3 - performance.now());
        });
        emit("holdfast:lease:renewed", () => ({ hold: this.hold, lease: this.name, fence: this.fence }));
      } catch (error) {
        this.#trouble = error;
        this.#failures++;
        throw error;
      }
    });
  }

  async release(): Promise<void> {
    // Twice does no harm, but whoever comes second waits too.
    if (this.#releasing) return this.#releasing.catch(() => {});
    this.#counter.refuseInside("Release the lease after the transaction");
    this.#over = true;
    this.#stop();
    this.#releasing = this.#giveBack();
    return this.#releasing;
  }

  async #giveBack(): Promise<void> {
    const ours = await this.#counter
      .release(this.#grip, this.#terms.atLeastMs)
      .catch((error: unknown) => {
        // Whether it is held still, nobody knows.
        if (!this.#lost) this.#tellLost(error);
        throw error;
      })
      .finally(() => this.#counter.forget(this));
    if (ours === "not ours" || (ours === "perhaps" && this.#lost)) {
      if (this.#lost) throw this.#lost;
      const detail = "the server says that it was no longer ours when it was released";
      const error = new LeaseLostError(this.name, this.fence, detail);
      this.#tellLost(error);
      throw error;
    }
    emit("holdfast:lease:released", () => ({
      hold: this.hold,
      lease: this.name,
      fence: this.fence,
      ...(!this.#lost && { heldMs: this.#heldMs }),
    }));
  }

  /** The instance is closed: its leases are for others to take at once. */
  async end(): Promise<void> {
    this.#lose("the instance was closed");
    await this.release();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    // Whoever listens to `signal` knows already; a second error here would hide the block's own.
    await this.release().catch((error: unknown) => {
      if (!(error instanceof LeaseLostError)) throw error;
    });
  }
}

/** The server counts from when it gets the message, which is later than it was sent: it can only last longer. */
function trust(sentAt: number, ttlMs: number): number {
  return sentAt + (protection.leaseTrustEnds ? ttlMs - marginMs(ttlMs) : 100 * ttlMs);
}

/** A token lets its owner give the lease back: it is nobody else's. */
function shown({ name, holder, fence, mode, waiting, since, until, over }: KeptLease): LeaseInfo {
  return { name, holder, fence, mode, waiting, since, until, over };
}

interface Asking {
  readonly wantedUntil?: number;
  readonly stop?: AbortSignal;
  /** What it is about, for people. */
  readonly about?: string;
  /** Of what writes: what follows if its answer is lost and it may have been done. */
  readonly instead?: string;
}

/** Gives out the leases of one instance, and keeps them. */
export class LeaseManager<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #notifier: Notifier<Native, C>;
  readonly #held = new Set<Granted>();
  /** What must be over before the client may be closed. */
  readonly #busy = new Set<Promise<unknown>>();
  readonly #closing = new AbortController();
  readonly #counter: Counter = {
    refuseInside: (instead) => this.#refuseInside(instead),
    renew: async (grip, ttlMs, withinMs) => {
      let sentAt = performance.now();
      const until = await this.#track(
        withConnection(
          this.#context,
          (connection) => {
            sentAt = performance.now();
            return this.#store().renew(connection, grip, ttlMs);
          },
          withinMs,
        ),
      );
      return { until, sentAt };
    },
    release: (grip, atLeastMs) => this.#release(grip, atLeastMs),
    retryable: (error) => this.#retryable(error),
    told: (error, lease) => present(this.#context.database, error, { names: [`The lease ${lease}`] }),
    forget: (lease) => this.#held.delete(lease),
  };

  constructor(context: InstanceContext<Native, C>) {
    this.#context = context;
    this.#notifier = new Notifier(context, "leases");
  }

  async lease(lock: Lockable, options: LeaseOptions = {}): Promise<Lease | undefined> {
    const [request, ...others] = canonical(lock);
    if (!request || others.length > 0) throw new UsageError("hf.lease takes one key");
    checkNames("hf.lease", options, names);
    const { key, mode } = request;
    const wish = { key, mode, weight: mode === "shared" ? 1 : whole, capacity: whole };
    return this.claim(wish, checkTerms(options), options.wait, options.signal);
  }

  /** `wait`: undefined for the instance's own. Resolves to undefined if it is not free and was to be skipped. */
  async claim(
    wish: LeaseWish,
    terms: LeaseTerms,
    wait: Wait | "skip" | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Lease | undefined> {
    const patience = wait === "skip" ? wait : wait === undefined ? this.#context.wait : checkWait(wait);
    checkSignal(signal);
    signal?.throwIfAborted();
    this.#closing.signal.throwIfAborted();
    this.#context.guard?.([requestOf(wish)]);
    await this.#ready();
    this.#refuseInside("Take the lease first, then begin the transaction");
    const started = performance.now();
    const lease = await traced(
      "holdfast:lock",
      () => ({ kind: "lease", locks: [this.#name(wish)] }),
      (told) => this.#track(this.#wait(wish, terms, patience, signal, told)),
    );
    if (lease)
      emit("holdfast:lease:granted", () => ({
        hold: lease.hold,
        lease: lease.name,
        fence: lease.fence,
        waitedMs: performance.now() - started,
      }));
    return lease;
  }

  /** Where a transaction has the only connection, or is the only writer, a lease would wait for it, and it for the lease. */
  #refuseInside(instead: string): void {
    const { database, current } = this.#context;
    const { single, client } = database.traits;
    const alone = single || this.#context.known()?.granularity === "database";
    if (alone && current.getStore())
      throw new UsageError(
        `A lease is written outside of transactions, and ${single ? `${client} has one connection for everybody` : "this one keeps everybody else from writing"}: it would wait for itself. ${instead}.`,
      );
  }

  async #ready(): Promise<void> {
    const { database } = this.#context;
    const { leases } =
      this.#context.known() ?? (await presenting(database, ["Leases"], () => this.#context.capabilities()));
    require(leases, "Leases");
  }

  #store(): Leases<C> {
    const { engine } = this.#context.database;
    if (!engine.leases) throw new UnsupportedError(`Leases: ${engine.name} does not keep any`);
    return engine.leases;
  }

  async #wait(
    wish: LeaseWish,
    terms: LeaseTerms,
    patience: Wait | "skip",
    signal: AbortSignal | undefined,
    told: Traces["holdfast:lock"] | undefined,
  ): Promise<Granted | undefined> {
    const { key, mode, weight, capacity } = wish;
    const started = performance.now();
    const waitMs = typeof patience === "number" ? patience : 0;
    const endsAt = started + waitMs;
    const plain = [{ key, mode: "exclusive" }] as const;
    const claim: LeaseClaim = {
      resource: resourceOf(key, mode),
      name: (this.#context.shown(plain)[0] ?? "").replaceAll("\0", "?"),
      mode,
      token: randomUUID(),
      holder: terms.holder,
      weight,
      capacity,
      ttlMs: terms.ttlMs,
      lineMs: waitMs > 0 ? lineMs : 0,
    };
    const stop = signal ? AbortSignal.any([signal, this.#closing.signal]) : this.#closing.signal;
    const ear = this.#notifier.ear(claim.resource);
    let taking: Promise<unknown> | undefined;
    let leaveLine: (() => void) | undefined;
    /** A row of ours may be there, in line or granted. */
    let traces = false;
    let withdrawn: Promise<unknown> | undefined;
    let busy: FileBusyError | undefined;
    let stood = false;
    try {
      for (let round = 0; ; round++) {
        stop.throwIfAborted();
        ear.rung = false;
        traces = true;
        const answer = this.#take(claim, this.#name(wish), endsAt, stop);
        taking = answer;
        const { result, sentAt, error } = await unlessAborted(answer, stop, () => {});
        busy = error;
        if (result.granted) {
          // A grant that comes this late is worth nothing; it is ours still, so asking again renews it.
          if (performance.now() >= trust(sentAt, terms.ttlMs)) {
            if (performance.now() < endsAt) continue;
            throw new LeaseLostError(
              this.#name(wish),
              result.fence,
              `the answer took longer than its ttl of ${terms.ttlMs} ms. Give it more`,
            );
          }
          traces = false;
          if (told) told.outcome = "granted";
          return this.#grant(wish, claim, terms, result, sentAt);
        }
        // A file that was busy has nothing new of ours: only what was there before has to be taken back.
        traces = stood = busy ? stood : result.inLine;
        const leftMs = endsAt - performance.now();
        if (leftMs <= 0) break;
        if (round === 1) leaveLine = this.#notifier.listen();
        await ear.sleep(Math.min(leftMs, this.#pause(round, result.freeInMs)), stop);
      }
    } finally {
      leaveLine?.();
      this.#notifier.forget(claim.resource, ear);
      // Not before the claim that is under way has been answered, or it would come after.
      if (traces) withdrawn = this.#track(apart(() => this.#withdraw(claim, taking)).catch(() => {}));
    }
    const waitedMs = Math.round(performance.now() - started);
    const reason = busy ? "file" : waitMs > 0 ? "timeout" : "busy";
    if (told) told.outcome = reason;
    emit("holdfast:lease:refused", () => ({ lease: this.#name(wish), waitedMs, reason }));
    // Nobody is known to have it: it could not be asked for.
    if (busy) throw new FileBusyError([this.#name(wish)], waitedMs, busy.cause);
    if (patience === "skip") return undefined;
    const blocked = { keys: [this.#name(wish)], holders: await this.#holders(claim.resource) };
    // Whoever is told that we gave up should not find us in line.
    if (withdrawn) await within(tellMs, withdrawn).catch(() => {});
    if (reason === "busy") throw new LockNotAvailableError(blocked);
    throw new LockTimeoutError({ ...blocked, waitedMs });
  }

  /** How long to sleep before looking again. Random, so that those who wait do not all look at the same instant. */
  #pause(round: number, freeInMs: number | undefined): number {
    const random = 0.75 + Math.random() / 2;
    const polled = Math.min(poll.most, poll.first * 1.3 ** round) * random;
    const ms = this.#notifier.hears() ? poll.heard * random : polled;
    if (freeInMs === undefined) return ms;
    // Its time is over, and a transaction keeps it, the end of which nobody tells.
    if (freeInMs === 0) return polled;
    return Math.min(ms, Math.max(poll.least, freeInMs + 1));
  }

  async #take(
    claim: LeaseClaim,
    name: string,
    endsAt: number,
    stop: AbortSignal,
  ): Promise<{ result: ClaimResult; sentAt: number; error?: FileBusyError }> {
    let sentAt = 0;
    try {
      const oneShot = (connection: C) => {
        sentAt = performance.now();
        return this.#store().take(connection, claim);
      };
      // A server that is restarted may be back before the wait is over.
      const result = await this.#ask(endsAt + graceMs, oneShot, {
        wantedUntil: endsAt,
        stop,
        about: `The lease ${name}`,
        instead: `If it was granted, it is given back as soon as the server answers, or runs out by itself after ${claim.ttlMs} ms.`,
      });
      return { result, sentAt };
    } catch (error) {
      // Others are looking at it, and have not come to an end, or were faster again and again.
      const failure = classify(this.#context.database, error);
      if (failure !== "lock-timeout" && failure !== "serialization" && failure !== "deadlock") throw error;
      // An earlier try may have been granted, and its answer lost.
      const result = { granted: false, freeInMs: 0, inLine: true } as const;
      return { result, sentAt, ...(error instanceof FileBusyError && { error }) };
    }
  }

  #grant(
    wish: LeaseWish,
    claim: LeaseClaim,
    terms: LeaseTerms,
    grant: ClaimResult & { granted: true },
    sentAt: number,
  ): Granted {
    const { resource, token, mode } = claim;
    const { fence, origin } = grant;
    const name = this.#name(wish);
    const lease = new Granted(
      this.#counter,
      name,
      { resource, name: claim.name, mode, token, fence, origin },
      terms,
      grant,
      sentAt,
    );
    this.#held.add(lease);
    return lease;
  }

  async #release(
    { resource, token }: Pick<Grip, "resource" | "token">,
    atLeastMs: number,
  ): Promise<Released> {
    const giveUpAt = performance.now() + graceMs;
    let tries = 0;
    const ours = await this.#track(
      this.#ask(
        giveUpAt,
        (connection) => {
          tries++;
          return this.#store().release(connection, { resource, token }, atLeastMs);
        },
        { about: "The end of a lease", instead: "If it was not given back, it runs out by itself." },
      ),
    );
    // Those of this process need not wait for the server to tell them.
    this.#notifier.notify(resource);
    // If an answer was lost, it may well have been us who gave it back.
    return ours ? "ours" : tries > 1 ? "perhaps" : "not ours";
  }

  /** Who holds, and who waits for, leases and permits: of one key, or all of them. */
  async list(of?: Lockable, options: LeaseFilter = {}): Promise<readonly LeaseInfo[]> {
    checkNames("hf.leases", options, new Set(["over", "limit", "name", "fence"]));
    const { over = false, limit, name, fence } = options;
    optionalText("hf.leases", "name", name);
    if (fence !== undefined) checkWhole("hf.leases", "fence", fence);
    if (limit !== undefined) checkRows("hf.leases", "limit", limit, 1_000_000);
    const [request] = of === undefined ? [] : canonical(of);
    if (request) this.#context.guard?.([request]);
    await this.#ready();
    const resources =
      request && (["exclusive", "permit"] as const).map((mode) => resourceOf(request.key, mode));
    const found = await this.#track(
      this.#ask(performance.now() + graceMs, (connection) =>
        this.#store().list(connection, { resources, name, fence, over, most: limit }),
      ),
    );
    return found.map(shown);
  }

  /** As its holder would: whoever waits is woken. Undefined: there is none with this fence (any more). */
  async end(fence: number): Promise<LeaseInfo | undefined> {
    checkWhole("hf.endLease", "the fence", fence);
    await this.#ready();
    let sent: KeptLease | undefined;
    return this.#track(
      this.#ask(
        performance.now() + graceMs,
        async (connection) => {
          const [found] = await this.#store().list(connection, { fence, over: true });
          // Somebody else may have been faster; or we were, and the answer was lost.
          if (!found) return sent && shown(sent);
          sent = found;
          return (await this.#store().release(connection, found, 0)) ? shown(found) : undefined;
        },
        { about: `The end of the lease with fence ${fence}`, instead: "Ask for it again." },
      ),
    );
  }

  /** Gives back every lease that is still held, and ends every wait. */
  async close(): Promise<void> {
    this.#closing.abort(new UsageError("hf.lease: this instance of Holdfast was closed", "HF_CLOSED"));
    await Promise.allSettled([...this.#held].map((lease) => lease.end()));
    await this.#notifier.close();
    while (this.#busy.size > 0) await Promise.allSettled(this.#busy);
  }

  /**
   * Errands that are safe to repeat, on any connection, again after a failure that may pass: so many times, or for as
   * long as they are wanted.
   */
  async #ask<T>(
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

  #retryable(error: unknown): boolean {
    const failure = classify(this.#context.database, error);
    return failure !== undefined && policy.on.has(failure);
  }

  /** Who is in the way: told if it can be found out quickly, never at the cost of the error itself. */
  async #holders(resource: string): Promise<readonly Holder[]> {
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<readonly LeaseInfo[]>((resolve) => {
      timer = setTimeout(() => resolve([]), tellMs);
    });
    const asked = this.#track(
      withConnection(this.#context, (connection) =>
        this.#store().list(connection, { resources: [resource] }),
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

  #name(wish: LeaseWish): string {
    return this.#context.names([requestOf(wish)])[0] as string;
  }

  /**
   * Takes back a claim that nobody waits for any more. One whose answer was lost may still be under way on the server, where
   * nothing of it can be seen yet: it is looked for until it is found, or has run out by itself.
   */
  async #withdraw(claim: LeaseClaim, taking: Promise<unknown> | undefined): Promise<void> {
    const endsAt = performance.now() + claim.ttlMs;
    const unheard = (error: unknown) => error instanceof OutcomeUnknownError;
    let lost = false;
    await taking?.catch((error: unknown) => (lost = unheard(error)));
    for (let delayMs = 250; ; delayMs = Math.min(30_000, 2 * delayMs)) {
      const found = await this.#release(claim, 0).catch((error: unknown) => {
        if (lost && unheard(error)) return undefined;
        throw error;
      });
      if (!lost || found === "ours" || performance.now() + delayMs > endsAt) return;
      await sleep(delayMs, this.#closing.signal, false);
    }
  }

  #track<T>(work: Promise<T>): Promise<T> {
    const tracked = work.catch(() => {}).finally(() => this.#busy.delete(tracked));
    this.#busy.add(tracked);
    return work;
  }
}

/**
 * Inside a transaction: makes it fail with `StaleFenceError` if the lease is over, and keeps anybody else from getting
 * the lease until the transaction has ended. So what it writes is written by the holder, however long the process
 * was asleep before. In a database other than the one that keeps the lease, it fails if a newer fence of the same
 * key has been here before.
 */
export async function fenced(tx: Transaction<unknown>, lease: Lease): Promise<void> {
  const grip = typeof lease === "object" && lease !== null ? grips.get(lease) : undefined;
  if (!grip) throw new UsageError("fenced(tx, lease): this is no lease of hf.lease or of a semaphore");
  const scope = scopeOf(tx, "fenced(tx, lease)");
  const { engine } = scope.context.database;
  const site = scope.locking();
  const newest = await scope.work(
    async ({ connection, capabilities, joined }) => {
      require(capabilities.leases, "Leases");
      if (!engine.leases) throw new UnsupportedError(`Leases: ${engine.name} does not keep any`);
      return engine.leases.fence(connection, grip, joined);
    },
    undefined,
    [`lease ${lease.name}`],
  );
  if (newest !== undefined) throw new StaleFenceError(lease.name, lease.fence, newest);
  // Nobody else gets the lease before the transaction has ended.
  scope.section?.took({ kind: "lease", name: lease.name }, site);
}
