/** The answer to a request that failed with an error of Holdfast's. By codes, so that no pattern is loaded for it. */
import { HoldfastError } from "../../seam/errors.ts";
import { chain } from "../../seam/failure.ts";
import { type Fields, type Problem, problemType, retryAfter, seconds, tryAgainIn } from "./limit.ts";

/** A response, whatever the framework is. */
export interface ProblemResponse {
  readonly status: Status;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Problem<Status>;
}

type Status = 404 | 409 | 422 | 429 | 503;

interface Meaning {
  readonly status: Status;
  /** For the client. Holdfast's own messages name users, locks and processes, and stay here. */
  readonly detail: string;
  /** Seconds after which a second try makes sense. */
  readonly again?: number;
  /** Fields of the error that are about what the request itself has named. */
  readonly shown?: readonly string[];
}

const busy: Meaning = {
  status: 503,
  detail: "The database could not do this now. Nothing was changed. Try again later.",
  again: tryAgainIn,
};
const reused: Meaning = {
  status: 422,
  detail: "The id of this request was used before, for a request with other content.",
};
const unknown: Meaning = { status: 404, detail: "What this request is about is not there." };
const changed: Meaning = {
  status: 409,
  detail: "What this request is about has changed. Read it again, and decide anew.",
};

const meanings: Readonly<Record<string, Meaning>> = {
  HF_STOCK_UNKNOWN_SKU: { status: 404, detail: "There is no such SKU.", shown: ["lines"] },
  HF_STOCK_INSUFFICIENT: {
    status: 409,
    detail: "There is not enough in stock. Nothing was taken.",
    shown: ["lines"],
  },
  HF_STOCK_RESERVATION_ENDED: { status: 409, detail: "The reservation has ended." },
  HF_STOCK_TOO_MUCH: { status: 409, detail: "This is more than is left to return." },
  HF_STOCK_UNKNOWN: unknown,
  HF_STOCK_ID_CONFLICT: reused,
  HF_QUOTA_EXCEEDED: {
    status: 429,
    detail: "The quota is used up.",
    shown: ["quota", "amount", "remaining", "limit"],
  },
  HF_QUOTA_TOO_MUCH: { status: 409, detail: "This is more than is left to give back, or than can be kept." },
  HF_QUOTA_UNKNOWN: unknown,
  HF_QUOTA_ID_CONFLICT: reused,
  HF_ONCE_CONFLICT: reused,
  HF_ONCE_TOO_OLD: { status: 409, detail: "This request is too old to tell whether it was done before." },
  HF_PAYLOAD: {
    status: 422,
    detail: "The content of this request does not have the form it must have.",
    shown: ["issues"],
  },
  HF_ROWS_MISSING: unknown,
  HF_STALE_VERSION: changed,
  HF_STALE_FENCE: changed,
  HF_LOCK_NOT_AVAILABLE: {
    status: 409,
    detail: "Another request is doing this right now. Nothing was changed. Try again.",
    again: 1,
  },
  HF_LOCK_TIMEOUT: {
    status: 503,
    detail: "Another request is taking too long over the same thing. Nothing was changed. Try again.",
    again: 1,
  },
  HF_FILE_BUSY: busy,
  HF_DEADLOCK: busy,
  HF_SERIALIZATION: busy,
  HF_CONNECTION_LOST: busy,
  HF_KILLED: busy,
  HF_UNAVAILABLE: busy,
  HF_NO_CONNECTION: busy,
  HF_POOL_EXHAUSTED: busy,
  HF_SERVER_FULL: busy,
  HF_DEADLINE: busy,
  HF_LEASE_LOST: busy,
  HF_LOCK_LOST: busy,
  HF_CLOSED: busy,
};

const titles: Readonly<Record<Status, string>> = {
  404: "Not Found",
  409: "Conflict",
  422: "Unprocessable Content",
  429: "Too Many Requests",
  503: "Service Unavailable",
};

/**
 * The response to a request that failed with this error, also if something else is wrapped around it: a status, fields such as
 * `Retry-After`, and problem details (RFC 9457) with the error's `code`. Undefined: it is not an error of Holdfast's, or one that the
 * request did not cause and no second try mends (a bug, a missing table). Leave it to the framework, which logs it and answers 500.
 */
export function problemOf(error: unknown): ProblemResponse | undefined {
  const own = [...chain(error)].find((each) => each instanceof HoldfastError);
  if (!own) return undefined;
  const meaning = Object.hasOwn(meanings, own.code) ? meanings[own.code] : undefined;
  if (!meaning) return undefined;
  const given = own as unknown as Readonly<Record<string, unknown>>;
  const ms = given["retryAfter"];
  const again = typeof ms === "number" ? seconds(ms) : meaning.again;
  const fields: Fields = [problemType, ...retryAfter(again)];
  return {
    status: meaning.status,
    headers: Object.fromEntries(fields),
    body: {
      type: "about:blank",
      title: titles[meaning.status],
      status: meaning.status,
      detail: meaning.detail,
      code: own.code,
      ...Object.fromEntries((meaning.shown ?? []).map((name) => [name, given[name]])),
    },
  };
}
