/** One process of many that use up quotas at random: the same seed makes the same calls, with the same ids. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Quota, QuotaError, QuotaExceededError, quota } from "holdfast/quota";
import { Pool } from "pg";
import { random } from "../harness/random.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface QuotaArg {
  url: string;
  seed: number;
  /** Which of the processes it is: some ids are its own, some are everybody's. */
  index: number;
  calls: number;
  callers: number;
}

export interface Answer {
  subject: string;
  id: string;
  granted: boolean;
  amount: number;
  used: number;
}

export const limit = 200;
export const subjects = ["ada", "bob", "eve"];

/** A limit for good, so that nothing is forgotten and everything can be added up. */
export function quotaOf(hf: Parameters<typeof quota>[0]): Quota {
  return quota(hf, { name: "random", limit });
}

type Step = (of: Quota) => Promise<Answer | undefined>;

/** Refusals are answers; that an entry is not there, or is used up, is one too. */
async function orNothing<T>(work: Promise<T>): Promise<T | undefined> {
  try {
    return await work;
  } catch (error) {
    if (error instanceof QuotaExceededError || error instanceof QuotaError) return undefined;
    throw error;
  }
}

function plan({ seed, index, calls }: QuotaArg): Step[] {
  const next = random(seed * 31 + index);
  const pick = <T>(of: readonly T[]) => of[Math.floor(next() * of.length)] as T;
  return Array.from({ length: calls }, (_, i): Step => {
    const subject = pick(subjects);
    const own = next() < 0.5;
    const number = Math.floor(next() * 400);
    const id = own ? `${index}-${i}` : `all-${number}`;
    // The same for everybody who sends it.
    const amount = own ? 1 + Math.floor(next() * 5) : 1 + (number % 5);
    const kind = next();
    if (kind < 0.55)
      return async (of) => {
        const { granted, used } = await of.tryConsume(subject, amount, { id });
        return { subject, id, granted, amount, used };
      };
    if (kind < 0.7)
      return async (of) => {
        const target = `all-${Math.floor(number / 2)}`;
        await orNothing(of.refund(subject, target, { id: `refund-${id}`, amount: 1 }));
        return undefined;
      };
    const end = next();
    return async (of) => {
      const hold = await orNothing(
        of.hold(subject, amount, { id: `hold-${id}`, holdFor: end < 0.2 ? 20 : 60_000 }),
      );
      if (!hold) return undefined;
      if (end < 0.2) return undefined;
      if (end < 0.7) await orNothing(hold.settle(Math.max(0, amount - 1)));
      else await orNothing(hold.release());
      return undefined;
    };
  });
}

export default async function quotaRandom(arg: QuotaArg, context: WorkerContext): Promise<Answer[]> {
  const pool = new Pool({ connectionString: arg.url, max: 4 });
  // A connection that is cut while nobody uses it is the pool's to replace.
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool));
  const of = quotaOf(hf);
  const steps = plan(arg);
  const answers: Answer[] = [];
  context.send("ready");
  let done = 0;
  const caller = async (): Promise<void> => {
    for (let step = steps.shift(); step; step = steps.shift()) {
      const answer = await step(of);
      if (answer) answers.push(answer);
      if (++done === 20) context.send("busy");
    }
  };
  await Promise.all(Array.from({ length: arg.callers }, caller));
  await hf.close();
  await pool.end();
  return answers;
}
