/** NestJS: a guard, since those run after the ones that know who the user is. */
import { UsageError } from "../../seam/errors.ts";
import type { Quota } from "../quota.ts";
import type { QuotaSet } from "../set.ts";
import { type LimitOptions, type Problem, joined, limiter } from "./limit.ts";

export type { LimitOptions, Problem } from "./limit.ts";
export { type ProblemResponse, problemOf } from "./problem.ts";

/** As much of `ExecutionContext` as is needed. */
export interface ExecutionContextLike {
  getType(): string;
  switchToHttp(): { getRequest(): unknown; getResponse(): unknown };
}

/** Both of Express and of Fastify. */
interface HttpResponse {
  getHeader(name: string): unknown;
  header(name: string, value: string): unknown;
}

export type GuardOptions<Request> = LimitOptions<Request> & {
  /**
   * That of `@nestjs/common`. Nest knows a refusal by this class, and this library imports no framework: not knowing
   * it, Nest would take a refusal for a bug, and log it as one.
   */
  readonly HttpException: new (problem: Record<string, unknown>, status: number) => Error;
};

/** `@UseGuards(quotaGuard(uploads, { HttpException, subject: (req: Request) => req.user.id }))` */
export function quotaGuard<Request>(
  of: Quota | QuotaSet,
  options: GuardOptions<Request>,
): { canActivate(context: ExecutionContextLike): Promise<boolean> } {
  const decide = limiter("quotaGuard", of, options, ["HttpException"]);
  const { HttpException } = options;
  if (typeof HttpException !== "function")
    throw new UsageError("quotaGuard: `HttpException` is that of @nestjs/common");
  return {
    async canActivate(context) {
      const type = context.getType();
      if (type !== "http")
        throw new UsageError(`quotaGuard: it is for requests of HTTP, not for ${JSON.stringify(type)}`);
      const http = context.switchToHttp();
      const { limits, refusal } = await decide(http.getRequest() as Request);
      const response = http.getResponse() as HttpResponse;
      for (const [name, value] of limits) response.header(name, joined(response.getHeader(name), value));
      if (!refusal) return true;
      for (const [name, value] of refusal.fields) response.header(name, value);
      const problem: Problem = refusal.problem;
      throw new HttpException({ ...problem }, problem.status);
    },
  };
}
