/** Express, and whatever else has `(req, res, next)` with the request and response of Node. */
import type { Quota } from "../quota.ts";
import type { QuotaSet } from "../set.ts";
import { type LimitDecision, type LimitOptions, joined, limiter } from "./limit.ts";

export type { LimitOptions, Problem } from "./limit.ts";
export { type ProblemResponse, problemOf } from "./problem.ts";

/** As much of Node's `ServerResponse` as is needed. */
export interface ServerResponseLike {
  statusCode: number;
  getHeader(name: string): unknown;
  setHeader(name: string, value: string): unknown;
  end(body: string): unknown;
}

type Handler<Request> = (req: Request, res: ServerResponseLike, next: (error?: unknown) => void) => void;

/** `app.use(limit(uploads, { subject: (req) => req.user.id }))` */
export function limit<Request>(of: Quota | QuotaSet, options: LimitOptions<Request>): Handler<Request> {
  const decide = limiter("limit", of, options);
  const pass = async (...[req, res, next]: Parameters<Handler<Request>>): Promise<void> => {
    let answered: boolean;
    try {
      answered = write(res, await decide(req));
    } catch (error) {
      return next(error);
    }
    if (!answered) next();
  };
  // Express 4 does not look at promises, so none is returned.
  return (req, res, next) => void pass(req, res, next);
}

function write(res: ServerResponseLike, { limits, refusal }: LimitDecision): boolean {
  for (const [name, value] of limits) res.setHeader(name, joined(res.getHeader(name), value));
  if (!refusal) return false;
  for (const [name, value] of refusal.fields) res.setHeader(name, value);
  res.statusCode = refusal.problem.status;
  res.end(JSON.stringify(refusal.problem));
  return true;
}
