import { shown } from "../seam/shown.ts";
import type { Wait } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { type Key, canonical } from "../seam/key.ts";
import { checkNames } from "../input/options.ts";
import { checkWait } from "../waiting/wait.ts";
import { type Lease, type LeaseOptions, type LeaseTerms, type LeaseWish, checkTerms } from "./lease.ts";

/** So many of a semaphore's permits, held like a lease. */
export type Permit = Lease;

export interface SemaphoreOptions extends Omit<LeaseOptions, "signal" | "wait"> {
  /** How many may be held at a time. All processes should agree; each goes by its own figure. */
  readonly permits: number;
  /** How long to wait for a permit unless the call says otherwise. Default: the instance's. */
  readonly wait?: Wait;
}

export interface AcquireOptions {
  /** How many at once. Default 1. */
  readonly permits?: number;
  /** Milliseconds, "nowait" to throw at once, "skip" to get undefined at once. Default: the semaphore's. */
  readonly wait?: Wait | "skip";
  /** Gives up the wait. */
  readonly signal?: AbortSignal | undefined;
}

/** What a semaphore needs of the manager of leases. */
export interface PermitClaims {
  claim(
    wish: LeaseWish,
    terms: LeaseTerms,
    wait: Wait | "skip" | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Lease | undefined>;
}

const names = new Set(["permits", "ttl", "wait", "atLeastFor", "renew", "holder"]);
const acquireNames = new Set(["permits", "wait", "signal"]);
const most = 1_000_000;

function checkPermits(value: unknown, what: string, most: number): number {
  if (Number.isSafeInteger(value) && (value as number) >= 1 && (value as number) <= most)
    return value as number;
  throw new UsageError(`${what} must be a whole number from 1 to ${most}, not ${shown(value)}`);
}

/** At most so many holders at a time, in all processes together: `hf.semaphore(key("render"), { permits: 5 })`. */
export class Semaphore {
  readonly #claims: PermitClaims;
  readonly #key: Key;
  readonly #capacity: number;
  readonly #terms: LeaseTerms;
  readonly #wait: Wait | undefined;

  constructor(claims: PermitClaims, name: Key, options: SemaphoreOptions) {
    checkNames("hf.semaphore", options, names);
    const [request, ...others] = canonical(name);
    if (!request || others.length > 0 || request.mode === "shared")
      throw new UsageError("hf.semaphore takes one key, as key(…) makes it");
    this.#claims = claims;
    this.#key = request.key;
    this.#capacity = checkPermits(options.permits, "hf.semaphore: permits", most);
    this.#terms = checkTerms(options);
    this.#wait = options.wait === undefined ? undefined : checkWait(options.wait);
  }

  /** Takes a permit, or several at once: `await using permit = await semaphore.acquire()`. */
  acquire(options?: AcquireOptions & { wait?: Wait }): Promise<Permit>;
  acquire(options: AcquireOptions & { wait: "skip" }): Promise<Permit | undefined>;
  async acquire(options: AcquireOptions = {}): Promise<Permit | undefined> {
    checkNames("semaphore.acquire", options, acquireNames);
    const weight = checkPermits(options.permits ?? 1, "semaphore.acquire: permits", this.#capacity);
    const wish = { key: this.#key, mode: "permit", weight, capacity: this.#capacity } as const;
    return this.#claims.claim(wish, this.#terms, options.wait ?? this.#wait, options.signal);
  }

  /** Runs a body with a permit, and gives it back. Throws if the permit was lost before the body had ended. */
  async use<T>(
    body: (permit: Permit) => Promise<T>,
    options: AcquireOptions & { wait?: Wait } = {},
  ): Promise<T> {
    if (typeof body !== "function")
      throw new UsageError("semaphore.use(body): the body must be an async function");
    if ((options.wait as unknown) === "skip")
      throw new UsageError(
        'semaphore.use: to skip is for acquire({ wait: "skip" }), which says whether it did',
      );
    const permit = await this.acquire(options);
    let value: T;
    try {
      value = await body(permit);
    } catch (error) {
      // The body's own error is the one to see; what is not given back runs out.
      await permit.release().catch(() => {});
      throw error;
    }
    await permit.release();
    return value;
  }
}
