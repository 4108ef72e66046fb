/** The buckets of one quota: where the one of a subject is, and what is changed of it other than by using it. */
import type { Instances } from "../shards/shards.ts";
import type { CallOptions } from "../batch/calls.ts";
import { type QuotaBatcher, type UsePart, bucketName, quotaBatcherOf } from "./batcher.ts";
import { detailsOf, textOf } from "./checks.ts";
import { QuotaError, conflict } from "./errors.ts";
import { homesOf } from "./homes.ts";
import type { Amended, Amendment, BucketStanding, Elsewhere, UseVerdict } from "./store.ts";
import type { Terms } from "./terms.ts";
import type { EntryOptions, ReadOptions, Subject } from "./types.ts";

type DistributiveOmit<T, K extends PropertyKey> = T extends unknown ? Omit<T, K> : never;

/** What is to be changed. */
type Change = DistributiveOmit<Amendment, "definition" | "bucket" | "details">;

export class Buckets {
  readonly instances: Instances;
  readonly terms: Terms;

  constructor(instances: Instances, terms: Terms) {
    this.instances = instances;
    this.terms = terms;
  }

  /** A call about one subject, where it counts. */
  run<T extends object>(
    call: string,
    subject: string,
    options: CallOptions,
    work: (batcher: QuotaBatcher) => Promise<T | Elsewhere>,
  ): Promise<T> {
    const bucket = { quota: this.terms.name, subject };
    return homesOf(this.instances).run(call, [bucket], options, (instance) => work(quotaBatcherOf(instance)));
  }

  /** What uses something, of one subject. */
  use(part: UsePart, options: CallOptions): Promise<readonly [UseVerdict]> {
    return this.run("consume", part.subject, options, (batcher) =>
      batcher.consume([part], options),
    ) as Promise<readonly unknown[]> as Promise<readonly [UseVerdict]>;
  }

  /** As errors show it. */
  nameOf(subject: string): string {
    return bucketName(this.terms.name, subject);
  }

  async peek(subject: Subject, options: ReadOptions): Promise<BucketStanding> {
    const { terms } = this;
    const bucket = { quota: terms.name, subject: textOf(subject), limit: await terms.limitOf(subject) };
    return this.run("peek", bucket.subject, options, (batcher) =>
      batcher.alone(
        options,
        (connection, definitionOf, how) => batcher.store.peek(connection, definitionOf(terms), bucket, how),
        { names: [this.nameOf(bucket.subject)] },
      ),
    );
  }

  /** Throws if it is about something that is not there; `refused`: there is not enough left. */
  async amend(subject: Subject, options: EntryOptions, what: Change): Promise<Amended> {
    options.signal?.throwIfAborted();
    const { terms } = this;
    const text = textOf(subject);
    const bucket = { quota: terms.name, subject: text, limit: await terms.limitOf(subject) };
    const details = detailsOf(options);
    const about = {
      names: [this.nameOf(text)],
      id: what.id,
      named: options.id !== undefined || followsFrom(what),
      locks: true,
    };
    const done = await this.run(what.kind, text, options, (batcher) =>
      batcher.alone(
        options,
        (connection, definitionOf, how) =>
          batcher.store.amend(connection, { ...what, definition: definitionOf(terms), bucket, details }, how),
        about,
      ),
    );
    refuse({ quota: terms.name, subject: text, id: what.id }, what, done);
    return done;
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

function refuse(named: { quota: string; subject: string; id: string }, what: Change, done: Amended): void {
  if (done.kind === "conflict") throw conflict(named.quota, named.subject, named.id);
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
}
