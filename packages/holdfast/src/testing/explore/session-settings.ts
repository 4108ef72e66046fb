/** What sessions of actors are told before they run. */
import type { Isolation } from "../../seam/database.ts";
import type { Protocol } from "../../seam/protocol-reader.ts";

type Settable = Pick<Protocol<never>, "isolation" | "patience">;

/**
 * A session that looks for deadlocks first is the one that is ended. It looks once: if it was too early, another is ended,
 * and the run is tried again.
 */
const patience = { usual: 40, victim: 150, other: 2000 };

/** `victim`: who is to be ended by a deadlock, if anybody is. */
export function settingsOf(
  protocol: Settable,
  level: Isolation | undefined,
  victim: number | undefined,
  actor: number,
): string[] {
  const kind = victim === undefined ? "usual" : victim === actor ? "victim" : "other";
  const texts = level === undefined ? [] : [protocol.isolation(level)];
  if (protocol.patience) texts.push(protocol.patience(patience[kind]));
  return texts;
}

/** As they were before. */
export function resetOf(protocol: Settable, level: Isolation | undefined): string[] {
  const texts = level === undefined ? [] : [protocol.isolation(undefined)];
  if (protocol.patience) texts.push(protocol.patience(undefined));
  return texts;
}
