import { HoldfastError } from "../seam/errors.ts";

export interface Exceeded {
  readonly quota: string;
  readonly subject: string;
  readonly amount: number;
  readonly used: number;
  readonly held: number;
  readonly limit: number;
  readonly remaining: number;
  /** Milliseconds until it may be granted; undefined: time alone does not help. */
  readonly retryAfter: number | undefined;
}

/** There is not enough left. Nothing was used. */
export class QuotaExceededError extends HoldfastError implements Exceeded {
  readonly quota: string;
  readonly subject: string;
  readonly amount: number;
  readonly used: number;
  readonly held: number;
  readonly limit: number;
  readonly remaining: number;
  readonly retryAfter: number | undefined;

  constructor(exceeded: Exceeded) {
    const { quota, subject, amount, used, held, limit, remaining, retryAfter } = exceeded;
    const kept = held > 0 ? ` and ${held} held` : "";
    const when =
      retryAfter === undefined
        ? "Time alone does not help: raise the limit, grant credits, or give back what is not needed."
        : `Try again in ${Math.ceil(retryAfter / 1000)} s.`;
    super(
      "HF_QUOTA_EXCEEDED",
      `Quota ${quota} of ${subject}: ${amount} more cannot be had, ${used}${kept} of ${limit} used, ${remaining} left. ${when}`,
    );
    this.quota = quota;
    this.subject = subject;
    this.amount = amount;
    this.used = used;
    this.held = held;
    this.limit = limit;
    this.remaining = remaining;
    this.retryAfter = retryAfter;
  }
}

/** The id was used for something else, or what it names is not there. */
export class QuotaError extends HoldfastError {
  readonly quota: string;
  readonly subject: string;
  readonly id: string;

  constructor(
    code: "HF_QUOTA_ID_CONFLICT" | "HF_QUOTA_UNKNOWN" | "HF_QUOTA_TOO_MUCH",
    { quota, subject, id }: { quota: string; subject: string; id: string },
    text: string,
  ) {
    super(code, `Quota ${quota} of ${subject}: ${text}`);
    this.quota = quota;
    this.subject = subject;
    this.id = id;
  }
}

export function conflict(quota: string, subject: string, id: string): QuotaError {
  return new QuotaError(
    "HF_QUOTA_ID_CONFLICT",
    { quota, subject, id },
    `the id ${id} was used before for something else. One id stands for one use: give another use another id.`,
  );
}
