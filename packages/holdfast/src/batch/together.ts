/** Several calls, sent as one statement: what is in the way of one of them is not to be in the way of the others. */
import { type CallAbout, type Sent, Unanswered, attempts, explain } from "./calls.ts";
import type { Connection } from "../seam/database.ts";
import { HoldfastError, UsageError } from "../seam/errors.ts";
import { troubles } from "../transaction/present.ts";
import type { InstanceContext } from "../transaction/scope.ts";
import { Failed, type CoalesceTerms, Undone } from "./coalesce.ts";

/** What a batch needs to know of its calls. */
export interface Together<Item, Answer> {
  about(item: Item): CallAbout;
  /** What was applied cannot be found again: nothing is sent a second time that may have been. */
  readonly once?: boolean;
  decide(connection: Connection, items: readonly Item[], how: Sent): Promise<readonly Answer[]>;
}

/**
 * Several calls at once. What the server refuses may be the fault of one of them, and what is lost again and again too: they
 * are sent in halves then, one after the other. Throws `Undone` if nothing of any of them was done for now.
 */
export async function sendTogether<Item, Answer>(
  context: InstanceContext<unknown, Connection>,
  together: Together<Item, Answer>,
  items: readonly Item[],
  terms: CoalesceTerms,
): Promise<(Answer | Failed)[]> {
  return halves(context, together, items, terms, { first: true, perhaps: false });
}

async function halves<Item, Answer>(
  context: InstanceContext<unknown, Connection>,
  together: Together<Item, Answer>,
  items: readonly Item[],
  terms: CoalesceTerms,
  { first, perhaps }: { readonly first: boolean; readonly perhaps: boolean },
): Promise<(Answer | Failed)[]> {
  const several = items.length > 1 && new Set(items.flatMap((item) => together.about(item).names)).size > 1;
  try {
    const anyMap = items.every((item) => together.about(item).anyMap);
    const sending = { ...terms, perhaps, once: together.once ?? false, anyMap };
    const answers = await attempts(context, sending, (connection, how) =>
      together.decide(connection, items, several ? { ...how, several } : how),
    );
    return [...answers];
  } catch (error) {
    const failed = (item: Item) => new Failed(explain(error, together.about(item), context));
    if (!(error instanceof Unanswered)) return items.map(failed);
    const { why, cause } = error;
    const waited = why === "lock-timeout";
    if (first && !error.perhaps) {
      if (why === "aborted") throw new Undone("aborted", cause);
      if (waited) throw new Undone(several ? "crowded" : "waited", cause);
    }
    const faulty = !troubles.has(why) && (!(cause instanceof HoldfastError) || cause instanceof UsageError);
    const apart =
      faulty ||
      ((why === "lost" || why === "deadlock" || why === "serialization" || (waited && several)) &&
        performance.now() < terms.until);
    const never = together.once === true && error.perhaps;
    if (items.length === 1 || !apart || never || terms.signal.aborted) return items.map(failed);
    const middle = items.length >> 1;
    const answers: (Answer | Failed)[] = [];
    for (const half of [items.slice(0, middle), items.slice(middle)]) {
      // Whatever is in the way is in everybody's.
      const over = !faulty && performance.now() >= terms.until;
      const how = { first: false, perhaps: error.perhaps };
      answers.push(...(over ? half.map(failed) : await halves(context, together, half, terms, how)));
    }
    return answers;
  }
}
