import { unsupported } from "../../core/capabilities.ts";

/** What this family deliberately does not give, and why. */
export const noTableLocks = unsupported(
  "LOCK TABLES commits the transaction, is undone by its end, and forbids every other table meanwhile. Lock the rows, or take a key that stands for the table: tx.lock(key(…))",
);

export const noSharedLocks = unsupported(
  "a lock is a row that each holder writes to, so that a snapshot older than the last holder is found out, and two cannot write to it at once. A lease can be shared: hf.lease(shared(key))",
);

export const noServerDeadline = unsupported(
  "the server has no limit for a whole transaction: a deadline is enforced by this process, which must be running for it",
);

export const noOutcome = unsupported(
  "the server keeps no record of a transaction's end that could be asked for",
);

export const noWake = unsupported(
  "the server cannot send messages to its clients: those who wait look again and again",
);

export const noForeignKeys = unsupported(
  "key.hashtext and key.hashtextextended are hashes of PostgreSQL; use key(…)",
);

export const galera = {
  session: unsupported("this is a cluster (Galera), where GET_LOCK is a lock of one node"),
  rows: unsupported(
    "this is a cluster (Galera), where a row lock is one of the node that it was taken on. Lock a key (a lock row is written to, so that all but one fail at COMMIT and run again), or use versions",
  ),
  leases: unsupported(
    "this is a cluster (Galera), where a lease could be taken over on another node while a fenced transaction is open",
  ),
};

export const vitess = unsupported(
  "this is Vitess, which drops a lock of GET_LOCK whose connection is quiet for some seconds",
);
