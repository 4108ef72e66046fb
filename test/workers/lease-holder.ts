/**
 * A process that takes a lease, tells so, and writes when it is told to go on, however late that is: with or without
 * the fence, after the lease was taken or in a transaction that is open all the while.
 */
import { type Lease, type Transaction, fenced, holdfast, key, sql } from "holdfast";
import type { ConformanceSite } from "holdfast/testing";
import { backendNamed } from "../backends.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";
import { shiftClock } from "./lease-clock.ts";

export interface LeaseHolderArg {
  backend: string;
  url: string;
  lane: number;
  ttl: number;
  /** How far the application's clock is off. */
  clockMs?: number;
  /** Writes without asking whether the lease still is its own. */
  naive?: boolean;
  /** `false`: it is not in the middle of a renewal when it is stopped, which nobody could end on a file. */
  renew?: boolean;
  /** Opens its transaction before it tells that it holds the lease; with this deadline. */
  insideMs?: number;
  /** Does nothing at all for 5 s after the statement of its first renewal, and says so before. */
  inRenewal?: boolean;
}

export interface HeldMessage {
  fence: number;
  until: Date;
}

export interface DoneMessage {
  /** What the signal said before anything else was done. */
  aborted: boolean;
  outcome: string;
}

export default async function leaseHolder(
  { backend, url, lane, ttl, clockMs, naive, renew = true, insideMs, inRenewal }: LeaseHolderArg,
  context: WorkerContext,
): Promise<void> {
  shiftClock(clockMs ?? 0);
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(inRenewal ? freezing(site.database, () => context.send("renewing")) : site.database);
  for (let round = 0; ; round++) {
    if (!(await context.receive<boolean>("round"))) break;
    const lease = await hf.lease(key("lane", lane), { ttl, wait: 60_000, renew });
    // As code does that is handed a signal and knows nothing of leases.
    const { signal } = lease;
    let aborted = false;
    const stay = async () => {
      context.send("held", { fence: lease.fence, until: lease.until } satisfies HeldMessage);
      await context.receive("go on");
      aborted = signal.aborted;
    };
    const write = async (tx: Transaction<unknown>) => {
      if (!naive) await fenced(tx, lease);
      await tx.query(
        sql`INSERT INTO effect (lane, round, who, fence) VALUES (${lane}, ${round}, ${"holder"}, ${lease.fence})`,
      );
    };
    const outcome = await attempt(async () => {
      if (insideMs === undefined) {
        await stay();
        return hf.transaction({ retry: false }, write);
      }
      return hf.transaction({ retry: false, deadline: insideMs }, async (tx) => {
        await write(tx);
        await stay();
      });
    });
    await quietly(lease);
    context.send("done", { aborted, outcome } satisfies DoneMessage);
  }
  await hf.close();
  await site.close();
}

/** The same database; after the first renewal the whole process stands still, whatever timers it has. */
function freezing(database: ConformanceSite["database"], tell: () => void): ConformanceSite["database"] {
  const { leases } = database.engine;
  if (!leases) throw new Error("There are no leases here");
  const still = new Int32Array(new SharedArrayBuffer(4));
  let first = true;
  const renew: typeof leases.renew = async (...args) => {
    const until = await leases.renew(...args);
    if (first) tell();
    if (first) Atomics.wait(still, 0, 0, 5000);
    first = false;
    return until;
  };
  return { ...database, engine: { ...database.engine, leases: { ...leases, renew } } };
}

async function attempt(body: () => Promise<void>): Promise<string> {
  try {
    await body();
    return "written";
  } catch (error) {
    return (error as Error).name;
  }
}

async function quietly(lease: Lease): Promise<void> {
  await lease.release().catch(() => {});
}
