/** Hono: a middleware. What the options are asked about is its context. */
import type { Quota } from "../quota.ts";
import type { QuotaSet } from "../set.ts";
import { type LimitOptions, limiter } from "./limit.ts";

export type { LimitOptions, Problem } from "./limit.ts";
export { type ProblemResponse, problemOf } from "./problem.ts";

/** As much of Hono's `Context` as is needed. */
export interface ContextLike {
  header(name: string, value: string, options?: { append?: boolean }): void;
  body(text: string, status: 422 | 429 | 503): Response;
}

/** `app.use(limit(uploads, { subject: (c) => c.get("userId") }))` */
export function limit<Context extends ContextLike>(
  of: Quota | QuotaSet,
  options: LimitOptions<Context>,
): (c: Context, next: () => Promise<void>) => Promise<Response | void> {
  const decide = limiter("limit", of, options);
  return async (c, next) => {
    const { limits, refusal } = await decide(c);
    // Afterwards: a handler that returns a Response of its own would not take over what was set before.
    if (!refusal) await next();
    for (const [name, value] of limits) c.header(name, value, { append: true });
    if (!refusal) return undefined;
    for (const [name, value] of refusal.fields) c.header(name, value);
    return c.body(JSON.stringify(refusal.problem), refusal.problem.status);
  };
}
