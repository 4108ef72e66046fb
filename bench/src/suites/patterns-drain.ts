/** Jobs that do nothing, enqueued beforehand, until none is left. */
import type { Holdfast } from "holdfast";
import { queue } from "holdfast/queue";
import { type CountStatements, type Racer, type RacerRound, counting } from "./patterns-race.ts";

export interface JobPayload {
  readonly n: number;
}

/** One way to have jobs done. */
export interface Drain {
  readonly name: string;
  /** So many, numbered from 0; what was there before is gone. */
  fill(jobs: number): Promise<void>;
  /** Calls the handler for each of them, and resolves when all are done. */
  drain(jobs: number, handler: (n: number) => void): Promise<void>;
  /** Of jobs that are not done, as its tables have it. */
  left(): Promise<number>;
}

/** As in the suite `queue`. */
const concurrency = 24;
/** So many are enqueued with one call. */
export const perCall = 1000;
const hundred = 100;
/** Nobody waits longer than this for a drain that has stopped. */
const patienceMs = 120_000;

/** For about so long: not so few that starting counts, nor so many that filling takes for ever. */
const jobsFor = (perSecond: number, ms: number): number =>
  Math.round(Math.min(100_000, Math.max(500, (perSecond * ms) / 1000)));

async function timed(way: Drain, jobs: number, sent: CountStatements | undefined): Promise<RacerRound> {
  await way.fill(jobs);
  globalThis.gc?.();
  const times = new Uint8Array(jobs);
  const marks: number[] = [];
  let [first, last, count] = [0, 0, 0];
  // From the first job on: how long a worker takes to start is not what it drains.
  const handler = (n: number): void => {
    last = performance.now();
    first ||= last;
    times[n] = (times[n] ?? 0) + 1;
    if (count++ % hundred === 0) marks.push(last);
  };
  const round = await counting(
    () => jobs,
    sent,
    async () => {
      await inTime(way.drain(jobs, handler), `${way.name}: a drain does not end`);
      // Of each hundred, from the start of one to the start of the next.
      const latenciesMs = marks.slice(1).map((mark, i) => mark - (marks[i] ?? mark));
      return { opsPerSecond: (jobs / (last - first)) * 1000, latenciesMs };
    },
  );
  const left = await way.left();
  if (left !== 0 || times.some((each) => each !== 1))
    throw new Error(`${way.name}: ${count} of ${jobs} ran, not each of them once, or ${left} are left`);
  return round;
}

async function inTime<T>(work: Promise<T>, otherwise: string): Promise<T> {
  const late = Promise.withResolvers<never>();
  const timer = setTimeout(() => late.reject(new Error(otherwise)), patienceMs);
  try {
    return await Promise.race([work, late.promise]);
  } finally {
    clearTimeout(timer);
  }
}

/** Each round has as many jobs as the last one would have done in that time. */
export function draining(way: Drain, sent?: CountStatements): Racer {
  let perSecond: number | undefined;
  return {
    name: way.name,
    async round(ms) {
      perSecond ??= (await timed(way, 500, undefined)).opsPerSecond;
      const round = await timed(way, jobsFor(perSecond, ms), sent);
      perSecond = round.opsPerSecond;
      return round;
    },
  };
}

export function payloads(jobs: number): JobPayload[][] {
  return Array.from({ length: Math.ceil(jobs / perCall) }, (_, call) =>
    Array.from({ length: Math.min(perCall, jobs - call * perCall) }, (_unused, i) => ({
      n: call * perCall + i,
    })),
  );
}

export function holdfastDrain(hf: Holdfast<unknown>): Drain {
  const jobs = queue<JobPayload>(hf, "bench");
  return {
    name: "holdfast/queue",
    async fill(count) {
      for (const some of payloads(count)) await jobs.enqueueMany(some.map((payload) => ({ payload })));
    },
    async drain(count, handler) {
      let begun = 0;
      const all = Promise.withResolvers<void>();
      const worker = jobs.work(
        ({ payload }) => {
          handler(payload.n);
          if (++begun === count) all.resolve();
        },
        { concurrency, onTrouble: (error: unknown) => all.reject(error) },
      );
      try {
        await all.promise;
      } finally {
        // Writes down what has ended.
        await worker.stop();
      }
    },
    async left() {
      const { waiting, running, delayed, failed } = await jobs.counts();
      return waiting + running + delayed + failed;
    },
  };
}
