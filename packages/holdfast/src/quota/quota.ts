/** Limits that are exact: `quota(hf, { name: "uploads", limit: 100, per: "day" })`. */
import { randomUUID } from "node:crypto";
import { callNames } from "../batch/calls.ts";
import type { Wait } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import {
  checkId,
  checkJson,
  checkMoment,
  checkReference,
  checkRows,
  checkSpan,
  checkText,
  checkWhole,
  optionalText,
  shown as shownValue,
  subjectText,
} from "../input/values.ts";
import { made } from "../events/made.ts";
import { type Older, olderThan } from "../input/older.ts";
import { checkNames } from "../input/options.ts";
import { type Instances, instancesOf } from "../shards/shards.ts";
import type { Transaction } from "../transaction/scope.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { type Trust, checkTrust } from "../input/trust.ts";
import { type QuotaBatcher, type UsePart, quotaBatcherOf } from "./batcher.ts";
import { QuotaError, QuotaExceededError } from "./errors.ts";
import type { Amended, Amendment, Definition, QuotaEntry, BucketStanding, UseVerdict } from "./store.ts";
import { type Period, type Span, spanOf, startsAround } from "../time/windows.ts";
import { checkZone } from "../time/zone.ts";

/** Whom a limit is for: text, a number, or several dimensions such as `{ org: "acme", model: "large" }`. */
export type Subject = string | number | bigint | Readonly<Record<string, string | number>>;

export interface QuotaOptions {
  /** Its buckets and entries are kept under this name. */
  readonly name: string;
  /**
   * A number; a function of the subject; or numbers by plan, and the plan of those who have none stored. A limit that
   * is stored for a subject (`setLimit`) comes before all of these.
   */
  readonly limit:
    | number
    | ((subject: Subject) => number | Promise<number>)
    | { readonly plans: Readonly<Record<string, number>>; readonly default: string };
  /** "day", "15 minutes", milliseconds. Without it what was used stays used. */
  readonly per?: Period;
  /**
   * How time gives back. "fixed" (default): all of it when the next window begins. "sliding-log": each use after
   * exactly that time; a call costs as much as there are entries in the window. "sliding-parts": the same in steps of
   * a part of the window, so up to one part later. "refill": evenly, as much as the limit in that time.
   */
  readonly window?: "fixed" | "sliding-log" | "sliding-parts" | "refill";
  /** Of "sliding-parts". Default 20. */
  readonly parts?: number;
  /** Whose days, weeks, months and years. Default UTC. */
  readonly timeZone?: string;
  /** What happens above the limit: "reject" (default), a number of units that are let through, or "record". */
  readonly over?: "reject" | "record" | number;
}

export interface EntryOptions {
  /** The same id is applied once, and answered again. Default: another one each time. */
  readonly id?: string;
  /**
   * Takes part in this transaction: rolled back with it. Others who use the same subject wait for its end. Without it:
   * in the transaction of the same instance whose body calls, if there is one.
   */
  readonly tx?: Transaction<unknown> | undefined;
  /** Inside a transaction's body: apart from it. What was used stays used also if it is rolled back. */
  readonly separate?: boolean;
  /** Milliseconds to wait while somebody's transaction has the subject. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
  /** For the ledger: who did it, where it came from, what it is about. */
  readonly by?: string;
  readonly source?: string;
  readonly reference?: string;
  readonly metadata?: Readonly<Record<string, unknown>>;
}

export interface HoldOptions extends EntryOptions {
  /** Milliseconds after which it is given back by itself. Default 15 minutes. */
  readonly holdFor?: number;
}

export interface GrantOptions extends EntryOptions {
  readonly expiresAt?: Date | undefined;
  /** Lower ones are used first; of the same, the one that expires first. Default 0. */
  readonly priority?: number;
}

export interface QuotaStanding {
  readonly used: number;
  readonly held: number;
  /** Infinity: there is none. */
  readonly limit: number;
  /** Of grants, what is not spent. */
  readonly credit: number;
  readonly remaining: number;
  /** Used above the limit. */
  readonly over: number;
  /** When the window ends. */
  readonly resetAt: Date | undefined;
  /** By the database's clock. */
  readonly at: Date;
}

