/** A process that works on a queue, and says how far it is. */
import { type Consumer, type Payload, contestants } from "./queue-contestants.ts";

export interface Order {
  readonly contestant: string;
  readonly url: string;
  /** Say how long each job waited. */
  readonly waits: boolean;
}

export interface Progress {
  readonly count: number;
  /** By the clock that all processes of the machine share, in milliseconds. */
  readonly first: number;
  readonly last: number;
}

export interface Outcome extends Progress {
  /** How long each hundred of jobs took, from the start of one to the start of the next. */
  readonly hundreds: readonly number[];
  readonly waits: readonly number[];
}

export type ToChild =
  { readonly type: "work"; readonly order: Order } | { readonly type: "stop" } | { readonly type: "exit" };
export type FromChild =
  | { readonly type: "working" }
  | { readonly type: "progress"; readonly progress: Progress }
  | { readonly type: "outcome"; readonly outcome: Outcome };

/** Monotonic, and the same for all processes of the machine. */
export const now = (): number => Number(process.hrtime.bigint()) / 1e6;

/**
 * How far the cheap clock is from the shared one. Read between two looks at the other, and the closest of many pairs is
 * taken: a process that is put aside between two looks would else be off by that long in all that it says.
 */
const apart = (() => {
  let best = { gap: Infinity, apart: 0 };
  for (let i = 0; i < 1000; i++) {
    const before = now();
    const cheap = performance.now();
    const gap = now() - before;
    if (gap < best.gap) best = { gap, apart: before + gap / 2 - cheap };
  }
  return best.apart;
})();

const hundred = 100;

async function main(): Promise<void> {
  const say = (message: FromChild) => process.send?.(message);
  let consumer: Consumer | undefined;
  let timer: NodeJS.Timeout | undefined;
  let progress = { count: 0, first: 0, last: 0 };
  let marks: number[] = [];
  let waits: number[] = [];

  const work = async ({ contestant, url, waits: asked }: Order): Promise<void> => {
    const mine = contestants.get(contestant);
    if (!mine) throw new Error(`There is no contestant ${contestant}`);
    progress = { count: 0, first: 0, last: 0 };
    marks = [];
    waits = [];
    const handler = ({ at, ms }: Payload): unknown => {
      const moment = performance.now() + apart;
      if (progress.count === 0) progress.first = moment;
      progress.last = moment;
      if (progress.count++ % hundred === 0) marks.push(moment);
      if (asked) waits.push(moment - at);
      return ms === undefined ? undefined : new Promise((resolve) => setTimeout(resolve, ms));
    };
    consumer = await mine.consume(url, handler);
    say({ type: "working" });
    let told = -1;
    timer = setInterval(() => {
      if (progress.count !== told) say({ type: "progress", progress });
      told = progress.count;
    }, 20);
  };

  const stop = async (): Promise<void> => {
    clearInterval(timer);
    await consumer?.stop();
    const hundreds = marks.slice(1).map((mark, i) => mark - (marks[i] ?? mark));
    globalThis.gc?.();
    say({ type: "outcome", outcome: { ...progress, hundreds, waits } });
  };

  process.on("message", (message: ToChild) => {
    if (message.type === "work") void work(message.order);
    else if (message.type === "stop") void stop();
    else process.exit(0);
  });
  // Some that are measured here look for their server for ever, with all that a processor has.
  process.on("disconnect", () => process.exit(1));
}

if (process.send) await main();
