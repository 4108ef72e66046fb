/**
 * What all frameworks share: a quota is asked, and its answer is put into HTTP. The files beside only carry it over.
 * Fields and problem type are those of draft-ietf-httpapi-ratelimit-headers-11.
 */
import { UnsupportedError, UsageError, message, some } from "../../seam/errors.ts";
import { emit } from "../../events/events.ts";
import { checkNames } from "../../input/options.ts";
import { QuotaError } from "../errors.ts";
import { Quota } from "../quota.ts";
import { QuotaSet } from "../set.ts";
import type { Denied, Granted, Subject } from "../types.ts";

interface Asking<Request> {
  /**
   * Whose limit it is; of a set, one for all or one for each. There is no default: an address is nobody's name, and
   * behind a proxy it is everybody's. One that is missing is an error, not a limit that is shared by all who have none.
   */
  readonly subject: (
    request: Request,
  ) => Subject | readonly Subject[] | Promise<Subject | readonly Subject[]>;
  /** Default 1. */
  readonly amount?: Amount | ((request: Request) => Amount | Promise<Amount>);
  /**
   * The same id counts once. Only what your handler does once as well: who may choose it can otherwise do as much as
   * they like for one unit.
   */
  readonly id?: (request: Request) => string | undefined;
  /** These are not counted, and get no fields. */
  readonly skip?: (request: Request) => boolean | Promise<boolean>;
  /** Is told of each refusal. What it returns is added to the problem details, or replaces some of them. */
  readonly onDenied?: (
    denied: Denied,
    request: Request,
  ) => Readonly<Record<string, unknown>> | void | Promise<Readonly<Record<string, unknown>> | void>;
  /** Milliseconds, after which the database counts as away. Default 5,000. */
  readonly timeout?: number;
}

type Report<Request> = (error: unknown, request: Request) => void | Promise<void>;

/** What happens if the database is away. "closed" (default): 503. "open": nobody is limited, and `onError` is told. */
type Failing<Request> =
  | { readonly fail?: "closed"; readonly onError?: Report<Request> }
  | { readonly fail: "open"; readonly onError: Report<Request> };

export type LimitOptions<Request> = Asking<Request> & Failing<Request>;

type Amount = number | readonly number[];

/** RFC 9457. */
export interface Problem<Status extends number = 422 | 429 | 503> {
  readonly type: string;
  readonly title: string;
  readonly status: Status;
  readonly detail: string;
  readonly [extension: string]: unknown;
}

export type Fields = readonly (readonly [name: string, value: string])[];

/** What becomes of a request. */
export interface LimitDecision {
  /** Lists, of any response: to be added to what other limits have put there. */
  readonly limits: Fields;
  /** To be sent in place of the handler's response; undefined: the handler's turn. */
  readonly refusal: { readonly problem: Problem; readonly fields: Fields } | undefined;
}

const names = ["subject", "amount", "id", "skip", "onDenied", "timeout", "fail", "onError"];
const goOn: LimitDecision = { limits: [], refusal: undefined };

/** `more`: names of options that only this framework has. */
export function limiter<Request>(
  call: string,
  of: Quota | QuotaSet,
  options: LimitOptions<Request>,
  more: readonly string[] = [],
): (request: Request) => Promise<LimitDecision> {
  checkNames(call, options, new Set([...names, ...more]));
  checkOptions(call, of, options);
  const policies = (of instanceof QuotaSet ? of.quotas : [of]).map(policyOf);
  const failed = failing(policies, options);
  const { subject, amount = 1, id, skip, onDenied, timeout = 5000 } = options;

  return async (request) => {
    if (await skip?.(request)) return goOn;
    // Outside of what may fail open: an error of these is one of the program.
    const question: Question = {
      subject: checked(call, of, await subject(request)),
      amount: typeof amount === "function" ? await amount(request) : amount,
      // An empty header is none.
      id: id?.(request) || undefined,
      timeout,
    };
    let answer: Answer;
    try {
      answer = await ask(of, question);
    } catch (error) {
      if (error instanceof QuotaError) return conflict;
      if (error instanceof UsageError || error instanceof UnsupportedError) throw error;
      return failed(error, request);
    }
    const limits = limitFields(policies, answer);
    const { denied } = answer;
    if (!denied) return { limits, refusal: undefined };
    return { limits, refusal: exceeded(denied, await onDenied?.(denied, request)) };
  };
}