export interface Granted extends QuotaStanding {
  readonly granted: true;
  readonly id: string;
  readonly amount: number;
  /** It had been granted before: this is the answer of then. */
  readonly replayed: boolean;
}

export interface Denied extends QuotaStanding {
  readonly granted: false;
  readonly amount: number;
  /** The quota that refused. */
  readonly quota: string;
  readonly subject: string;
  readonly retryAfter: number | undefined;
}

/** What was kept apart, until it is settled at what it came to, released, or over. */
export interface QuotaHold extends Granted {
  /** Uses what it came to; more than was held only if there is room. */
  settle(actual: number, options?: Omit<EntryOptions, "id">): Promise<Granted>;
  release(options?: Omit<EntryOptions, "id">): Promise<void>;
}

export interface Pruned {
  /** How many were rolled up. */
  readonly entries: number;
  /** Subjects whose ledger does not add up: it was left as it is, and `reconcile` says what is wrong with it. */
  readonly broken: readonly string[];
}

export interface HistoryEntry {
  readonly version: number;
  readonly kind:
    | "consume"
    | "hold"
    | "settle"
    | "release"
    | "expire"
    | "refund"
    | "grant"
    | "revoke"
    | "lapse"
    | "limit"
    | "plan"
    | "reset"
    | "repair"
    /** What stands for older entries that were pruned: see `first`. */
    | "rollup";
  /** The first version that it stands for: its own, if it is not a roll-up. */
  readonly first: number;
  readonly id: string;
  /** The entry, hold or grant that it is about. */
  readonly of: string | undefined;
  readonly amount: number;
  readonly refunded: number;
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  readonly limit: number | undefined;
  readonly at: Date;
  readonly by?: string;
  readonly source?: string;
  readonly reference?: string;
  readonly metadata?: Readonly<Record<string, unknown>>;
}

/** Credits on top of the limit. */
export interface Grant {
  readonly id: string;
  readonly amount: number;
  readonly spent: number;
  /** What can still be used of it. */
  readonly left: number;
  readonly priority: number;
  readonly expiresAt: Date | undefined;
  /** When it was granted; undefined: that entry was pruned. */
  readonly at: Date | undefined;
}

export interface Reconciliation {
  readonly ok: boolean;
  readonly entries: number;
  /** What does not add up, in words. */
  readonly findings: readonly string[];
  readonly repaired: boolean;
}

/** Of calls that only look. */
type ReadOptions = Pick<EntryOptions, "tx" | "separate">;
const readNames = ["tx", "separate"];

const names = new Set(["name", "limit", "per", "window", "parts", "timeZone", "over"]);
const entryNames = ["id", ...callNames, "by", "source", "reference", "metadata"];
const entryOptions = new Set(entryNames);
const holdOptions = new Set([...entryNames, "holdFor"]);
const grantOptions = new Set([...entryNames, "expiresAt", "priority"]);
const unnamedOptions = new Set(entryNames.filter((each) => each !== "id"));

/** `hf`: an instance, or `sharded(databases, …)`: a subject's calls go to the shard of `key(name, subject)`. */
export function quota<Native>(hf: Transactor<Native>, options: QuotaOptions): Quota {
  return new Quota(instancesOf(hf, "quota"), options);
}

/** Several limits at once: all of them or none. */
quota.all = (quotas: readonly Quota[]): QuotaSet => new QuotaSet(quotas);

export class Quota {
  readonly name: string;
  readonly #instances: Instances;
  readonly #options: QuotaOptions;
  readonly #span: Span | undefined;
  readonly #zone: string;
  #definition: { readonly definition: Definition; readonly until: number; readonly from: number } | undefined;

