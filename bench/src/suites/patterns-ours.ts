/** Calls of Holdfast that the engines of `patterns` have in common, and the check that all of them counted. */
import type { Holdfast } from "holdfast";
import { type Quota, quota } from "holdfast/quota";
import { type Stock, stock } from "holdfast/stock";
import type { Contestant } from "../../../packages/cli/src/bench/measure.ts";
import { limit } from "../../../packages/cli/src/bench/quota.ts";
import { apply, hot, plenty } from "../../../packages/cli/src/bench/stock.ts";

export { limit };
export const users = 10_000;
export const hotUser = 1;
export const hotSku = hot[0] as string;
export const subjectOf = (user: number) => `user-${user}`;

export const units = (hf: Holdfast<unknown>): Quota => quota(hf, { name: "units", limit });
export const shop = (hf: Holdfast<unknown>): Stock => stock(hf, { name: "bench" });

/** Each call with an id of the caller's, as a request has one. `prefix`: of this process. */
export function consuming(of: Quota, user: (turn: number) => number, prefix = "request"): Contestant {
  let calls = 0;
  return {
    name: "holdfast/quota",
    async call(turn) {
      const answer = await of.tryConsume(subjectOf(user(turn)), 1, { id: `${prefix}-${++calls}` });
      if (!answer.granted) throw new Error("a unit was refused, though there are plenty");
    },
  };
}

export function ordering(from: Stock, prefix = "order"): Contestant {
  let orders = 0;
  return { name: "holdfast/stock", call: () => apply(from, hot, `${prefix}-${++orders}`) };
}

/** The rows of a service that has run for a while are there. */
export async function acquaint(of: Quota): Promise<void> {
  const atOnce = 500;
  for (let first = 0; first < users; first += atOnce)
    await Promise.all(
      Array.from({ length: atOnce }, (_, i) => of.consume(subjectOf(first + i), 1, { id: "first" })),
    );
}

export async function stockUp(of: Stock): Promise<void> {
  await of.apply([{ sku: hotSku, quantity: plenty }]);
}

/** Figures of calls that were not counted exactly would be worth nothing. */
export async function reconciled(of: Quota, from: Stock): Promise<void> {
  const uses = await of.reconcile(subjectOf(hotUser));
  const movements = await from.reconcile();
  const findings = [...uses.findings, ...movements.findings.map(({ text }) => text)];
  if (!uses.ok || !movements.ok) throw new Error(`the books do not add up: ${findings.join("; ")}`);
}

export function exact(what: string, found: number, expected: number): void {
  if (found !== expected) throw new Error(`${what}: ${found}, and it should be ${expected}`);
}

export const fewEntries = 100;
export const manyEntries = 1_000_000;
export const shortLife = "with 100 entries";
export const longLife = "with 1,000,000 entries";

/** One caller, as what a call costs is asked for. */
export function living(hf: Holdfast<unknown>): readonly Contestant[] {
  const of = quota(hf, { name: "life", limit: 2 * limit });
  return ["short", "long"].map((subject) => ({
    name: subject === "short" ? shortLife : longLife,
    call: async () => void (await of.consume(subject)),
  }));
}
