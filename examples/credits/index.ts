import { PrismaPg } from "@prisma/adapter-pg";
import { type Holdfast, holdfast, sql } from "holdfast";
import { fromPrisma } from "holdfast/prisma";
import { type Database, open } from "../database.ts";
import { command } from "../support.ts";
import { createApp, quotas } from "./app.ts";
import { type Completions, byPrisma, bySql } from "./completions.ts";
import { PrismaClient } from "./generated/client.ts";
import { fakeModel, tokensOf } from "./model.ts";

const maxTokens = 50;
const json = { "content-type": "application/json" };

/** What a user is told of each request: the last answer, after as many tries as it took. */
type Send = (user: string, id: string, prompt: string) => Promise<number>;

function client(url: string): {
  ask: Send;
  buy: (user: string, id: string, body: object) => Promise<number>;
  balance: (user: string) => Promise<{ credits: number; held: number }>;
} {
  const post = async (path: string, user: string, id: string, body: object) => {
    const init = { method: "POST", body: JSON.stringify(body) };
    const headers = { ...json, "x-user": user, "idempotency-key": id };
    const response = await fetch(`${url}${path}`, { ...init, headers });
    await response.text();
    return response.status;
  };
  return {
    ask: (user, id, prompt) => post("/completions", user, id, { prompt, maxTokens }),
    buy: (user, id, body) => post("/credits", user, id, body),
    balance: async (user) =>
      (await fetch(`${url}/credits`, { headers: { "x-user": user } })).json() as Promise<never>,
  };
}

/** An impatient client: it sends each request three times at once, and again if the model failed. */
async function impatient(ask: Send, user: string, id: string, prompt: string): Promise<number> {
  let answers: number[] = [];
  for (let tries = 0; tries < 3; tries++) {
    answers = await Promise.all([1, 2, 3].map(() => ask(user, id, prompt)));
    if (answers.every((status) => status === 200)) return 200;
  }
  return answers.find((status) => status !== 200) ?? 200;
}

const count = (statuses: readonly number[], status: number) =>
  statuses.filter((each) => each === status).length;

interface Kept extends AsyncDisposable {
  readonly hf: Holdfast<unknown>;
  readonly completions: Completions;
}

/** Prisma's client is generated for one kind of database: here for PostgreSQL. */
function kept(url: string, database: Database): Kept {
  if (database.kind !== "postgres")
    return { hf: database.hf, completions: bySql(database), async [Symbol.asyncDispose]() {} };
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: url }) });
  const hf = holdfast(fromPrisma(prisma));
  return {
    hf,
    completions: byPrisma(prisma),
    async [Symbol.asyncDispose]() {
      await hf.close();
      await prisma.$disconnect();
    },
  };
}

export async function main(url: string) {
  await using database = await open(url, {
    holdfast_example_completion:
      "user_id varchar(100), request_id varchar(100), prompt text NOT NULL, text text NOT NULL, tokens int NOT NULL, PRIMARY KEY (user_id, request_id)",
  });
  const { query } = database;
  await using own = kept(url, database);
  const { hf, completions } = own;
  await hf.migrate();
  const app = createApp({ hf, completions, model: fakeModel() });
  const { ask, buy, balance } = client(await app.listen({ host: "127.0.0.1", port: 0 }));
  const { credits, monthly, burst } = quotas(hf);
  // Another run may have left some.
  const run = `${Date.now()}`;
  const [ada, bob, joe, eve] = ["ada", "bob", "joe", "eve"].map((name) => `${name}-${run}`) as [
    string,
    string,
    string,
    string,
  ];
  try {
    // Enough credits, of which some expire: each request has its effect once, however often it is sent.
    const tomorrow = new Date(Date.now() + 86_400_000).toISOString();
    for (const id of ["payment-1", "payment-1"]) await buy(ada, id, { amount: 9000 });
    await buy(ada, "gift", { amount: 1000, expiresAt: tomorrow });
    const prompts = Array.from({ length: 30 }, (_, i) => {
      const words = Array.from({ length: 1 + (i % 7) }, (__, n) => `word${n}`).join(" ");
      return `${i % 5 === 3 ? "broken" : i % 5 === 1 ? "flaky" : "plain"} question ${i}: ${words}`;
    });
    const answers: number[] = [];
    // As many at a time as there are connections: each is sent three times at once.
    for (let i = 0; i < prompts.length; i += 10)
      answers.push(
        ...(await Promise.all(
          prompts.slice(i, i + 10).map((prompt, n) => impatient(ask, ada, `request-${i + n}`, prompt)),
        )),
      );
    const [row] = await query<{ n: number; tokens: number }>(sql`
      SELECT count(*) AS n, coalesce(sum(tokens), 0) AS tokens FROM holdfast_example_completion WHERE user_id = ${ada}`);
    const left = await balance(ada);

    // Credits for ten: each costs all of what is held for it.
    const long = Array.from({ length: maxTokens }, (_, i) => `word${i}`).join(" ");
    await buy(bob, "payment-2", { amount: 10 * 2 * tokensOf(long) });
    const poor = await Promise.all(Array.from({ length: 25 }, (_, i) => ask(bob, `request-${i}`, long)));

    // Seven a month, of which there are enough credits for more.
    await buy(joe, "payment-3", { amount: 10_000 });
    await monthly.setLimit(joe, 7);
    const limited = await Promise.all(Array.from({ length: 20 }, (_, i) => ask(joe, `request-${i}`, "why")));

    // Three a minute, and one more after each 20 seconds.
    await buy(eve, "payment-4", { amount: 10_000 });
    await burst.setLimit(eve, 3);
    const hasty = await Promise.all(Array.from({ length: 20 }, (_, i) => ask(eve, `request-${i}`, "why")));
    const { entries } = await burst.history(eve);
    const moments = entries.flatMap(({ kind, at }) => (kind === "consume" ? [at.getTime()] : []));
    const refilled = (Math.max(...moments) - Math.min(...moments)) / 20_000;

    const ledgers = await Promise.all(
      [ada, bob, joe, eve].flatMap((user) => [credits, monthly, burst].map((each) => each.reconcile(user))),
    );
    return {
      retries: {
        answered: count(answers, 200),
        failed: count(answers, 502),
        rows: Number(row?.n),
        unpaid: 10_000 - left.credits - Number(row?.tokens),
        held: left.held,
      },
      credits: { answered: count(poor, 200), refused: count(poor, 402), left: await balance(bob) },
      month: { answered: count(limited, 200), refused: count(limited, 429) },
      burst: {
        refused: count(hasty, 429) > 0,
        tooMany: Math.max(0, count(hasty, 200) - 3 - Math.floor(refilled)),
      },
      ledgers: ledgers.every(({ ok }) => ok) ? "add up" : ledgers,
    };
  } finally {
    await app.close();
  }
}

await command(
  import.meta.url,
  main,
  ({ retries, credits, month }) =>
    `30 requests, each sent at least three times: ${retries.answered} answered and paid once, ${retries.failed} failed and paid nothing; ` +
    `${credits.answered} of 25 had credits, ${month.answered} of 20 were within the month's limit`,
);
