/** Fastify: a hook, for all routes or for one. */
import type { Quota } from "../quota.ts";
import type { QuotaSet } from "../set.ts";
import { type LimitOptions, joined, limiter } from "./limit.ts";

export type { LimitOptions, Problem } from "./limit.ts";
export { type ProblemResponse, problemOf } from "./problem.ts";

/** As much of `FastifyReply` as is needed. */
export interface ReplyLike {
  getHeader(name: string): unknown;
  header(name: string, value: string): unknown;
  code(status: number): unknown;
  send(body: string): unknown;
}

/** `app.addHook("preHandler", limit(uploads, { subject: (request) => request.user.id }))` */
export function limit<Request>(
  of: Quota | QuotaSet,
  options: LimitOptions<Request>,
): (request: Request, reply: ReplyLike) => Promise<unknown> {
  const decide = limiter("limit", of, options);
  return async (request, reply) => {
    const { limits, refusal } = await decide(request);
    for (const [name, value] of limits) reply.header(name, joined(reply.getHeader(name), value));
    if (!refusal) return undefined;
    for (const [name, value] of refusal.fields) reply.header(name, value);
    reply.code(refusal.problem.status);
    reply.send(JSON.stringify(refusal.problem));
    // So it knows that nothing else is to come.
    return reply;
  };
}