function checkOptions<Request>(call: string, of: unknown, options: LimitOptions<Request>): void {
  if (!(of instanceof Quota || of instanceof QuotaSet))
    throw new UsageError(`${call}: the first argument is a quota, or quota.all([…])`);
  const { subject, timeout = 5000, fail = "closed", onError } = options;
  if (typeof subject !== "function")
    throw new UsageError(`${call}: \`subject\` must be a function that says whose limit it is`);
  if (!Number.isSafeInteger(timeout) || timeout < 1)
    throw new UsageError(`${call}: timeout must be a whole number of milliseconds from 1`);
  if (fail !== "closed" && fail !== "open")
    throw new UsageError(`${call}: fail must be "closed" or "open", not ${JSON.stringify(fail)}`);
  if (fail === "open" && typeof onError !== "function")
    throw new UsageError(
      `${call}: \`fail: "open"\` needs \`onError\`: a limit that is off must not go unseen`,
    );
}

function checked(
  call: string,
  of: Quota | QuotaSet,
  subject: Subject | readonly Subject[],
): Subject | readonly Subject[] {
  const several = Array.isArray(subject);
  if (several && of instanceof Quota)
    throw new UsageError(`${call}: \`subject\` gave a list; several are for quota.all([…])`);
  for (const each of several ? (subject as readonly unknown[]) : [subject])
    if (each === undefined || each === null || each === "" || Number.isNaN(each))
      throw new UsageError(
        `${call}: \`subject\` came out as ${each === "" ? "empty text" : String(each)}: all who have none would share one limit`,
        "HF_BAD_KEY",
      );
  return subject;
}

// Asking.

interface Question {
  readonly subject: Subject | readonly Subject[];
  readonly amount: Amount;
  readonly id: string | undefined;
  readonly timeout: number;
}

interface Answer {
  /** One of each quota. */
  readonly all: readonly (Granted | Denied)[];
  /** The one of them that refused. */
  readonly denied: Denied | undefined;
}

async function ask(of: Quota | QuotaSet, { subject, amount, id, timeout }: Question): Promise<Answer> {
  const options = { signal: AbortSignal.timeout(timeout), ...(id !== undefined && { id }) };
  if (of instanceof Quota) {
    const answer = await of.tryConsume(subject as Subject, amount as number, options);
    return { all: [answer], denied: answer.granted ? undefined : answer };
  }
  const answer = await of.tryConsume(subject, amount, options);
  return { all: answer.all, denied: answer.granted ? undefined : answer.denied };
}

// Fields.

interface Policy {
  readonly name: string;
  /** The name as a string of structured fields. */
  readonly quoted: string;
  readonly seconds: number | undefined;
}

function policyOf({ name, terms: { windowMs } }: Quota): Policy {
  if (!/^[ -~]+$/.test(name))
    throw new UsageError(
      `quota ${name}: fields of HTTP can only hold names of printable ASCII; give it another one`,
    );
  return {
    name,
    quoted: `"${name.replaceAll(/["\\]/g, "\\$&")}"`,
    seconds: windowMs === undefined ? undefined : seconds(windowMs),
  };
}

/** Rounded up: who comes a moment early is refused again. */
export function seconds(ms: number): number {
  return Math.max(1, Math.ceil(ms / 1000));
}

/** An integer of structured fields has at most 15 digits. */
function integer(value: number): string {
  return String(Math.min(value, 999_999_999_999_999));
}

