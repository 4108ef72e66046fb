import { randomUUID } from "node:crypto";
import type { Connection, Wait } from "../../seam/database.ts";
import {
  FileBusyError,
  LeaseLostError,
  LockNotAvailableError,
  LockTimeoutError,
  OutcomeUnknownError,
} from "../../seam/errors.ts";
import { type Traces, emit } from "../../events/events.ts";
import { apart } from "../../context/inside.ts";
import { within } from "../../waiting/interrupt.ts";
import { classify } from "../../seam/failure.ts";
import type { ClaimResult, LeaseClaim } from "../../seam/leases.ts";
import type { Notifier } from "../../batch/notifier.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import type { InstanceContext } from "../../transaction/scope.ts";
import { sleep } from "../../waiting/wait.ts";
import { type Errands, graceMs, tellMs } from "./errands.ts";
import { Granted, type Keeper } from "./granted.ts";
import { type LeaseTerms, type LeaseWish, requestOf, resourceOf, trust } from "./terms.ts";

/** A place in line ends this soon if nobody asks for it any more: a waiter that died holds the others up for so long. */
const lineMs = 3000;
/** How often to look again: at first and at most, where nothing tells of releases; and where something does. */
const poll = { first: 50, most: 250, heard: 1000, least: 25 };

/** What those who claim leases of one instance share. */
export interface Counter<Native, C extends Connection> extends Keeper {
  readonly context: InstanceContext<Native, C>;
  readonly errands: Errands<Native, C>;
  readonly notifier: Notifier<Native, C>;
  /** The instance's end. */
  readonly closing: AbortSignal;
}

/** One caller's way to a lease: asks again and again until it is granted, or gives up and leaves nothing behind. */
export class Claiming<Native, C extends Connection> {
  readonly #counter: Counter<Native, C>;
  readonly #terms: LeaseTerms;
  readonly #patience: Wait | "skip";
  readonly #name: string;
  readonly #claim: LeaseClaim;
  readonly #stop: AbortSignal;
  readonly #started = performance.now();
  readonly #waitMs: number;
  readonly #endsAt: number;
  /** The last time that it was asked for. */
  #taking: Promise<unknown> | undefined;
  /** A row of ours may be there, in line or granted. */
  #traces = false;
  #stood = false;
  #busy: FileBusyError | undefined;
  #withdrawn: Promise<unknown> | undefined;

