/** In which way a command has its keys, on this database. */
import type { Key } from "holdfast";
import { Failure } from "../failure.ts";
import { shown } from "../text.ts";
import type { Server } from "../server.ts";
import type { Wish } from "./grip.ts";

export interface WishOptions {
  readonly shared?: true;
  readonly lease?: true;
  readonly ttl?: number;
}

/** `say`: told if it is not the usual way, and why. */
export async function wishOf(
  { hf }: Server,
  keys: readonly Key[],
  options: WishOptions,
  say: (text: string) => void,
): Promise<Wish> {
  const { lease, ttl = 30_000 } = options;
  const shared = options.shared === true;
  const { sessionLocks, sharedLocks, granularity, exclusion } = await hf.capabilities();
  if (exclusion !== "held")
    throw new Failure(
      "No lock can be held while a command runs: this is a cluster with several writers, where locks exclude at COMMIT only. On two nodes the command would run twice at the same time.",
    );
  const leased = lease && { ttl, shared };
  const why = typeof sessionLocks === "object" ? shown(sessionLocks.why) : undefined;
  if (why !== undefined && granularity === "database") {
    if (!leased)
      throw new Failure(
        `No lock can be held for as long as a command runs: ${why}. With --lease it is a lease, which excludes other leases of the key (--lease, hf.lease), and not the transactions that lock it.`,
      );
    say(`a lease alone, which does not exclude transactions that lock the key: ${why}`);
    return { keys, lock: undefined, lease: leased };
  }
  if (shared && sharedLocks !== true)
    throw new Failure(`--shared: locks cannot be shared here: ${shown(sharedLocks.why)}`);
  if (why !== undefined) say(`a lock of a transaction that stays open, and not of a session: ${why}`);
  return { keys, lock: { of: why === undefined ? "session" : "transaction", shared }, lease: leased };
}

/** The same for one who only waits until it is free: several may, at the same time, where it can be shared. */
export async function passing(hf: Server["hf"], wish: Wish): Promise<Wish> {
  const { sharedLocks } = await hf.capabilities();
  const lease = wish.lease && { ...wish.lease, shared: true };
  if (!wish.lock) return { ...wish, lease: { ...wish.lease, shared: true } };
  return { ...wish, lock: { ...wish.lock, shared: sharedLocks === true }, lease };
}

/** "lock of a session; lease, fence 12" */
export function way({ lock, lease }: Wish, fences: readonly number[]): string {
  const held =
    lock && (lock.of === "session" ? "lock of a session" : "lock of a transaction that stays open");
  const leased = lease && `lease, fence ${fences.join(", ")}`;
  return [held, leased].filter((each) => each !== undefined).join("; ");
}
