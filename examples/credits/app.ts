/** Credits for an AI endpoint: what it may cost is held, what it did cost is settled. */
import fastify, { type FastifyInstance, type FastifyReply, type FastifyRequest } from "fastify";
import { type Holdfast, isUniqueViolation } from "holdfast";
import { limit } from "holdfast/fastify";
import { QuotaError, QuotaExceededError, quota } from "holdfast/quota";
import type { Completions, Stored } from "./completions.ts";
import { type Model, ModelError, tokensOf } from "./model.ts";

/** The model is given up before its hold runs out: what it cost can still be settled. */
const modelMs = 30_000;
const holdMs = 60_000;

export function quotas(hf: Holdfast<unknown>) {
  return {
    /** Nothing but what was bought: tokens. */
    credits: quota(hf, { name: "credits", limit: 0 }),
    /** Requests, whatever they cost. */
    monthly: quota(hf, {
      name: "per-month",
      limit: { plans: { free: 100, pro: 10_000 }, default: "free" },
      per: "month",
    }),
    burst: quota(hf, { name: "per-minute", limit: 60, per: "minute", window: "refill" }),
  };
}

export interface Services {
  readonly hf: Holdfast<unknown>;
  readonly completions: Completions;
  readonly model: Model;
}

interface Ask {
  prompt: string;
  maxTokens: number;
}

const askSchema = {
  type: "object",
  required: ["prompt", "maxTokens"],
  properties: {
    prompt: { type: "string", minLength: 1 },
    maxTokens: { type: "integer", minimum: 1, maximum: 4096 },
  },
} as const;

const grantSchema = {
  type: "object",
  required: ["amount"],
  properties: {
    amount: { type: "integer", minimum: 1 },
    expiresAt: { type: "string", format: "date-time" },
  },
} as const;

/** Who it is: your authentication knows better than a header. */
const userOf = (request: FastifyRequest) => request.headers["x-user"] as string;
/** The same for each try of one request. */
const requestIdOf = (request: FastifyRequest) => request.headers["idempotency-key"] as string;

const headers = {
  type: "object",
  required: ["x-user", "idempotency-key"],
  properties: {
    "x-user": { type: "string", minLength: 1 },
    "idempotency-key": { type: "string", minLength: 1, maxLength: 100 },
  },
} as const;

export function createApp({ hf, completions, model }: Services): FastifyInstance {
  const { credits, monthly, burst } = quotas(hf);
  const app = fastify();

  // A request that is tried again has the same id, and is counted once, also if the model failed.
  const preHandler = limit(quota.all([monthly, burst]), { subject: userOf, id: requestIdOf });

  app.post<{ Body: Ask }>(
    "/completions",
    { schema: { headers, body: askSchema }, preHandler },
    async (request, reply) => {
      const { prompt, maxTokens } = request.body;
      const [userId, requestId] = [userOf(request), requestIdOf(request)];
      const find = () => completions.find(userId, requestId);

      const before = await find();
      if (before) return sameAs(before, prompt, reply);

      // The most that it can cost, so that it can always be settled.
      const hold = await credits.hold(userId, tokensOf(prompt) + maxTokens, {
        holdFor: holdMs,
        reference: requestId,
      });
      try {
        const { text, tokens } = await model(prompt, { maxTokens, signal: AbortSignal.timeout(modelMs) });
        // The answer and what it cost are there together, or neither is.
        return await hf.transaction(async (tx) => {
          await completions.create(tx, { userId, requestId, prompt, text, tokens });
          await hold.settle(tokens, { tx, reference: requestId });
          return { text, tokens };
        });
      } catch (error) {
        // If this fails too, or the process dies, the hold runs out by itself.
        await hold.release().catch(() => {});
        // The same request came twice at once, and the other one was faster: it was undone, and costs nothing.
        const other = isUniqueViolation(error) ? await find() : undefined;
        if (other) return sameAs(other, prompt, reply);
        throw error;
      }
    },
  );

  app.route({
    method: "GET",
    url: "/credits",
    schema: { headers: { ...headers, required: ["x-user"] } },
    async handler(request) {
      const userId = userOf(request);
      const [{ remaining, held }, { used, limit: most, resetAt }] = await Promise.all([
        credits.peek(userId),
        monthly.peek(userId),
      ]);
      return { credits: remaining, held, month: { used, limit: most, resetAt } };
    },
  });

  // For whoever sells them; the id is that of the payment.
  app.post<{ Body: { amount: number; expiresAt?: string } }>(
    "/credits",
    { schema: { headers, body: grantSchema } },
    async (request, reply) => {
      const { amount, expiresAt } = request.body;
      const { remaining } = await credits.grant(userOf(request), amount, {
        id: requestIdOf(request),
        expiresAt: expiresAt === undefined ? undefined : new Date(expiresAt),
        source: "shop",
      });
      return reply.code(201).send({ credits: remaining });
    },
  );

  app.setErrorHandler((error, _request, reply) => {
    if (error instanceof QuotaExceededError) {
      const { amount, remaining } = error;
      return problem(reply, 402, "Not enough credits", { needed: amount, credits: remaining });
    }
    if (error instanceof QuotaError) return problem(reply, 422, "This id was used for something else");
    if (error instanceof ModelError) return problem(reply, 502, error.message);
    return reply.send(error);
  });
  return app;
}

const shown = ({ text, tokens }: Stored) => ({ text, tokens });

function sameAs(stored: Stored, prompt: string, reply: FastifyReply) {
  return stored.prompt === prompt
    ? shown(stored)
    : problem(reply, 422, "This id was used for something else");
}

/** RFC 9457. */
function problem(reply: FastifyReply, status: number, title: string, more: object = {}) {
  return reply
    .code(status)
    .type("application/problem+json")
    .send(JSON.stringify({ type: "about:blank", title, status, ...more }));
}