  constructor(instances: Instances, options: QuotaOptions) {
    checkNames("quota", options, names);
    const { name, limit, per, window = "fixed", parts, timeZone = "UTC", over = "reject" } = options;
    checkText("quota", "name", name, { most: 200 });
    if (typeof limit === "number") checkLimit(limit);
    else if (typeof limit === "object" && limit !== null) {
      for (const [plan, each] of Object.entries(limit.plans ?? {})) {
        checkText(`quota ${name}`, "the name of a plan", plan, { most: 200 });
        checkLimit(each);
      }
      if (typeof limit.default !== "string" || !Object.hasOwn(limit.plans ?? {}, limit.default))
        throw new UsageError(`quota ${name}: there is no plan ${shownValue(limit.default)} among \`plans\``);
    } else if (typeof limit !== "function")
      throw new UsageError(`quota ${name}: limit must be a number, a function, or numbers by plan`);
    if (!["fixed", "sliding-log", "sliding-parts", "refill"].includes(window))
      throw new UsageError(`quota ${name}: there is no window ${shownValue(window)}`);
    if (per === undefined && window !== "fixed")
      throw new UsageError(`quota ${name}: a window that slides or refills needs \`per\``);
    if (
      parts !== undefined &&
      (window !== "sliding-parts" || !Number.isSafeInteger(parts) || parts < 1 || parts > 1000)
    )
      throw new UsageError(
        `quota ${name}: parts must be a whole number from 1 to 1000, with "sliding-parts"`,
      );
    if (over !== "reject" && over !== "record" && !(Number.isSafeInteger(over) && over >= 0))
      throw new UsageError(`quota ${name}: over must be "reject", "record" or a whole number of units`);
    checkZone("quota", timeZone);
    this.name = name;
    this.#instances = instances;
    this.#options = options;
    this.#span = per === undefined ? undefined : spanOf("quota", per);
    this.#zone = timeZone;
    made("quota", name);
  }

  /** Uses some, or throws `QuotaExceededError`. */
  async consume(subject: Subject, amount = 1, options: EntryOptions = {}): Promise<Granted> {
    return granted(await this.tryConsume(subject, amount, options));
  }

  /** Uses some, or says that there is not enough. */
  async tryConsume(subject: Subject, amount = 1, options: EntryOptions = {}): Promise<Granted | Denied> {
    checkNames("consume", options, entryOptions);
    const part = await this.part(subject, amount, options, undefined);
    const [verdict] = await this.#at(part.subject).consume([part], options);
    return this.answer(part, verdict as UseVerdict);
  }

