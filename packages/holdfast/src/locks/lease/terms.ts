/** What a lease is asked for with, and how long it can be relied on. */
import { shown } from "../../seam/shown.ts";
import { hash } from "node:crypto";
import { hostname } from "node:os";
import { UsageError } from "../../seam/errors.ts";
import type { Key, LockRequest } from "../../seam/key.ts";
import type { LeaseMode } from "../../seam/leases.ts";
import * as protection from "../../seam/protections.ts";
import { milliseconds } from "../../waiting/wait.ts";
import type { LeaseOptions } from "./types.ts";

/** How a lease is kept, once it is granted. */
export interface LeaseTerms {
  readonly ttlMs: number;
  readonly atLeastMs: number;
  readonly renew: boolean;
  readonly holder: string;
}

/** What is wanted of a key. */
export interface LeaseWish {
  readonly key: Key;
  readonly mode: LeaseMode;
  readonly weight: number;
  readonly capacity: number;
}

const longestTtl = 86_400_000;

export function checkTerms(
  options: Pick<LeaseOptions, "ttl" | "atLeastFor" | "renew" | "holder">,
): LeaseTerms {
  const { ttl = 30_000, atLeastFor = 0, renew = true, holder = `${hostname()}:${process.pid}` } = options;
  if (typeof renew !== "boolean") throw new UsageError(`renew must be true or false, not ${shown(renew)}`);
  if (typeof holder !== "string" || holder === "" || holder.includes("\0") || !holder.isWellFormed())
    throw new UsageError("holder must be a text that is not empty, without NUL characters");
  return {
    ttlMs: checkTtl(ttl),
    atLeastMs: atMostADay(atLeastFor, "atLeastFor", 0),
    renew,
    holder: holder.slice(0, 200),
  };
}

export function checkTtl(ttl: unknown): number {
  return atMostADay(ttl, "ttl", 100);
}

function atMostADay(value: unknown, what: string, least: number): number {
  const ms = milliseconds(value, what, least);
  if (ms > longestTtl)
    throw new UsageError(`${what} must be a day at the most (${longestTtl} ms), not ${ms}`);
  return ms;
}

/** A lease and a semaphore of one key are two things. Long ids are hashed: an index has no place for them. */
export function resourceOf(key: Key, mode: LeaseMode): string {
  const id = key.id.length > 100 ? `#${hash("sha256", key.id, "hex")}` : key.id;
  return `${mode === "permit" ? "permit" : "lease"} ${id}`;
}

export function requestOf({ key, mode }: Pick<LeaseWish, "key" | "mode">): LockRequest {
  return { key, mode: mode === "shared" ? "shared" : "exclusive" };
}

/** The holder stops this long before the lease runs out: for clocks that run at different speeds, and for stopping. */
function marginMs(ttlMs: number): number {
  return Math.max(ttlMs / 10, 25);
}

/** The server counts from when it gets the message, which is later than it was sent: it can only last longer. */
export function trust(sentAt: number, ttlMs: number): number {
  return sentAt + (protection.leaseTrustEnds ? ttlMs - marginMs(ttlMs) : 100 * ttlMs);
}
