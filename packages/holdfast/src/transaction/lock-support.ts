/** What locks of transactions are worth on the database at hand. */
import { type Capabilities, type LockSupport, require } from "../seam/capabilities.ts";
import type { Connection } from "../seam/database.ts";
import { StrategyError, UnsupportedError, some } from "../seam/errors.ts";
import { type Key, type LockRequest, keyNames } from "../seam/key.ts";
import type { Instance } from "./instance.ts";

/** A lock of the session, by a name of its own, which must be there before the transaction and outlive it. */
export const isNamed = ({ form }: Key): boolean => form.kind === "getLock";

const mustGoFirst =
  "it is a lock of the session, so that it must be there before a transaction begins, and outlive it. Give it to hf.transaction({ lock }), or take it with hf.hold.";

/** In the middle of a transaction. */
export function checkInside(requests: readonly LockRequest[]): void {
  const named = requests.find(({ key }) => isNamed(key));
  if (named) throw new UnsupportedError(`The lock ${named.key.name}: ${mustGoFirst}`);
}

export function checkSupport(
  requests: readonly LockRequest[],
  capabilities: LockSupport,
  joined: boolean,
): void {
  if (requests.length === 0) return;
  require(joined ? capabilities.joinedLocks : capabilities.transactionLocks, joined
    ? "Locks in a joined transaction"
    : "Locks in a transaction");
  if (requests.some(({ mode }) => mode === "shared"))
    require(capabilities.sharedLocks, `Shared ${some(keyNames(requests))}`);
  for (const { key } of requests) {
    if (key.form.kind === "hashtext" || key.form.kind === "hashtextextended")
      require(capabilities.foreignKeys, `The lock ${key.name}`);
    if (isNamed(key)) {
      require(capabilities.namedLocks, `The lock ${key.name}`);
    }
  }
}

/**
 * After a lock was granted, perhaps after a long wait, or to a process that slept: throws if locks are kept in another way
 * by now, for then it excludes nobody. Whoever changes that looks for locks of the old kind after everybody's trust is over:
 * what was granted before is found by that, and what is granted after is found here.
 */
export async function stillKept<C extends Connection>(
  context: Pick<Instance<unknown, C>, "trusted" | "renewed">,
  connection: C,
  before: Capabilities,
): Promise<void> {
  const now = context.trusted() ?? (await context.renewed(connection));
  if (now.transactionLocks !== before.transactionLocks)
    throw new StrategyError(
      `Locks of this database were changed from "${String(before.transactionLocks)}" to "${String(now.transactionLocks)}" while this one was waited for. Try again.`,
      true,
    );
}

/** Whether two can have a lock at the same time, on different nodes, until one of them commits. */
export function isAtCommit(context: Pick<Instance<unknown, Connection>, "known">): boolean {
  return context.known()?.exclusion === "at commit";
}
