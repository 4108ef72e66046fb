/** A use: what is asked of one quota, and what its answer comes to. */
import { randomUUID } from "node:crypto";
import { emit } from "../events/events.ts";
import type { UsePart } from "./batcher.ts";
import { checkAmount, detailsOf, idOf, textOf } from "./checks.ts";
import { QuotaExceededError, conflict } from "./errors.ts";
import type { Soon } from "../seam/store.ts";
import type { UseVerdict } from "./store.ts";
import type { Terms } from "./terms.ts";
import type { Denied, EntryOptions, Granted, Subject } from "./types.ts";

/** At once, unless its limit is computed. */
export function usePart(
  terms: Terms,
  subject: Subject,
  amount: number,
  options: EntryOptions,
  holdMs: number | undefined,
): Soon<UsePart> {
  checkAmount(amount);
  const given = options.id === undefined ? randomUUID() : options.id;
  const text = textOf(subject);
  const found = terms.limitOf(subject);
  const part = (limit: number | undefined): UsePart => ({
    quota: terms,
    subject: text,
    limit,
    id: options.id === undefined ? given : idOf(given),
    given,
    amount,
    holdMs,
    details: detailsOf(options),
    named: options.id !== undefined,
  });
  return found instanceof Promise ? found.then(part) : part(found);
}

export function useAnswer(terms: Terms, part: UsePart, verdict: UseVerdict): Granted | Denied {
  const standing = terms.standing(verdict);
  const { name } = terms;
  const { given: id, amount, subject } = part;
  if (verdict.kind === "conflict") throw conflict(name, subject, id);
  const refused = verdict.kind === "refused";
  // Of several, those that would have granted have no `retry`: they have neither granted nor refused.
  if (!refused || verdict.retry !== undefined)
    emit("holdfast:quota:decided", () => ({
      quota: name,
      granted: !refused,
      amount,
      replayed: verdict.kind === "before",
    }));
  if (!refused) return { ...standing, granted: true, id, amount, replayed: verdict.kind === "before" };
  return {
    ...standing,
    granted: false,
    amount,
    quota: name,
    subject,
    retryAfter: terms.retryAfter(amount, verdict),
  };
}

export function granted(answer: Granted | Denied): Granted {
  if (answer.granted) return answer;
  throw new QuotaExceededError(answer);
}
