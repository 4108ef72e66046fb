/** One process of many that use up quotas at random: the same seed makes the same calls, with the same ids. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Quota, QuotaError, QuotaExceededError, type QuotaOptions, quota } from "holdfast/quota";
import { random } from "../harness/random.ts";
import { openNamed } from "../harness/sites.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface QuotaArg {
  backend: string;
  url: string;
  seed: number;
  /** Which of the processes it is: some ids are its own, some are everybody's. */
  index: number;
  calls: number;
  callers: number;
  /** Milliseconds that its clock is wrong by. */
  clock: number;
  /** Looks first, and uses then whatever there is: must be found out. */
  naive?: boolean;
}

export interface Answer {
  quota: string;
  subject: string;
  id: string;
  granted: boolean;
  amount: number;
  used: number;
  at: number;
}

type Call = "consume" | "refund" | "hold" | "grant" | "limit" | "plan" | "reset" | "set";

/** Each kind of window, short enough to roll many times. */
export const definitions = {
  ever: { limit: 200 },
  credits: { limit: 5 },
  fixed: { limit: 20, per: 250 },
  plans: { limit: { plans: { free: 15, pro: 30 }, default: "free" }, per: 400 },
  log: { limit: 15, per: 300, window: "sliding-log" },
  parts: { limit: 15, per: 300, window: "sliding-parts", parts: 6 },
  refill: { limit: 20, per: 400, window: "refill" },
} as const satisfies Record<string, Omit<QuotaOptions, "name">>;

/** What is done with each of them, at random. */
const calls: Readonly<Record<Name, readonly Call[]>> = {
  ever: ["consume", "refund", "hold", "set"],
  credits: ["consume", "refund", "hold", "grant", "grant", "grant"],
  fixed: ["consume", "consume", "refund", "hold", "grant", "limit", "reset", "set"],
  plans: ["consume", "consume", "hold", "plan", "limit", "reset", "refund"],
  log: ["consume", "consume", "refund", "hold", "grant", "limit", "reset", "set"],
  parts: ["consume", "consume", "refund", "hold", "grant", "reset", "set"],
  refill: ["consume", "consume", "hold"],
};

export type Name = keyof typeof definitions;
export const names = Object.keys(definitions) as Name[];
export const subjects = ["ada", "bob"];
/** Those that `quota.all` asks together. */
export const together = ["ever", "fixed", "log", "parts"] as const satisfies readonly Name[];

export function quotasOf(hf: Parameters<typeof quota>[0], naive = false): Readonly<Record<Name, Quota>> {
  return Object.fromEntries(
    Object.entries(definitions).map(([name, options]) => [
      name,
      quota(hf, { ...options, name, ...(naive && { over: "record" }) }),
    ]),
  ) as Record<Name, Quota>;
}

type Step = (all: Readonly<Record<Name, Quota>>) => Promise<readonly Answer[]>;

/** Refusals are answers; that an entry is not there, or is used up, is one too. */
async function orNothing<T>(work: Promise<T>): Promise<T | undefined> {
  try {
    return await work;
  } catch (error) {
    if (error instanceof QuotaExceededError || error instanceof QuotaError) return undefined;
    throw error;
  }
}

/** What a process does: the same seed, the same calls. */
export function plan({
  seed,
  index,
  calls: count,
  naive = false,
}: Pick<QuotaArg, "seed" | "index" | "calls" | "naive">): Step[] {
  const next = random(seed * 31 + index);
  const below = (most: number) => Math.floor(next() * most);
  const pick = <T>(of: readonly T[]) => of[below(of.length)] as T;
  return Array.from({ length: count }, (_, i): Step => {
    const name = pick(names);
    const subject = pick(subjects);
    const own = next() < 0.5;
    const number = below(150);
    const id = own ? `${index}-${i}` : `all-${number}`;
    // The same for everybody who sends it.
    const amount = own ? 1 + below(5) : 1 + (number % 5);
    const call = pick(calls[name]);
    const [end, chance, pause] = [next(), next(), below(40)];
    if (call === "consume")
      return async (all) => {
        if (pause < 8) await sleep(pause * 5);
        if (naive && (await all[name].peek(subject)).remaining < amount) return [];
        const { granted, used, at } = await all[name].tryConsume(subject, amount, { id });
        // Soon after, or some time later.
        if (granted && end < 0.3 && calls[name].includes("refund")) {
          if (pause > 25) await sleep(pause);
          const back = { id: `back-${id}`, ...(chance < 0.5 && { amount: 1 }) };
          await orNothing(all[name].refund(subject, id, back));
        }
        return [{ quota: name, subject, id, granted, amount, used, at: at.getTime() }];
      };
    if (call === "set")
      return async (all) => {
        const set = quota.all(together.map((each) => all[each]));
        const answer = await set.tryConsume(subject, amount, { id: `set-${id}` });
        return answer.all.map(({ granted, used, at }, n) => ({
          quota: together[n] as Name,
          subject,
          id: `set-${id}`,
          granted,
          amount,
          used,
          at: at.getTime(),
        }));
      };
    const work = async (of: Quota): Promise<unknown> => {
      switch (call) {
        case "refund": {
          const target = `${chance < 0.7 ? "" : "settle:hold-"}all-${Math.floor(number / 2)}`;
          return orNothing(of.refund(subject, target, { id: `refund-${id}`, amount: 1 + (number % 2) }));
        }
        case "grant": {
          const until = chance < 0.6 ? Date.now() + 20 + below(300) : undefined;
          return of.grant(subject, amount + 2, {
            id: `grant-${id}`,
            priority: number % 3,
            expiresAt: until === undefined ? undefined : new Date(until),
            metadata: { priority: number % 3, until },
          });
        }
        case "limit": {
          const limit = chance < 0.3 ? undefined : 5 + (number % 20);
          const done = of.setLimit(subject, limit, { id: `limit-${id}`, metadata: { limit: limit ?? null } });
          return orNothing(done);
        }
        case "plan": {
          const to = chance < 0.3 ? undefined : chance < 0.6 ? "free" : "pro";
          return of.setPlan(subject, to, { id: `plan-${id}`, metadata: { plan: to ?? null } });
        }
        case "reset":
          return chance < 0.3 ? of.reset(subject, { id: `reset-${id}` }) : undefined;
        default: {
          const holdFor = end < 0.3 ? 1 + pause * 3 : 60_000;
          const hold = await orNothing(of.hold(subject, amount, { id: `hold-${id}`, holdFor }));
          if (!hold || end < 0.2) return undefined;
          if (pause < 20) await sleep(pause);
          if (end < 0.7) return orNothing(hold.settle(Math.max(0, amount - 2 + (number % 4))));
          return orNothing(hold.release());
        }
      }
    };
    return async (all) => {
      await work(all[name]);
      return [];
    };
  });
}

export default async function quotaRandom(arg: QuotaArg, context: WorkerContext): Promise<Answer[]> {
  const now = Date.now.bind(Date);
  Date.now = () => now() + arg.clock;
  const site = await openNamed(arg.backend, arg.url);
  const all = quotasOf(site.hf, arg.naive);
  const steps = plan(arg);
  const answers: Answer[] = [];
  context.send("ready");
  let done = 0;
  const caller = async (): Promise<void> => {
    for (let step = steps.shift(); step; step = steps.shift()) {
      answers.push(...(await step(all)));
      if (++done === 20) context.send("busy");
    }
  };
  await Promise.all(Array.from({ length: arg.callers }, caller));
  await site.close();
  return answers;
}
