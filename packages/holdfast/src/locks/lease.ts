import type { Connection, Wait } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { emit, traced } from "../events/events.ts";
import { type Lockable, canonical } from "../seam/key.ts";
import { checkRows, checkWhole, optionalText } from "../input/values.ts";
import type { KeptLease, LeaseInfo } from "../seam/leases.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import type { InstanceContext } from "../transaction/scope.ts";
import { checkWait } from "../waiting/wait.ts";
import { Notifier } from "../batch/notifier.ts";
import { Claiming, type Counter } from "./lease/claiming.ts";
import { Errands, graceMs, shown } from "./lease/errands.ts";
import { type LeaseTerms, type LeaseWish, checkTerms, requestOf, resourceOf } from "./lease/terms.ts";
import type { Lease, LeaseFilter, LeaseOptions } from "./lease/types.ts";

export { fenced } from "./lease/fenced.ts";
export { type LeaseTerms, type LeaseWish, checkTerms } from "./lease/terms.ts";
export type { Lease, LeaseFilter, LeaseOptions } from "./lease/types.ts";

const names = new Set(["ttl", "wait", "signal", "atLeastFor", "renew", "holder"]);
/** An exclusive lease takes it all, a shared one 1 of it. */
const whole = 2 ** 30;

/** Gives out the leases of one instance, and keeps them. */
export class LeaseManager<Native, C extends Connection> {
  readonly #context: InstanceContext<Native, C>;
  readonly #errands: Errands<Native, C>;
  readonly #counter: Counter<Native, C>;
  readonly #closing = new AbortController();

  constructor(context: InstanceContext<Native, C>) {
    const notifier = new Notifier(context, "leases");
    this.#context = context;
    this.#errands = new Errands(context, notifier);
    const closing = this.#closing.signal;
    this.#counter = { context, errands: this.#errands, notifier, held: new Set(), closing };
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
    const request = requestOf(wish);
    this.#context.guard?.([request]);
    await this.#errands.ready();
    this.#errands.refuseInside("Take the lease first, then begin the transaction");
    const started = performance.now();
    const lease = await traced(
      "holdfast:lock",
      () => ({ kind: "lease", locks: this.#context.names([request]) }),
      (told) => this.#errands.track(new Claiming(this.#counter, wish, terms, patience, signal).run(told)),
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

  /** Who holds, and who waits for, leases and permits: of one key, or all of them. */
  async list(of?: Lockable, options: LeaseFilter = {}): Promise<readonly LeaseInfo[]> {
    checkNames("hf.leases", options, new Set(["over", "limit", "name", "fence"]));
    const { over = false, limit, name, fence } = options;
    optionalText("hf.leases", "name", name);
    if (fence !== undefined) checkWhole("hf.leases", "fence", fence);
    if (limit !== undefined) checkRows("hf.leases", "limit", limit, 1_000_000);
    const [request] = of === undefined ? [] : canonical(of);
    if (request) this.#context.guard?.([request]);
    const errands = this.#errands;
    await errands.ready();
    const resources =
      request && (["exclusive", "permit"] as const).map((mode) => resourceOf(request.key, mode));
    const found = await errands.track(
      errands.ask(performance.now() + graceMs, (connection) =>
        errands.store().list(connection, { resources, name, fence, over, most: limit }),
      ),
    );
    return found.map(shown);
  }

  /** As its holder would: whoever waits is woken. Undefined: there is none with this fence (any more). */
  async end(fence: number): Promise<LeaseInfo | undefined> {
    checkWhole("hf.endLease", "the fence", fence);
    const errands = this.#errands;
    await errands.ready();
    let sent: KeptLease | undefined;
    return errands.track(
      errands.ask(
        performance.now() + graceMs,
        async (connection) => {
          const [found] = await errands.store().list(connection, { fence, over: true });
          // Somebody else may have been faster; or we were, and the answer was lost.
          if (!found) return sent && shown(sent);
          sent = found;
          return (await errands.store().release(connection, found, 0)) ? shown(found) : undefined;
        },
        { about: `The end of the lease with fence ${fence}`, instead: "Ask for it again." },
      ),
    );
  }

  /** Gives back every lease that is still held, and ends every wait. */
  async close(): Promise<void> {
    const { held, notifier } = this.#counter;
    this.#closing.abort(new UsageError("hf.lease: this instance of Holdfast was closed", "HF_CLOSED"));
    await Promise.allSettled([...held].map((lease) => lease.end()));
    await notifier.close();
    await this.#errands.done();
  }
}
