/** One limit: what is used of it, kept apart, given back and granted on top. */
import { randomUUID } from "node:crypto";
import { made } from "../events/made.ts";
import type { Older } from "../input/older.ts";
import { checkNames } from "../input/options.ts";
import type { Trust } from "../input/trust.ts";
import { checkId, checkMoment, checkReference, checkSpan, checkWhole } from "../input/values.ts";
import type { Instances } from "../shards/shards.ts";
import { Buckets } from "./buckets.ts";
import {
  checkAmount,
  checkLimit,
  entryOptions,
  grantOptions,
  holdOptions,
  idFor,
  idOf,
  readOptions,
  refundOptions,
  textOf,
  unnamedOptions,
} from "./checks.ts";
import { ownId } from "./decide/own-id.ts";
import { QuotaExceededError } from "./errors.ts";
import { Ledger } from "./ledger.ts";
import type { BucketStanding } from "./store.ts";
import { Terms } from "./terms.ts";
import type {
  Denied,
  EntryOptions,
  Grant,
  GrantOptions,
  Granted,
  HistoryEntry,
  HoldOptions,
  Pruned,
  QuotaHold,
  QuotaOptions,
  QuotaStanding,
  ReadOptions,
  Reconciliation,
  Subject,
} from "./types.ts";
import { granted, useAnswer, usePart } from "./use.ts";

export class Quota {
  readonly name: string;
  readonly #terms: Terms;
  readonly #buckets: Buckets;
  readonly #ledger: Ledger;

  constructor(instances: Instances, options: QuotaOptions) {
    this.#terms = new Terms(options);
    this.name = this.#terms.name;
    this.#buckets = new Buckets(instances, this.#terms);
    this.#ledger = new Ledger(this.#buckets);
    made("quota", this.name);
  }

  /** Uses some, or throws `QuotaExceededError`. */
  async consume(subject: Subject, amount = 1, options: EntryOptions = {}): Promise<Granted> {
    return granted(await this.tryConsume(subject, amount, options));
  }

