/** Of transactions inside another one. */
import type { Connection, Isolation } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import type { LockRequest } from "../../seam/key.ts";
import type { Instance } from "../instance.ts";
import { isAtCommit } from "../lock-support.ts";
import { wasRolledBack } from "../retry.ts";
import type { NestedOptions } from "../types.ts";

interface Outer {
  readonly isolation?: Isolation;
  readonly readOnly?: boolean;
}

/** Throws if what it asks for is not what the outer one is. */
export function checkNested({ isolation, readOnly }: NestedOptions, outer: Outer): void {
  if (isolation !== undefined && outer.isolation !== undefined && isolation !== outer.isolation) {
    throw new UsageError(
      `A nested transaction runs in the outer one, whose isolation is ${outer.isolation}: it cannot be ${isolation}. ` +
        `Leave \`isolation\` out, or open another transaction with \`separate: true\`.`,
    );
  }
  if (readOnly === false && outer.readOnly)
    throw new UsageError("A nested transaction cannot write: the outer one is read only.");
}

/** Undoes what was done since. `locks`: taken since. Resolves to those of them that stay. */
export async function rollBackTo<Native, C extends Connection>(
  context: Instance<Native, C>,
  connection: C,
  savepoint: string,
  locks: readonly LockRequest[],
  thrown: unknown,
): Promise<readonly LockRequest[]> {
  const { database, shown } = context;
  const { engine } = database;
  if (connection.lost.aborted) return [];
  if (locks.length === 0 || !isAtCommit(context)) {
    // If this fails too the whole transaction is beyond saving, and its end will say so.
    await engine.savepoint(connection, savepoint, "rollback").catch(() => {});
    return [];
  }
  // What was thrown may rest on what was read: that is true only if the locks are committed with the rest.
  const failure = classify(database, thrown);
  // The transaction is over, and only the whole of it can be run again.
  if (failure !== undefined && wasRolledBack.includes(failure)) return [];
  await engine.keepLocks?.(connection, locks, shown(locks), savepoint);
  return locks;
}