  constructor(
    counter: Counter<Native, C>,
    wish: LeaseWish,
    terms: LeaseTerms,
    patience: Wait | "skip",
    signal: AbortSignal | undefined,
  ) {
    const { context, closing } = counter;
    const { key, mode, weight, capacity } = wish;
    this.#counter = counter;
    this.#terms = terms;
    this.#patience = patience;
    this.#name = context.names([requestOf(wish)])[0] as string;
    this.#waitMs = typeof patience === "number" ? patience : 0;
    this.#endsAt = this.#started + this.#waitMs;
    this.#stop = signal ? AbortSignal.any([signal, closing]) : closing;
    this.#claim = {
      resource: resourceOf(key, mode),
      name: (context.shown([{ key, mode: "exclusive" }])[0] ?? "").replaceAll("\0", "?"),
      mode,
      token: randomUUID(),
      holder: terms.holder,
      weight,
      capacity,
      ttlMs: terms.ttlMs,
      lineMs: this.#waitMs > 0 ? lineMs : 0,
    };
  }

  /** Undefined: it is not free, and was to be skipped. */
  async run(told: Traces["holdfast:lock"] | undefined): Promise<Granted | undefined> {
    const lease = await this.#granted();
    if (!lease) return this.#refused(told);
    if (told) told.outcome = "granted";
    return lease;
  }

  /** Undefined: it was not free in time. */
  async #granted(): Promise<Granted | undefined> {
    const { errands, notifier } = this.#counter;
    const claim = this.#claim;
    const stop = this.#stop;
    const ear = notifier.ear(claim.resource);
    let leaveLine: (() => void) | undefined;
    try {
      for (let round = 0; ; round++) {
        stop.throwIfAborted();
        ear.rung = false;
        this.#traces = true;
        const answer = this.#take();
        this.#taking = answer;
        const { result, sentAt, error } = await unlessAborted(answer, stop, () => {});
        this.#busy = error;
        if (result.granted) {
          if (!this.#isInTime(result.fence, sentAt)) continue;
          this.#traces = false;
          return this.#grant(result, sentAt);
        }
        // A file that was busy has nothing new of ours: only what was there before has to be taken back.
        this.#traces = this.#stood = error ? this.#stood : result.inLine;
        const leftMs = this.#endsAt - performance.now();
        if (leftMs <= 0) return undefined;
        if (round === 1) leaveLine = notifier.listen();
        await ear.sleep(Math.min(leftMs, this.#pause(round, result.freeInMs)), stop);
      }
    } finally {
      leaveLine?.();
      notifier.forget(claim.resource, ear);
      // Not before the claim that is under way has been answered, or it would come after.
      if (this.#traces)
        this.#withdrawn = errands.track(apart(() => this.#withdraw(this.#taking)).catch(() => {}));
    }
  }

  #grant(result: ClaimResult & { granted: true }, sentAt: number): Granted {
    const { resource, name, mode, token } = this.#claim;
    const { fence, origin } = result;
    const grip = { resource, name, mode, token, fence, origin };
    const lease = new Granted(this.#counter, this.#name, grip, this.#terms, result, sentAt);
    this.#counter.held.add(lease);
    return lease;
  }

  /** A grant that comes too late is worth nothing; it is ours still, so asking again renews it. */
  #isInTime(fence: number, sentAt: number): boolean {
    const { ttlMs } = this.#claim;
    if (performance.now() < trust(sentAt, ttlMs)) return true;
    if (performance.now() < this.#endsAt) return false;
    throw new LeaseLostError(
      this.#name,
      fence,
      `the answer took longer than its ttl of ${ttlMs} ms. Give it more`,
    );
  }

  async #take(): Promise<{ result: ClaimResult; sentAt: number; error?: FileBusyError }> {
    const { context, errands } = this.#counter;
    const claim = this.#claim;
    let sentAt = 0;
    try {
      const oneShot = (connection: C) => {
        sentAt = performance.now();
        return errands.store().take(connection, claim);
      };
      // A server that is restarted may be back before the wait is over.
      const result = await errands.ask(this.#endsAt + graceMs, oneShot, {
        wantedUntil: this.#endsAt,
        stop: this.#stop,
        about: `The lease ${this.#name}`,
        instead: `If it was granted, it is given back as soon as the server answers, or runs out by itself after ${claim.ttlMs} ms.`,
      });
      return { result, sentAt };
    } catch (error) {
      // Others are looking at it, and have not come to an end, or were faster again and again.
      const failure = classify(context.database, error);
      if (failure !== "lock-timeout" && failure !== "serialization" && failure !== "deadlock") throw error;
      // An earlier try may have been granted, and its answer lost.
      const result = { granted: false, freeInMs: 0, inLine: true } as const;
      return { result, sentAt, ...(error instanceof FileBusyError && { error }) };
    }
  }

  /** How long to sleep before looking again. Random, so that those who wait do not all look at the same instant. */
  #pause(round: number, freeInMs: number | undefined): number {
    const random = 0.75 + Math.random() / 2;
    const polled = Math.min(poll.most, poll.first * 1.3 ** round) * random;
    const ms = this.#counter.notifier.hears() ? poll.heard * random : polled;
    if (freeInMs === undefined) return ms;
    // Its time is over, and a transaction keeps it, the end of which nobody tells.
    if (freeInMs === 0) return polled;
    return Math.min(ms, Math.max(poll.least, freeInMs + 1));
  }

  /** Undefined: it was to be skipped. */
  async #refused(told: Traces["holdfast:lock"] | undefined): Promise<undefined> {
    const busy = this.#busy;
    const lease = this.#name;
    const waitedMs = Math.round(performance.now() - this.#started);
    const reason = busy ? "file" : this.#waitMs > 0 ? "timeout" : "busy";
    if (told) told.outcome = reason;
    emit("holdfast:lease:refused", () => ({ lease, waitedMs, reason }));
    // Nobody is known to have it: it could not be asked for.
    if (busy) throw new FileBusyError([lease], waitedMs, busy.cause);
    if (this.#patience === "skip") return undefined;
    const holders = await this.#counter.errands.holders(this.#claim.resource);
    const blocked = { keys: [lease], holders };
    // Whoever is told that we gave up should not find us in line.
    if (this.#withdrawn) await within(tellMs, this.#withdrawn).catch(() => {});
    if (reason === "busy") throw new LockNotAvailableError(blocked);
    throw new LockTimeoutError({ ...blocked, waitedMs });
  }

  /**
   * Takes back a claim that nobody waits for any more. One whose answer was lost may still be under way on the server, where
   * nothing of it can be seen yet: it is looked for until it is found, or has run out by itself.
   */
  async #withdraw(taking: Promise<unknown> | undefined): Promise<void> {
    const { errands, closing } = this.#counter;
    const claim = this.#claim;
    const endsAt = performance.now() + claim.ttlMs;
    const unheard = (error: unknown) => error instanceof OutcomeUnknownError;
    let lost = false;
    await taking?.catch((error: unknown) => (lost = unheard(error)));
    for (let delayMs = 250; ; delayMs = Math.min(30_000, 2 * delayMs)) {
      const found = await errands.release(claim, 0).catch((error: unknown) => {
        if (lost && unheard(error)) return undefined;
        throw error;
      });
      if (!lost || found === "ours" || performance.now() + delayMs > endsAt) return;
      await sleep(delayMs, closing, false);
    }
  }
}