  /** Uses some, or says that there is not enough. */
  async tryConsume(subject: Subject, amount = 1, options: EntryOptions = {}): Promise<Granted | Denied> {
    checkNames("consume", options, entryOptions);
    const made = usePart(this.#terms, subject, amount, options, undefined);
    const part = made instanceof Promise ? await made : made;
    const [verdict] = await this.#buckets.use(part, options);
    return useAnswer(this.#terms, part, verdict);
  }

  /** Keeps some apart, for what is not known yet: settle it at what it came to, or release it. */
  async hold(subject: Subject, amount: number, options: HoldOptions = {}): Promise<QuotaHold> {
    checkNames("hold", options, holdOptions);
    const { holdFor = 900_000 } = options;
    checkSpan("hold", "holdFor", holdFor);
    const part = await usePart(this.#terms, subject, amount, options, holdFor);
    const [verdict] = await this.#buckets.use(part, options);
    const answer = granted(useAnswer(this.#terms, part, verdict));
    return {
      ...answer,
      settle: (actual, more) => this.settle(subject, answer.id, actual, more),
      release: (more) => this.release(subject, answer.id, more),
    };
  }

  /** Of a hold that was made elsewhere, by its id. */
  async settle(
    subject: Subject,
    hold: string,
    actual: number,
    options: Omit<EntryOptions, "id"> = {},
  ): Promise<Granted> {
    checkNames("settle", options, unnamedOptions);
    checkAmount(actual, 0);
    const of = checkId("settle", "hold", hold);
    const id = ownId("settle", of);
    const done = await this.#buckets.amend(subject, options, { kind: "settle", id, of, amount: actual });
    if (done.kind === "refused") throw this.#exceeded(subject, actual, done);
    const replayed = done.kind === "before";
    return {
      ...this.#terms.standing(done),
      granted: true,
      id: ownId("settle", hold),
      amount: actual,
      replayed,
    };
  }

  async release(subject: Subject, hold: string, options: Omit<EntryOptions, "id"> = {}): Promise<void> {
    checkNames("release", options, unnamedOptions);
    const of = checkId("release", "hold", hold);
    await this.#buckets.amend(subject, options, { kind: "release", id: ownId("release", of), of });
  }

  /** Gives back of what an entry used: all that is left of it, or some. Never more than it was. */
  async refund(
    subject: Subject,
    entry: string,
    options: EntryOptions & { readonly amount?: number } = {},
  ): Promise<QuotaStanding & { readonly id: string; readonly amount: number; readonly replayed: boolean }> {
    checkNames("refund", options, refundOptions);
    if (options.amount !== undefined) checkAmount(options.amount);
    const of = checkReference("refund", "entry", entry, ["settle:"]);
    const { amount } = options;
    const id =
      options.id !== undefined ? idOf(options.id) : amount === undefined ? ownId("refund", of) : randomUUID();
    const done = await this.#buckets.amend(subject, options, { kind: "refund", id, of, amount });
    return { ...this.#terms.standing(done), id, amount: done.amount, replayed: done.kind === "before" };
  }

  /** Credits on top of the limit, used when the limit is reached. */
  async grant(subject: Subject, amount: number, options: GrantOptions = {}): Promise<QuotaStanding> {
    checkNames("grant", options, grantOptions);
    checkAmount(amount);
    const { expiresAt, priority = 0 } = options;
    const until = expiresAt === undefined ? undefined : checkMoment("grant", "expiresAt", expiresAt);
    checkWhole("grant", "priority", priority, -1_000_000, 1_000_000);
    const id = idFor(options);
    return this.#terms.standing(
      await this.#buckets.amend(subject, options, { kind: "grant", id, amount, priority, until }),
    );
  }

  /** Takes back what is left of a grant, by its id. What was used of it stays used. */
  async revoke(
    subject: Subject,
    grant: string,
    options: Omit<EntryOptions, "id"> = {},
  ): Promise<QuotaStanding & { readonly amount: number; readonly replayed: boolean }> {
    checkNames("revoke", options, unnamedOptions);
    const of = checkId("revoke", "grant", grant);
    const done = await this.#buckets.amend(subject, options, { kind: "revoke", id: ownId("revoke", of), of });
    return { ...this.#terms.standing(done), amount: done.amount, replayed: done.kind === "before" };
  }

  /** A limit of its own for this subject, from now on; undefined: the quota's again. */
  async setLimit(
    subject: Subject,
    limit: number | undefined,
    options: EntryOptions = {},
  ): Promise<QuotaStanding> {
    checkNames("setLimit", options, entryOptions);
    if (limit !== undefined) checkLimit(limit);
    const id = idFor(options);
    return this.#terms.standing(
      await this.#buckets.amend(subject, options, { kind: "limit", id, amount: limit }),
    );
  }

  /** The plan of this subject, from now on, in mid-window too; undefined: the default one. */
  async setPlan(
    subject: Subject,
    plan: string | undefined,
    options: EntryOptions = {},
  ): Promise<QuotaStanding> {
    checkNames("setPlan", options, entryOptions);
    this.#terms.checkPlan(plan);
    const id = idFor(options);
    return this.#terms.standing(await this.#buckets.amend(subject, options, { kind: "plan", id, plan }));
  }

  /** Nothing is used any more. Holds and credits stay. */
  async reset(subject: Subject, options: EntryOptions = {}): Promise<QuotaStanding> {
    checkNames("reset", options, entryOptions);
    const id = idFor(options);
    return this.#terms.standing(await this.#buckets.amend(subject, options, { kind: "reset", id }));
  }

  /** How it stands, without using anything. */
  async peek(subject: Subject, options: ReadOptions = {}): Promise<QuotaStanding> {
    checkNames("peek", options, readOptions);
    return this.#terms.standing(await this.#buckets.peek(subject, options));
  }

  /** Credits that were granted and not revoked, in the order in which they are used. */
  grants(subject: Subject, options: ReadOptions = {}): Promise<readonly Grant[]> {
    return this.#ledger.grants(subject, options);
  }

  /** The ledger, newest first: a page, and where the next one begins. */
  history(
    subject: Subject,
    options: { readonly before?: number; readonly limit?: number } & ReadOptions = {},
  ): Promise<{ readonly entries: readonly HistoryEntry[]; readonly next: number | undefined }> {
    return this.#ledger.history(subject, options);
  }

  /**
   * Whether the ledger adds up to what is counted. With `repair`, what is counted is set to what the ledger says, in the
   * same moment, and the ledger says so too; with `trust: "levels"`, what is counted as used stays, and the ledger says
   * that. Holds and grants count either way.
   */
  reconcile(
    subject: Subject,
    options: { readonly repair?: boolean; readonly trust?: Trust } = {},
  ): Promise<Reconciliation> {
    return this.#ledger.reconcile(subject, options);
  }

  /**
   * Rolls up entries that are older: those of each subject become one, from which the chain goes on; the newest of each
   * stays. Ids that are gone are not recognised any more, and cannot be refunded: this is the horizon of replays. What a
   * sliding window still counts is kept. What time it is, the database says.
   */
  prune(options: Older & { readonly signal?: AbortSignal }): Promise<Pruned> {
    return this.#ledger.prune(options);
  }

  /** @internal */
  get terms(): Terms {
    return this.#terms;
  }

  /** @internal */
  get instances(): Instances {
    return this.#buckets.instances;
  }

  #exceeded(subject: Subject, amount: number, standing: BucketStanding): QuotaExceededError {
    return new QuotaExceededError({
      quota: this.name,
      subject: textOf(subject),
      amount,
      retryAfter: undefined,
      ...this.#terms.standing(standing),
    });
  }
}