function limitFields(policies: readonly Policy[], { all, denied }: Answer): Fields {
  const policy: string[] = [];
  const limit: string[] = [];
  for (const [i, { quoted, seconds: window }] of policies.entries()) {
    const each = all[i];
    // No limit has no number.
    if (!each || each.limit === Infinity) continue;
    policy.push(`${quoted};q=${integer(each.limit)}${window === undefined ? "" : `;w=${integer(window)}`}`);
    // The answer of then says nothing about now.
    if (each.granted && each.replayed) continue;
    const t = untilMore(each, each === denied);
    limit.push(`${quoted};r=${integer(each.remaining)}${t === undefined ? "" : `;t=${integer(t)}`}`);
  }
  const fields: [string, string][] = [];
  if (policy.length > 0) fields.push(["RateLimit-Policy", policy.join(", ")]);
  if (limit.length > 0) fields.push(["RateLimit", limit.join(", ")]);
  return fields;
}

/** Of the one that refused it is what Retry-After says: the draft wants that not to be earlier. */
function untilMore(standing: Granted | Denied, refused: boolean): number | undefined {
  const { resetAt, at } = standing;
  if (refused && !standing.granted && standing.retryAfter !== undefined) return seconds(standing.retryAfter);
  return resetAt && seconds(resetAt.getTime() - at.getTime());
}

/** Other limits of the same response may have been there before. */
export function joined(before: unknown, value: string): string {
  const list = (Array.isArray(before) ? before : [before]).filter((each) => each !== undefined);
  return [...list.map(String), value].join(", ");
}

// Refusals.

export const problemType = ["Content-Type", "application/problem+json"] as const;

export function retryAfter(wait: number | undefined): Fields {
  return wait === undefined ? [] : [["Retry-After", String(wait)]];
}

/** Of the caller's own standing only: not whom it is counted for. */
function exceeded(
  { quota, amount, remaining, limit, retryAfter: ms }: Denied,
  more: Readonly<Record<string, unknown>> | void,
): LimitDecision["refusal"] {
  const wait = ms === undefined ? undefined : seconds(ms);
  const again = wait === undefined ? "" : ` Try again in ${wait} s.`;
  const problem: Problem = {
    type: "https://iana.org/assignments/http-problem-types#quota-exceeded",
    title: "Request cannot be satisfied as assigned quota has been exceeded",
    detail: `Quota ${quota}: ${amount} asked for, ${remaining} left of ${limit}.${again}`,
    "violated-policies": [quota],
    ...more,
    status: 429,
  };
  return { problem, fields: [problemType, ...retryAfter(wait)] };
}

/** Not the database's fault, so it does not fail open; the client reused an id. */
const conflict: LimitDecision = {
  limits: [],
  refusal: {
    problem: {
      type: "about:blank",
      title: "Unprocessable Content",
      status: 422,
      detail: "The id of this request was used before, for a request that counted differently.",
    },
    fields: [problemType],
  },
};

/** Nobody knows when it is back; soon enough, and not at once. */
export const tryAgainIn = 5;

const unavailable: LimitDecision = {
  limits: [],
  refusal: {
    problem: {
      type: "about:blank",
      title: "Service Unavailable",
      status: 503,
      detail: `The limit of this request cannot be checked at the moment. Try again in ${tryAgainIn} s.`,
    },
    fields: [problemType, ...retryAfter(tryAgainIn)],
  },
};

/** What to do without an answer. It is never done unseen. */
function failing<Request>(
  policies: readonly Policy[],
  { fail = "closed", onError }: LimitOptions<Request>,
): (error: unknown, request: Request) => Promise<LimitDecision> {
  const quotas = policies.map(({ name }) => name);
  let warned = false;
  return async (error, request) => {
    emit("holdfast:quota:failed", () => ({ quotas, failed: fail, error }));
    if (onError) await onError(error, request);
    else if (!warned) {
      warned = true;
      process.emitWarning(
        `quota ${some(quotas)}: requests are answered with 503, for the quota cannot be asked: ${message(error)}. Give \`onError\` to be told of each.`,
        { type: "QuotaUnavailable" },
      );
    }
    return fail === "open" ? goOn : unavailable;
  };
}
