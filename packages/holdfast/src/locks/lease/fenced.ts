import { require } from "../../seam/capabilities.ts";
import { StaleFenceError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { scopeNamed } from "../../transaction/scope.ts";
import { knownLease } from "./granted.ts";
import type { Lease } from "./types.ts";

/**
 * Inside a transaction: makes it fail with `StaleFenceError` if the lease is over, and keeps anybody else from getting
 * the lease until the transaction has ended. So what it writes is written by the holder, however long the process
 * was asleep before. In a database other than the one that keeps the lease, it fails if a newer fence of the same
 * key has been here before.
 */
export async function fenced(tx: object, lease: Lease): Promise<void> {
  const known = knownLease(lease);
  if (!known) throw new UsageError("fenced(tx, lease): this is no lease of hf.lease or of a semaphore");
  const scope = scopeNamed(known.home, tx, "fenced(tx, lease)");
  const { engine } = scope.context.database;
  const site = scope.locking();
  const newest = await scope.work(
    async ({ connection, capabilities, joined }) => {
      require(capabilities.leases, "Leases");
      if (!engine.leases) throw new UnsupportedError(`Leases: ${engine.name} does not keep any`);
      return engine.leases.fence(connection, known.grip, joined);
    },
    undefined,
    [`lease ${lease.name}`],
  );
  if (newest !== undefined) throw new StaleFenceError(lease.name, lease.fence, newest);
  // Nobody else gets the lease before the transaction has ended.
  scope.section?.took({ kind: "lease", name: lease.name }, site);
}
