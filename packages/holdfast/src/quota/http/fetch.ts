/** Handlers of the Fetch API: route handlers of Next.js, Bun, Deno, workers. */
import type { Quota } from "../quota.ts";
import type { QuotaSet } from "../set.ts";
import { type LimitDecision, type LimitOptions, limiter } from "./limit.ts";

export type { LimitOptions, Problem } from "./limit.ts";
export { type ProblemResponse, problemOf } from "./problem.ts";

/** `export const POST = withLimit(uploads, { subject: userIdOf }, async (request) => Response.json(…))` */
export function withLimit<Req extends Request, Rest extends readonly unknown[]>(
  of: Quota | QuotaSet,
  options: LimitOptions<Req>,
  handler: (request: Req, ...rest: Rest) => Response | Promise<Response>,
): (request: Req, ...rest: Rest) => Promise<Response> {
  const decide = limiter("withLimit", of, options);
  return async (request, ...rest) => {
    const { limits, refusal } = await decide(request);
    return withFields(refusal ? refused(refusal) : await handler(request, ...rest), limits);
  };
}

function refused({ problem, fields }: NonNullable<LimitDecision["refusal"]>): Response {
  return new Response(JSON.stringify(problem), {
    status: problem.status,
    headers: fields.map(([name, value]): [string, string] => [name, value]),
  });
}

function withFields(response: Response, limits: LimitDecision["limits"]): Response {
  // Upgrades and network errors cannot be copied, and nobody reads fields of them.
  if (limits.length === 0 || response.status < 200) return response;
  let open = response;
  try {
    for (const [name, value] of limits) open.headers.append(name, value);
  } catch {
    // Those of redirects, and of what `fetch` returned, cannot be changed.
    open = new Response(response.body, response);
    for (const [name, value] of limits) open.headers.append(name, value);
  }
  return open;
}
