import { requireHeld } from "../../seam/capabilities.ts";
import type { CallSite } from "../../context/call-site.ts";
import type { Locked } from "../../context/section.ts";
import type { Connection, Reason, Wait } from "../../seam/database.ts";
import { emit, traced } from "../../events/events.ts";
import type { LockRequest } from "../../seam/key.ts";
import type { Instance } from "../instance.ts";
import { checkInside, checkSupport, stillKept } from "../lock-support.ts";
import type { HeldLocks } from "./held-locks.ts";
import type { Work } from "./work.ts";

/** Locks that a transaction is to take. */
export interface Wanted {
  readonly requests: readonly LockRequest[];
  readonly wait: Wait;
  /** Where they were asked for. */
  readonly site: CallSite | undefined;
  /** The call, if its answer is whether somebody else has the lock. */
  readonly asked?: string;
}

/** They were not free. */
export interface NotFree {
  readonly reason: Reason;
  /** The transaction can go on. */
  readonly usable: boolean;
  readonly waitedMs: number;
  readonly cause?: unknown;
}

/** Takes those that the transaction does not have. */
export async function takeLocks<Native, C extends Connection>(
  context: Instance<Native, C>,
  held: HeldLocks,
  { requests, wait, site, asked }: Wanted,
  { connection, joined, signal, section }: Work<C>,
): Promise<NotFree | undefined> {
  // In a joined transaction the caller may roll back to savepoints of its own: what we took may be gone, so ask again.
  const missing = joined ? requests : requests.filter((request) => !held.has(request));
  if (missing.length === 0) return undefined;
  context.guard?.(missing);
  const capabilities = context.trusted() ?? (await context.renewed(connection));
  checkSupport(missing, capabilities, joined);
  checkInside(missing);
  if (asked !== undefined) requireHeld(capabilities, asked);
  const locked: Locked | undefined = section && { kind: "key", keys: missing };
  // Before the wait, which may be that of a deadlock. Who does not wait is in none.
  if (locked && wait !== "nowait") section?.asks(locked, site);
  const started = performance.now();
  const names = () => context.names(missing);
  const grant = await traced(
    "holdfast:lock",
    () => ({ kind: "transaction", locks: names() }),
    async (told) => {
      const grant = await context.database.engine.lock(connection, {
        locks: missing,
        wait,
        names: context.shown(missing),
        joined,
        capabilities,
        signal,
      });
      if (told) told.outcome = grant.granted ? "granted" : grant.reason;
      return grant;
    },
  );
  const waitedMs = performance.now() - started;
  if (!grant.granted) {
    emit("holdfast:lock:refused", () => ({ locks: names(), waitedMs, reason: grant.reason }));
    return { ...grant, waitedMs: Math.round(waitedMs) };
  }
  if (context.trusted() !== capabilities) await stillKept(context, connection, capabilities);
  held.add(missing);
  if (locked) section?.took(locked, site);
  emit("holdfast:lock:granted", () => ({ locks: names(), waitedMs }));
  return undefined;
}
