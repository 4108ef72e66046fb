/** One process of many: its callers take leases or permits, and tell from when to when they had them. */
import { type Holdfast, fenced, holdfast, key, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { backendNamed } from "../backends.ts";
import { shiftClock } from "./lease-clock.ts";

export interface LeaseCallersArg {
  backend: string;
  url: string;
  callers: number;
  /** How often each caller comes. */
  times: number;
  /** How many may be inside; undefined: a lease. */
  permits?: number;
  clockMs?: number;
  /** Counts those inside, then enters: what people write who do not know better. */
  naive?: boolean;
  /** The database's clock in milliseconds, as its SQL says it. */
  clock?: string;
}

/** By the database's clock, in milliseconds: from the grant until just before the release. */
export interface Stay {
  fence: number;
  from: number;
  to: number;
}

export interface LeaseCallersResult {
  stays: Stay[];
  errors: string[];
}

/** How many were inside at once. */
export function crowdOf(results: readonly LeaseCallersResult[]): {
  most: number;
  served: number;
  errors: string[];
} {
  const stays = results.flatMap((result) => result.stays);
  // Those who leave in a millisecond leave before those who enter in it.
  const steps = stays
    .flatMap(({ from, to }) => [[from, 1] as const, [to, -1] as const])
    .toSorted(([a, step], [b, other]) => a - b || step - other);
  let inside = 0;
  let most = 0;
  for (const [, step] of steps) most = Math.max(most, (inside += step));
  const errors = results.flatMap((result) => result.errors);
  return { most, served: new Set(stays.map(({ fence }) => fence)).size, errors };
}

const postgresClock = "(extract(epoch FROM clock_timestamp()) * 1000)::float8";

export default async function leaseCallers({
  backend,
  url,
  callers,
  times,
  permits,
  clockMs,
  naive,
  clock = postgresClock,
}: LeaseCallersArg): Promise<LeaseCallersResult> {
  shiftClock(clockMs ?? 0);
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(site.database, { wait: 110_000, deadline: 120_000 });
  const semaphore = permits === undefined ? undefined : hf.semaphore(key("inside"), { permits, ttl: 10_000 });
  const now = async () => {
    const [row] = await execute(site, sql.raw(`SELECT ${clock} AS ms`));
    return Math.floor(Number(row?.ms));
  };
  const enter = async (): Promise<Stay> => {
    if (naive) return naively(hf, permits ?? 1, now);
    await using held = semaphore ? await semaphore.acquire() : await hf.lease(key("inside"), { ttl: 10_000 });
    await pause();
    held.throwIfLost();
    await hf.transaction((tx) => fenced(tx, held));
    return { fence: held.fence, from: held.since.getTime(), to: await now() };
  };
  const result: LeaseCallersResult = { stays: [], errors: [] };
  const caller = async () => {
    for (let i = 0; i < times; i++) {
      try {
        result.stays.push(await enter());
      } catch (error) {
        result.errors.push(String(error));
      }
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  await hf.close();
  await site.close();
  return result;
}

function pause(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, 5));
}

async function naively(hf: Holdfast<unknown>, permits: number, now: () => Promise<number>): Promise<Stay> {
  for (;;) {
    const entered = await hf.transaction(async (tx) => {
      const [row] = await tx.query(sql`SELECT count(*)::int AS n FROM place`);
      if (Number(row?.n) >= permits) return undefined;
      return Number((await tx.query(sql`INSERT INTO place DEFAULT VALUES RETURNING id`))[0]?.id);
    });
    await pause();
    if (entered === undefined) continue;
    const from = await now();
    await pause();
    const to = await now();
    await hf.transaction((tx) => tx.query(sql`DELETE FROM place WHERE id = ${entered}`));
    return { fence: entered, from, to };
  }
}