  /** Keeps some apart, for what is not known yet: settle it at what it came to, or release it. */
  async hold(subject: Subject, amount: number, options: HoldOptions = {}): Promise<QuotaHold> {
    checkNames("hold", options, holdOptions);
    const { holdFor = 900_000 } = options;
    checkSpan("hold", "holdFor", holdFor);
    const part = await this.part(subject, amount, options, holdFor);
    const [verdict] = await this.#at(part.subject).consume([part], options);
    const answer = granted(this.answer(part, verdict as UseVerdict));
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
    const id = `settle:${of}`;
    const done = await this.#amend(subject, options, { kind: "settle", id, of, amount: actual });
    if (done.kind === "refused") throw this.#exceeded(textOf(subject), actual, done, undefined);
    const replayed = done.kind === "before";
    return { ...this.#standing(done), granted: true, id: `settle:${hold}`, amount: actual, replayed };
  }

  async release(subject: Subject, hold: string, options: Omit<EntryOptions, "id"> = {}): Promise<void> {
    checkNames("release", options, unnamedOptions);
    const of = checkId("release", "hold", hold);
    await this.#amend(subject, options, { kind: "release", id: `release:${of}`, of });
  }

  /** Gives back of what an entry used: all that is left of it, or some. Never more than it was. */
  async refund(
    subject: Subject,
    entry: string,
    options: EntryOptions & { readonly amount?: number } = {},
  ): Promise<QuotaStanding & { readonly id: string; readonly amount: number; readonly replayed: boolean }> {
    checkNames("refund", options, new Set([...entryNames, "amount"]));
    if (options.amount !== undefined) checkAmount(options.amount);
    const of = checkReference("refund", "entry", entry, ["settle:"]);
    const { amount } = options;
    const id =
      options.id !== undefined ? idOf(options.id) : amount === undefined ? `refund:${of}` : randomUUID();
    const done = await this.#amend(subject, options, { kind: "refund", id, of, amount });
    return { ...this.#standing(done), id, amount: done.amount, replayed: done.kind === "before" };
  }

  /** Credits on top of the limit, used when the limit is reached. */
  async grant(subject: Subject, amount: number, options: GrantOptions = {}): Promise<QuotaStanding> {
    checkNames("grant", options, grantOptions);
    checkAmount(amount);
    const { expiresAt, priority = 0 } = options;
    const until = expiresAt === undefined ? undefined : checkMoment("grant", "expiresAt", expiresAt);
    checkWhole("grant", "priority", priority, -1_000_000, 1_000_000);
    const id = idFor(options);
    return this.#standing(
      await this.#amend(subject, options, { kind: "grant", id, amount, priority, until }),
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
    const done = await this.#amend(subject, options, { kind: "revoke", id: `revoke:${of}`, of });
    return { ...this.#standing(done), amount: done.amount, replayed: done.kind === "before" };
  }

  /** Credits that were granted and not revoked, in the order in which they are used. */
  async grants(subject: Subject, options: ReadOptions = {}): Promise<readonly Grant[]> {
    checkNames("grants", options, new Set(readNames));
    const bucket = { quota: this.name, subject: textOf(subject) };
    const batcher = this.#at(bucket.subject);
    const { grants } = await batcher.alone(
      options,
      async (connection, _, how) => ({ grants: await batcher.store.lists.grants(connection, bucket, how) }),
      { names: [this.#nameOf(bucket.subject)] },
    );
    return grants.map(({ id, amount, spent, priority, until, over, at }) => ({
      id,
      amount,
      spent,
      left: over ? 0 : amount - spent,
      priority,
      expiresAt: until === undefined ? undefined : new Date(until),
      at: at === undefined ? undefined : new Date(at),
    }));
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
    return this.#standing(await this.#amend(subject, options, { kind: "limit", id, amount: limit }));
  }

  /** The plan of this subject, from now on, in mid-window too; undefined: the default one. */
  async setPlan(
    subject: Subject,
    plan: string | undefined,
    options: EntryOptions = {},
  ): Promise<QuotaStanding> {
    checkNames("setPlan", options, entryOptions);
    const { limit } = this.#options;
    const plans = typeof limit === "object" ? limit.plans : {};
    if (plan !== undefined && (typeof plan !== "string" || !Object.hasOwn(plans, plan)))
      throw new UsageError(`quota ${this.name}: there is no plan ${shownValue(plan)}`);
    const id = idFor(options);
    return this.#standing(await this.#amend(subject, options, { kind: "plan", id, plan }));
  }

  /** Nothing is used any more. Holds and credits stay. */
  async reset(subject: Subject, options: EntryOptions = {}): Promise<QuotaStanding> {
    checkNames("reset", options, entryOptions);
    const id = idFor(options);
    return this.#standing(await this.#amend(subject, options, { kind: "reset", id }));
  }

  /** How it stands, without using anything. */
  async peek(subject: Subject, options: ReadOptions = {}): Promise<QuotaStanding> {
    checkNames("peek", options, new Set(readNames));
    const bucket = { quota: this.name, subject: textOf(subject), limit: await this.#limitOf(subject) };
    const batcher = this.#at(bucket.subject);
    const found = await batcher.alone(
      options,
      (connection, now, how) => batcher.store.peek(connection, this.definition(now), bucket, how),
      { names: [this.#nameOf(bucket.subject)] },
    );
    return this.#standing(found);
  }

  /** The ledger, newest first: a page, and where the next one begins. */
  async history(
    subject: Subject,
    options: { readonly before?: number; readonly limit?: number } & ReadOptions = {},
  ): Promise<{ readonly entries: readonly HistoryEntry[]; readonly next: number | undefined }> {
    checkNames("history", options, new Set(["before", "limit", ...readNames]));
    const { before, limit = 100 } = options;
    checkRows("history", "limit", limit, 10_000);
    if (before !== undefined) checkWhole("history", "before", before, 0);
    const entries = await this.#entries(subject, before, limit, options);
    return {
      entries: entries.map(shown),
      next: entries.length === limit ? entries.at(-1)?.version : undefined,
    };
  }

  /**
   * Whether the ledger adds up to what is counted. With `repair`, what is counted is set to what the ledger says, in the
   * same moment, and the ledger says so too; with `trust: "levels"`, what is counted as used stays, and the ledger says
   * that. Holds and grants count either way.
   */
  async reconcile(
    subject: Subject,
    options: { readonly repair?: boolean; readonly trust?: Trust } = {},
  ): Promise<Reconciliation> {
    checkNames("reconcile", options, new Set(["repair", "trust"]));
    const trust = checkTrust("reconcile", options.trust);
    if (trust === "levels" && this.#options.window?.startsWith("sliding"))
      throw new UsageError(
        `quota ${this.name}: a window that slides is what its entries say, so there is nothing but the ledger to trust`,
      );
    const bucket = { quota: this.name, subject: textOf(subject), limit: await this.#limitOf(subject) };
    const repair = options.repair ? { id: randomUUID(), trust } : undefined;
    const batcher = this.#at(bucket.subject);
    const { findings, entries, repaired } = await batcher.alone(
      undefined,
      (connection, now, how) =>
        batcher.store.upkeep.reconcile(connection, this.definition(now), bucket, repair, how),
      { names: [this.#nameOf(bucket.subject)], id: repair?.id, ms: patienceMs },
    );
    return { ok: findings.length === 0, entries, findings, repaired };
  }

  /**
   * Rolls up entries that are older: those of each subject become one, from which the chain goes on; the newest of each
   * stays. Ids that are gone are not recognised any more, and cannot be refunded: this is the horizon of replays. What a
   * sliding window still counts is kept. What time it is, the database says.
   */
  async prune(options: Older & { readonly signal?: AbortSignal }): Promise<Pruned> {
    checkNames("prune", options, new Set(["before", "olderThanMs", "signal"]));
    const { signal } = options;
    const older = olderThan("prune", options);
    const ageMs = Math.max(older.ageMs, this.#counted());
    let entries = 0;
    const broken: string[] = [];
    for (const instance of this.#instances.all) {
      const batcher = quotaBatcherOf(instance);
      let { before } = older;
      let from: string | undefined;
      do {
        signal?.throwIfAborted();
        const what = { before, ageMs, from, most: 2000 };
        const done = await batcher.alone(
          undefined,
          (connection, _, how) => batcher.store.upkeep.rollUp(connection, this.name, what, how),
          { names: [`quota ${this.name}`] },
        );
        entries += done.gone;
        broken.push(...done.broken);
        ({ before, next: from } = done);
      } while (from !== undefined);
    }
    return { entries, broken };
  }

  /** As errors show it. */
  #nameOf(subject: string): string {
    return `quota ${this.name}:${subject}`;
  }

  /** Where a subject is. */
  #at(subject: string): QuotaBatcher {
    return quotaBatcherOf(this.#instances.at(this.name, subject));
  }

  /** @internal */
  async part(
    subject: Subject,
    amount: number,
    options: EntryOptions,
    holdMs: number | undefined,
  ): Promise<UsePart> {
    checkAmount(amount);
    const { limit } = this.#options;
    const given = options.id === undefined ? randomUUID() : options.id;
    return {
      quota: this,
      subject: textOf(subject),
      limit: typeof limit === "function" ? await this.#limitOf(subject) : this.#fixedLimit(),
      id: options.id === undefined ? given : idOf(given),
      given,
      amount,
      holdMs,
      details: detailsOf(options),
      named: options.id !== undefined,
    };
  }

  /** @internal */
  answer(part: UsePart, verdict: UseVerdict): Granted | Denied {
    const standing = this.#standing(verdict);
    const { given: id, amount, subject } = part;
    if (verdict.kind === "conflict") throw conflict(this.name, subject, id);
    const refused = verdict.kind === "refused";
    // Of several, those that would have granted have no `retry`: they have neither granted nor refused.
    if (!refused || verdict.retry !== undefined)
      emit("holdfast:quota:decided", () => ({
        quota: this.name,
        granted: !refused,
        amount,
        replayed: verdict.kind === "before",
      }));
    if (!refused) return { ...standing, granted: true, id, amount, replayed: verdict.kind === "before" };
    return {
      ...standing,
      granted: false,
      amount,
      quota: this.name,
      subject,
      retryAfter: this.#retryAfter(amount, verdict),
    };
  }

  /** @internal */
  definition(now: number): Definition {
    const known = this.#definition;
    if (known && now >= known.from && now < known.until) return known.definition;
    const { window = "fixed", parts = 20, over = "reject", limit } = this.#options;
    const span = this.#span;
    const common = {
      plans: typeof limit === "object" ? limit.plans : undefined,
      over: over === "record" ? undefined : over === "reject" ? 0 : over,
    };
    const per = (span?.ms ?? 0) * 1000;
    const starts = span && window === "fixed" ? startsAround(span, this.#zone, now) : [];
    const definition: Definition = {
      ...common,
      rule: !span
        ? { window: "none" }
        : window === "fixed"
          ? { window, starts }
          : window === "sliding-parts"
            ? { window: "parts", per, parts }
            : { window: window === "refill" ? "refill" : "log", per },
    };
    this.#definition = {
      definition,
      from: starts[1] ?? -Infinity,
      until: starts[2] ?? Infinity,
    };
    return definition;
  }

  /** @internal */
  get instances(): Instances {
    return this.#instances;
  }

  /** @internal Milliseconds; of months and years on average. */
  get windowMs(): number | undefined {
    return this.#span?.ms;
  }

  async #entries(
    subject: Subject,
    before: number | undefined,
    most: number,
    options: ReadOptions,
  ): Promise<readonly QuotaEntry[]> {
    const bucket = { quota: this.name, subject: textOf(subject) };
    const batcher = this.#at(bucket.subject);
    const { entries } = await batcher.alone(
      options,
      async (connection, _, how) => ({
        entries: await batcher.store.lists.entries(connection, bucket, { below: before, most }, how),
      }),
      { names: [this.#nameOf(bucket.subject)] },
    );
    return entries;
  }

  async #amend(
    subject: Subject,
    options: EntryOptions,
    what: DistributiveOmit<Amendment, "definition" | "bucket" | "details">,
  ): Promise<Amended> {
    options.signal?.throwIfAborted();
    const text = textOf(subject);
    const bucket = { quota: this.name, subject: text, limit: await this.#limitOf(subject) };
    const details = detailsOf(options);
    const batcher = this.#at(text);
    const done = await batcher.alone(
      options,
      (connection, now, how) =>
        batcher.store.amend(connection, { ...what, definition: this.definition(now), bucket, details }, how),
      {
        names: [this.#nameOf(text)],
        id: what.id,
        named: options.id !== undefined || followsFrom(what),
        locks: true,
      },
    );
    const named = { quota: this.name, subject: text, id: what.id };
    if (done.kind === "conflict") throw conflict(this.name, text, what.id);
    if (done.kind === "unknown" && "of" in what)
      throw new QuotaError(
        "HF_QUOTA_UNKNOWN",
        named,
        what.kind === "refund"
          ? `there is no entry ${what.of} that used something.`
          : what.kind === "revoke"
            ? `there is no grant ${what.of}: it was revoked, or it ran out.`
            : `there is no hold ${what.of}: it was settled or released, or it ran out.`,
      );
    if (done.kind === "too much")
      throw new QuotaError(
        "HF_QUOTA_TOO_MUCH",
        named,
        what.kind === "grant"
          ? `credits of a subject come to ${Number.MAX_SAFE_INTEGER} at the most: ${done.amount} more can be granted.`
          : `of that entry only ${done.amount} can still be given back.`,
      );
    return done;
  }

  /** For how many milliseconds a window that slides counts an entry: one in parts up to a part longer. */
  #counted(): number {
    const { window = "fixed", parts = 20 } = this.#options;
    if (!this.#span || window === "fixed") return 0;
    return this.#span.ms * (window === "sliding-parts" ? 1 + 1 / parts : 1);
  }

  #fixedLimit(): number | undefined {
    const { limit } = this.#options;
    const found = typeof limit === "object" ? limit.plans[limit.default] : (limit as number);
    return found === Infinity ? undefined : found;
  }

  async #limitOf(subject: Subject): Promise<number | undefined> {
    const { limit } = this.#options;
    if (typeof limit !== "function") return this.#fixedLimit();
    const found = await limit(subject);
    checkLimit(found);
    return found === Infinity ? undefined : found;
  }

  #standing({ used, held, credit, limit = Infinity, at }: BucketStanding): QuotaStanding {
    return {
      used,
      held,
      limit,
      credit,
      remaining: Math.max(0, limit - used - held + credit),
      over: Math.max(0, used - limit),
      resetAt: this.#reset(at),
      at: new Date(at),
    };
  }

  #reset(at: number): Date | undefined {
    const { rule } = this.definition(at);
    const next = rule.window === "fixed" ? rule.starts.find((start) => start > at) : undefined;
    return next === undefined ? undefined : new Date(next);
  }

  #retryAfter(amount: number, { retry, limit = Infinity, credit, at }: UseVerdict): number | undefined {
    const { over = "reject" } = this.#options;
    const most = limit + (over === "reject" ? 0 : over === "record" ? Infinity : over) + credit;
    if (amount > most || retry === undefined || retry === "never") return undefined;
    if (retry === "window") {
      const reset = this.#reset(at);
      return reset ? Math.max(0, reset.getTime() - at) : undefined;
    }
    return Math.max(0, retry / 1000);
  }

  #exceeded(
    subject: string,
    amount: number,
    standing: BucketStanding,
    retryAfter: number | undefined,
  ): QuotaExceededError {
    return new QuotaExceededError({
      quota: this.name,
      subject,
      amount,
      retryAfter,
      ...this.#standing(standing),
    });
  }
}

/** Its id follows from what it is about: whoever calls again, has the same one. */
function followsFrom({
  kind,
  amount,
}: {
  readonly kind: Amendment["kind"];
  readonly amount?: number | undefined;
}) {
  return (
    kind === "settle" ||
    kind === "release" ||
    kind === "revoke" ||
    (kind === "refund" && amount === undefined)
  );
}

type DistributiveOmit<T, K extends PropertyKey> = T extends unknown ? Omit<T, K> : never;

/** Several limits that one call must fit into. */
export class QuotaSet {
  readonly #quotas: readonly Quota[];

  constructor(quotas: readonly Quota[]) {
    if (!Array.isArray(quotas) || quotas.length === 0 || !quotas.every((each) => each instanceof Quota))
      throw new UsageError("quota.all([…]): a list of quotas");
    const [first] = quotas;
    if (quotas.some(({ instances }) => instances !== first?.instances))
      throw new UsageError("quota.all([…]): all of them on the same instance of Holdfast");
    this.#quotas = quotas;
  }

  /** @internal */
  get quotas(): readonly Quota[] {
    return this.#quotas;
  }

  /** Uses of all of them, or throws the `QuotaExceededError` of the one that refused. */
  async consume(
    subjects: Subject | readonly Subject[],
    amount: number | readonly number[] = 1,
    options: EntryOptions = {},
  ): Promise<readonly Granted[]> {
    const answer = await this.tryConsume(subjects, amount, options);
    if (answer.granted) return answer.all;
    throw new QuotaExceededError(answer.denied);
  }

  /** `subjects`: one for all, or one for each. If not granted, `denied` is the one of `all` that refused. */
  async tryConsume(
    subjects: Subject | readonly Subject[],
    amount: number | readonly number[] = 1,
    options: EntryOptions = {},
  ): Promise<
    | { readonly granted: true; readonly all: readonly Granted[] }
    | { readonly granted: false; readonly denied: Denied; readonly all: readonly Denied[] }
  > {
    checkNames("consume", options, entryOptions);
    const each = <T>(value: T | readonly T[], i: number): T => (Array.isArray(value) ? value[i] : value) as T;
    for (const value of [subjects, amount])
      if (Array.isArray(value) && value.length !== this.#quotas.length)
        throw new UsageError(`quota.all: ${value.length} values for ${this.#quotas.length} quotas`);
    const id = options.id === undefined ? randomUUID() : options.id;
    const parts = await Promise.all(
      this.#quotas.map((one, i) =>
        one.part(each<Subject>(subjects, i), each<number>(amount, i), { ...options, id }, undefined),
      ),
    );
    if (new Set(parts.map(({ quota: { name }, subject }) => `${name}\0${subject}`)).size < parts.length)
      throw new UsageError("quota.all: two of these are the same quota of the same subject");
    const named = parts.map((part) => ({ ...part, named: options.id !== undefined }));
    const [{ instances }] = this.#quotas as [Quota];
    const place = instances.together(
      "quota.all",
      named.map(({ quota: { name }, subject }) => [name, subject]),
    );
    const verdicts = await quotaBatcherOf(place).consume(named, options);
    const answers = this.#quotas.map((one, i) => one.answer(named[i] as UsePart, verdicts[i] as UseVerdict));
    const refused = verdicts.findIndex(({ kind, retry }) => kind === "refused" && retry !== undefined);
    const denied = answers[refused];
    if (denied && !denied.granted) return { granted: false, denied, all: answers as Denied[] };
    return { granted: true, all: answers as Granted[] };
  }
}

function granted(answer: Granted | Denied): Granted {
  if (answer.granted) return answer;
  throw new QuotaExceededError(answer);
}

function conflict(quotaName: string, subject: string, id: string): QuotaError {
  return new QuotaError(
    "HF_QUOTA_ID_CONFLICT",
    { quota: quotaName, subject, id },
    `the id ${id} was used before for something else. One id stands for one use: give another use another id.`,
  );
}

function checkAmount(amount: number, least = 1): void {
  checkWhole("quota", "an amount", amount, least);
}

function checkLimit(limit: number): void {
  if (limit !== Infinity && (!Number.isSafeInteger(limit) || limit < 0))
    throw new UsageError(`quota: a limit must be a whole number from 0, or Infinity, not ${String(limit)}`);
}

/** Of `reconcile`, which reads a whole ledger: a million entries in a second or two. */
const patienceMs = 120_000;

/** Ids that follow from others. */
const ownPrefixes = ["settle:", "release:", "refund:", "revoke:", "rollup:"];

export function textOf(subject: Subject): string {
  return subjectText("quota", subject);
}

function idOf(id: string): string {
  return checkId("quota", "id", id, ownPrefixes);
}

/** The caller's, or one of its own. */
function idFor({ id }: Pick<EntryOptions, "id">): string {
  return id === undefined ? randomUUID() : idOf(id);
}

function detailsOf({ by, source, reference, metadata }: EntryOptions): string | undefined {
  if (by === undefined && source === undefined && reference === undefined && metadata === undefined)
    return undefined;
  for (const [name, value] of Object.entries({ by, source, reference })) optionalText("quota", name, value);
  return checkJson("quota", "metadata", { by, source, reference, metadata });
}

function shown(entry: QuotaEntry): HistoryEntry {
  const { delta: _, forgotten: __, details, at, kind, ...rest } = entry;
  return { ...rest, kind: kind as HistoryEntry["kind"], at: new Date(at), ...(details as object) };
}
