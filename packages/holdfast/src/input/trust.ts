/** Which of both is right, if a ledger and what is counted do not agree. */
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";

/** `levels`: what is counted, as if every change that has no entry had been meant. */
export type Trust = "ledger" | "levels";

export function checkTrust(call: string, trust: unknown = "ledger"): Trust {
  if (trust === "ledger" || trust === "levels") return trust;
  throw new UsageError(`${call}: trust must be "ledger" or "levels", not ${shown(trust)}`);
}
