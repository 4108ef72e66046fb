import type { Wait } from "../seam/database.ts";
import { LockTimeoutError, UnsupportedError, UsageError, message } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import { type Key, key } from "../seam/key.ts";
import { type Candidate as Standing, stand, withdraw } from "../events/made.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { detached, contextOf } from "../transaction/scope.ts";
import { sleep } from "../waiting/wait.ts";
import { watched } from "../waiting/watched-signal.ts";
import { type Lease, type LeaseOptions, checkTerms } from "./lease.ts";
import * as protection from "../seam/protections.ts";
import { Pauses } from "../transaction/retry.ts";

/** What the body of a leader gets. */
export interface Leadership {
  /** Aborts before anybody else can lead, and when this one is to stop. Pass it to whatever the body does. */
  readonly signal: AbortSignal;
  /** Grows from leader to leader, and never goes back. */
  readonly fence: number;
  /** For `fenced(tx, lease)`: what the transaction writes is written by the leader, or not at all. */
  readonly lease: Lease;
}

export interface LeaderOptions {
  /** After a crash of the leader nobody leads for so many milliseconds. Default 30,000. */
  readonly ttl?: number;
  /** Ends it, as `stop` does. */
  readonly signal?: AbortSignal | undefined;
  /** Who leads, for people. Default: host name and process id. */
  readonly holder?: string;
  /** Told what the body threw, and of trouble with the database. Default: a warning of the process. */
  readonly onError?: (error: unknown) => void;
}

export interface Leader extends AsyncDisposable {
  readonly name: string;
  /** Whether the body runs here. */
  readonly leading: boolean;
  /** Resolves when this process is no candidate any more: after `stop`, or after a body that returned by itself. */
  readonly ended: Promise<void>;
  /** Aborts the body's signal, waits for it, and lets the next one lead at once. */
  stop(): Promise<void>;
}

/** Whatever gives leases: an instance of Holdfast. */
export interface Lessor {
  lease(lock: Key, options?: LeaseOptions & { wait?: Wait }): Promise<Lease>;
}

type Body = (leadership: Leadership) => Promise<unknown>;

const names = new Set(["ttl", "signal", "holder", "onError"]);

/** One wait for the lease; then another. */
const waitMs = 60_000;
/** Between a body that threw, or a database that was not there, and the next candidacy. */
const rest = { least: 1000, most: 30_000 };

/**
 * Runs the body in one process at a time, of all that call this with the same name: `leader(hf, "indexer", body)`. If
 * leadership is lost, the body's signal aborts; when it has ended and leadership is regained, it runs again.
 */
export function leader(hf: Lessor, name: string | Key, body: Body, options: LeaderOptions = {}): Leader {
  return new LeaderCandidate(hf, name, body, options);
}

class LeaderCandidate implements Leader {
  readonly name: string;
  readonly ended: Promise<void>;
  readonly #hf: Lessor;
  readonly #key: Key;
  readonly #body: Body;
  readonly #options: LeaderOptions;
  readonly #stop = new AbortController();
  readonly #standing: Standing;
  #leading = false;

