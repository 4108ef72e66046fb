/** One process of many that move stock at random: the same seed makes the same calls, with the same ids. */
import {
  type Applied,
  InsufficientStockError,
  type Line,
  type Stock,
  StockConflictError,
  StockError,
  UnknownSkuError,
  stock,
} from "holdfast/stock";
import { random } from "../harness/random.ts";
import { openNamed } from "../harness/sites.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface StockArg {
  backend: string;
  url: string;
  seed: number;
  /** Which of the processes it is: some ids are its own, some are everybody's. */
  index: number;
  calls: number;
  callers: number;
}

export type Answer = Pick<Applied, "externalId" | "lines">;

export const skus = Array.from({ length: 20 }, (_, i) => `sku-${String(i).padStart(2, "0")}`);
export const locations = ["main", "store"];

export function shopOf(hf: Parameters<typeof stock>[0]): Stock {
  return stock(hf, { name: "random" });
}

export type Step = (shop: Stock) => Promise<Answer | undefined>;

/** Refusals are answers; that a sale is not there, or has come back already, is one too. */
async function orNothing<T>(work: Promise<T>): Promise<T | undefined> {
  try {
    return await work;
  } catch (error) {
    if (
      error instanceof InsufficientStockError ||
      error instanceof StockError ||
      error instanceof UnknownSkuError ||
      // A return of "all that is left" was another one the first time.
      error instanceof StockConflictError
    )
      return undefined;
    throw error;
  }
}

/** From 1 to 10 SKUs out of 20, in any order. */
function linesFrom(next: () => number): Line[] {
  const location = locations[Math.floor(next() * locations.length)] as string;
  const left = [...skus];
  return Array.from({ length: 1 + Math.floor(next() * 10) }, () => {
    const [sku = ""] = left.splice(Math.floor(next() * left.length), 1);
    return { sku, location, quantity: 1 + Math.floor(next() * 3) };
  });
}

export function plan({ seed, index, calls }: Pick<StockArg, "seed" | "index" | "calls">): Step[] {
  const next = random(seed * 31 + index);
  return Array.from({ length: calls }, (_, i): Step => {
    const own = next() < 0.5;
    const number = Math.floor(next() * 60);
    const id = own ? `${index}-${i}` : `all-${number}`;
    // The same for everybody who sends it.
    const lines = linesFrom(own ? next : random(seed * 1009 + number));
    const taken = lines.map((line) => ({ ...line, quantity: -line.quantity }));
    const kind = next();
    const end = next();
    if (kind < 0.4) return (shop) => orNothing(shop.apply(taken, { externalId: id, source: "ML_SALE" }));
    if (kind < 0.55)
      return (shop) => orNothing(shop.apply(lines, { externalId: `restock-${id}`, source: "MANUAL" }));
    if (kind < 0.68) {
      // More than one of these do not fit into one sale.
      const sale = Math.floor(number / 3);
      const [line] = linesFrom(random(seed * 1009 + sale)) as [Line];
      const some = { lines: [line], externalId: `return-${id}` };
      return (shop) => orNothing(shop.return(`all-${sale}`, end < 0.3 ? {} : some));
    }
    if (kind < 0.75) {
      const [from, to] = end < 0.5 ? locations : locations.toReversed();
      const { sku, quantity } = lines[0] as Line;
      return (shop) =>
        orNothing(
          shop.transfer(sku, quantity, { from: from as string, to: to as string, externalId: `move-${id}` }),
        );
    }
    if (kind < 0.8) {
      const { sku, quantity, location } = lines[0] as Line;
      return (shop) =>
        orNothing(
          shop.adjustTo(sku, quantity * 10, { location: location as string, externalId: `count-${id}` }),
        );
    }
    return async (shop) => {
      const kept = await orNothing(shop.reserve(lines, { id: `cart-${id}`, ttl: end < 0.3 ? 15 : 60_000 }));
      if (!kept || end < 0.3) return undefined;
      if (end < 0.7) return orNothing(kept.commit());
      await orNothing(kept.release());
      return undefined;
    };
  });
}

export default async function stockRandom(arg: StockArg, context: WorkerContext): Promise<Answer[]> {
  const site = await openNamed(arg.backend, arg.url);
  const shop = shopOf(site.hf);
  const steps = plan(arg);
  const answers: Answer[] = [];
  let done = 0;
  const caller = async (): Promise<void> => {
    for (let step = steps.shift(); step; step = steps.shift()) {
      const answer = await step(shop);
      if (answer) answers.push(answer);
      if (++done === 15) context.send("busy");
    }
  };
  await Promise.all(Array.from({ length: arg.callers }, caller));
  await site.close();
  return answers;
}
