/** Where calls of one instance come together, are sent as one statement, and get their own answers. */
import { Batcher } from "../batch/batcher.ts";
import { Remembered } from "../batch/remembered.ts";
import { type CallAbout, type CallOptions, type Sent, placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { UnsupportedError } from "../seam/errors.ts";
import { storeOf } from "../transaction/instance.ts";
import { type InstanceContext, contextOf } from "../transaction/scope.ts";
import type { How, Soon } from "../seam/store.ts";
import { isAway } from "./homes.ts";
import type { Bucket, Definition, Elsewhere, Late, Quotas, Use, UseVerdict } from "./store.ts";

/** One limit of one call. */
export interface UsePart {
  readonly quota: { readonly name: string; definition(now: number, until: number): Definition };
  readonly subject: string;
  readonly limit: number | undefined;
  /** As it is kept; and as the caller knows it. */
  readonly id: string;
  readonly given: string;
  readonly amount: number;
  readonly holdMs: number | undefined;
  readonly details: string | undefined;
  /** The caller gave the id: it may have been used before. */
  readonly named: boolean;
}

/** What is named to the database of a quota, as it takes now. */
export type DefinitionOf = (quota: UsePart["quota"]) => Definition;

/**
 * Which windows are named: those around now. If they were over by the time the database decided, for the way there is long or
 * somebody had the row, more are named with each attempt.
 */
class NamedWindows {
  #aheadMs = 0;
  #sentAt = performance.now();

  /** `skew`: of the database's clock. */
  at(skew: number): DefinitionOf {
    const now = Date.now() + skew;
    return (quota) => quota.definition(now, now + this.#aheadMs);
  }

  /** They were over, perhaps. */
  extend(): void {
    const tookMs = performance.now() - this.#sentAt;
    this.#aheadMs = Math.max(2 * this.#aheadMs, 4 * tookMs);
    this.#sentAt = performance.now();
  }
}

/** How often windows are named anew before the call is given up: the first answer tells the database's time. */
const mostRounds = 10;

const clocksApart = () =>
  new UnsupportedError(
    `quota: after ${mostRounds} answers the database's time was in none of the windows that the call had named. ` +
      "Its clock, or that of this machine, jumps: let both be kept by NTP",
  );

/** With more, the answers of a batch come so late that callers wait for each other. */
const most = 256;
/** While one batch is committed, the next is decided. Three were slower than two on two cores (bench `quota`). */
const inFlight = 2;
/** Of 64 callers, two batches of 32 at once were no faster than one: what each costs by itself is as much as 30 calls. */
const together = 64;
const batchers = new WeakMap<object, QuotaBatcher>();

export function quotaBatcherOf(hf: unknown): QuotaBatcher {
  const context = contextOf(hf, "quota");
  let batcher = batchers.get(context);
  if (!batcher) batchers.set(context, (batcher = new QuotaBatcher(context)));
  return batcher;
}

export class QuotaBatcher {
  readonly context: InstanceContext<unknown, Connection>;
  readonly #batcher: Batcher<readonly UsePart[], Decided>;
  readonly #known = new Remembered();
  /** The database's clock, ahead of ours. */
  #skew = 0;

  constructor(context: InstanceContext<unknown, Connection>) {
    this.context = context;
    this.#batcher = new Batcher(context, {
      call: "quota",
      inFlight,
      most,
      together,
      about: aboutOf,
      decide: (connection, calls, how) => this.#decide(connection, calls, how),
    });
  }

  get store(): Quotas<Connection> {
    return storeOf(this.context, "quotas", "quota");
  }

  /** All of these or none, of one call. */
  consume(parts: readonly UsePart[], options: CallOptions): Promise<Decided> {
    return this.#batcher.add(parts, options);
  }

  /** A statement of its own, in the caller's transaction or outside of any; again, if what was named is out of date. */
  async alone<T extends object>(
    options: CallOptions | undefined,
    work: (connection: Connection, definitionOf: DefinitionOf, how: How) => Soon<T | Late>,
    about: CallAbout & { readonly ms?: number },
  ): Promise<T> {
    const place = placeOf(this.context, options, "quota");
    return send(this.context, place, about, async (connection, how) => {
      const windows = new NamedWindows();
      for (let round = 1; round <= mostRounds; round++, windows.extend()) {
        const answer = await work(connection, windows.at(this.#skew), how);
        if (!("late" in answer)) return answer;
        this.#skew = answer.late - Date.now();
      }
      throw clocksApart();
    });
  }

  async #decide(
    connection: Connection,
    calls: readonly (readonly UsePart[])[],
    sent: Sent,
  ): Promise<readonly Decided[]> {
    const { again } = sent;
    const windows = new NamedWindows();
    let make = false;
    for (let round = 1; round <= mostRounds; round++, make = true, windows.extend()) {
      const definitions: Definition[] = [];
      const places = new Map<UsePart["quota"], number>();
      const buckets: Bucket[] = [];
      const bucketPlaces = new Map<string, number>();
      const uses: Use[] = [];
      let look = again;
      const definitionOf = windows.at(this.#skew);
      for (const [group, parts] of calls.entries()) {
        for (const part of parts) {
          const { quota, subject, limit, id, amount, holdMs, details, named } = part;
          let definition = places.get(quota);
          if (definition === undefined) {
            places.set(quota, (definition = definitions.length));
            definitions.push(definitionOf(quota));
          }
          const name = nameOf(part);
          let bucket = bucketPlaces.get(name);
          if (bucket === undefined) {
            bucketPlaces.set(name, (bucket = buckets.length));
            buckets.push({ quota: quota.name, subject, definition, limit });
            make ||= !this.#known.hasAll([name]);
          } else if (limit !== buckets[bucket]?.limit) {
            // The limit is computed: the later word counts.
            buckets[bucket] = { quota: quota.name, subject, definition, limit };
          }
          look ||= named;
          uses.push({ bucket, id, amount, group, holdMs, details });
        }
      }
      const batch = { definitions, buckets, uses, make, look };
      const answer = await this.store.consume(connection, batch, sent);
      this.#skew = answer.at - Date.now();
      if (answer.missing && answer.elsewhere) return this.#apart(connection, calls, buckets, sent);
      if (answer.missing) continue;
      this.#known.add(bucketPlaces.keys());
      let next = 0;
      return calls.map((parts) => answer.verdicts.slice(next, (next += parts.length)));
    }
    throw clocksApart();
  }

  /** Some of these count on another of several databases: those calls go there, and the others are decided here. */
  async #apart(
    connection: Connection,
    calls: readonly (readonly UsePart[])[],
    buckets: readonly Bucket[],
    sent: Sent,
  ): Promise<readonly Decided[]> {
    const found = await this.store.moves.find(connection, buckets, sent);
    const gone = new Set(
      buckets.filter((_, i) => isAway(found[i])).map(({ quota, subject }) => `${quota}\0${subject}`),
    );
    const goes = (parts: readonly UsePart[]) => parts.some((part) => gone.has(nameOf(part)));
    const rest = calls.filter((parts) => !goes(parts));
    const decided = rest.length === 0 ? [] : await this.#decide(connection, rest, sent);
    let next = 0;
    return calls.map((parts) => (goes(parts) ? { elsewhere: true } : (decided[next++] as Decided)));
  }
}

/** What one call comes to, for each of its limits. */
type Decided = readonly UseVerdict[] | Elsewhere;

/** As errors show it. */
export function bucketName(quota: string, subject: string): string {
  return `quota ${quota}:${subject}`;
}

const nameOf = ({ quota, subject }: UsePart) => `${quota.name}\0${subject}`;

function aboutOf(parts: readonly UsePart[]): CallAbout {
  const [first] = parts;
  return {
    names: parts.map(({ quota, subject }) => bucketName(quota.name, subject)),
    id: first?.given,
    named: first?.named ?? false,
    keeps: true,
  };
}