  constructor(hf: Lessor, name: string | Key, body: Body, options: LeaderOptions) {
    const context = contextOf(hf, "leader");
    if (typeof body !== "function")
      throw new UsageError("leader(hf, name, body): the body must be an async function");
    checkNames("leader", options, names);
    const { signal, onError } = options;
    checkSignal(signal);
    checkTerms(termsOf(options));
    if (onError !== undefined && typeof onError !== "function")
      throw new UsageError("leader: onError must be a function");
    this.#key = typeof name === "string" ? key("leader", name) : name;
    this.name = this.#key.name;
    this.#hf = hf;
    this.#body = body;
    this.#options = options;
    const onAbort = () => this.#stop.abort(signal?.reason);
    if (signal?.aborted) onAbort();
    signal?.addEventListener("abort", onAbort, { once: true });
    // Outside of whatever transaction this is called in, which will be over by then.
    const forget = context.started.add("leader", () => this.stop());
    this.#standing = stand(context.names([{ key: this.#key, mode: "exclusive" }])[0] ?? this.name);
    const looping = detached(context, () => this.#loop());
    this.ended = looping.finally(() => {
      forget();
      withdraw(this.#standing);
      signal?.removeEventListener("abort", onAbort);
    });
  }

  get leading(): boolean {
    return this.#leading;
  }

  async stop(): Promise<void> {
    this.#stop.abort(new UsageError(`The leader ${this.name} was stopped`));
    await this.ended;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  async #loop(): Promise<void> {
    const { signal: stop } = this.#stop;
    const pauses = new Pauses(rest.least, rest.most);
    while (!stop.aborted) {
      try {
        const lease = await this.#hf.lease(this.#key, {
          ...termsOf(this.#options),
          wait: waitMs,
          signal: stop,
        });
        const outcome = await this.#lead(lease);
        if (outcome === "resigned") return;
        pauses.reset();
        if (outcome === "failed") await this.#rest(new Pauses(rest.least, rest.most));
      } catch (error) {
        if (stop.aborted) return;
        // Somebody else leads: that is what candidates are for.
        if (error instanceof LockTimeoutError) continue;
        // The instance was closed.
        if (error instanceof UsageError) return;
        this.#report(error);
        if (error instanceof UnsupportedError) return;
        await this.#rest(pauses);
      }
    }
  }

  async #lead(lease: Lease): Promise<"resigned" | "lost" | "failed"> {
    const { fence, name } = lease;
    const both = new AbortController();
    const onLost = () => protection.leaderStops && both.abort(lease.signal.reason);
    const onStop = () => both.abort(this.#stop.signal.reason);
    // Whoever asks this signal asks the lease's, which looks at the clock.
    const signal = watched(both.signal, () => void lease.signal.aborted);
    lease.signal.addEventListener("abort", onLost, { once: true });
    this.#stop.signal.addEventListener("abort", onStop, { once: true });
    if (lease.signal.aborted) onLost();
    if (this.#stop.signal.aborted) onStop();
    this.#leading = true;
    this.#standing.fence = fence;
    emit("holdfast:leader:gained", () => ({ leader: name, fence }));
    let failed: { readonly error: unknown } | undefined;
    try {
      await this.#body({ signal, fence, lease });
    } catch (error) {
      failed = { error };
    }
    this.#leading = false;
    this.#standing.fence = undefined;
    const lost = lease.signal.aborted ? { error: lease.signal.reason as unknown } : undefined;
    this.#stop.signal.removeEventListener("abort", onStop);
    emit("holdfast:leader:lost", () => ({ leader: name, fence, ...lost }));
    // A body that throws because it was told to end has done as it was told.
    if (failed && !signal.aborted) this.#report(failed.error);
    // If it cannot be given back it runs out. Who has resigned is not to lead again for that.
    try {
      await lease[Symbol.asyncDispose]();
    } catch (error) {
      this.#report(error);
    }
    if (lost) return "lost";
    return failed && !this.#stop.signal.aborted ? "failed" : "resigned";
  }

  async #rest(pauses: Pauses): Promise<void> {
    await sleep(pauses.next(), this.#stop.signal).catch(() => {});
  }

  #report(error: unknown): void {
    const { onError } = this.#options;
    if (!onError) {
      process.emitWarning(`The leader ${this.name} failed: ${message(error)}`, "HoldfastWarning");
      return;
    }
    try {
      onError(error);
    } catch (thrown) {
      process.emitWarning(`onError of the leader ${this.name} threw: ${message(thrown)}`, "HoldfastWarning");
    }
  }
}

function termsOf({ ttl, holder }: LeaderOptions): Pick<LeaseOptions, "ttl" | "holder"> {
  return { ...(ttl !== undefined && { ttl }), ...(holder !== undefined && { holder }) };
}
