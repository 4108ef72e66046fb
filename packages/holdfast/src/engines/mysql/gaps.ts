import { type Unsupported, unsupported } from "../../seam/capabilities.ts";

/** What this family deliberately does not give, and why. */
export const noTableLocks = unsupported(
  "LOCK TABLES commits the transaction, is undone by its end, and forbids every other table meanwhile. Lock the rows, or take a key that stands for the table, which keeps out those who take it too: tx.lock(key(…))",
);

export const noSharedLocks = unsupported(
  "a lock is a row that each holder writes to, so that a snapshot older than the last holder is found out, and two cannot write to it at once; and GET_LOCK has no shared mode. A lease can be shared: hf.lease(shared(key)). Or take the key alone",
);

export const noServerDeadline = unsupported(
  "the server limits how long a session is silent (wait_timeout), which must be put back after COMMIT, and this client writes that by itself: a deadline is enforced by this process, which must be running for it",
);

export const noOutcome = unsupported(
  "several servers take writes here, and none of them can tell what another has committed",
);

export const noWake = unsupported(
  "the server cannot send messages to its clients: those who wait look again and again",
);

export const noForeignKeys = unsupported(
  "key.hashtext and key.hashtextextended are hashes of PostgreSQL; use key(…), or key.getLock for a lock of GET_LOCK",
);

/** Several servers that take writes, and compare what was written at COMMIT: of two that wrote to a row all but one fail. */
export interface ClusterGaps {
  /** Locks of transactions, where not even these are to be had. */
  readonly locks?: Unsupported;
  readonly session: Unsupported;
  readonly rows: Unsupported;
  readonly leases: Unsupported;
  /** Quotas, stock, queues, schedules and the audit. */
  readonly patterns: Unsupported;
}

export const galera: ClusterGaps = {
  session: unsupported("this is a cluster (Galera), where GET_LOCK is a lock of one node"),
  rows: unsupported(
    "this is a cluster (Galera), where a row lock is one of the node that it was taken on. Lock a key (a lock row is written to, so that all but one fail at COMMIT and run again), or use versions",
  ),
  leases: unsupported(
    "this is a cluster (Galera), where each node has a clock of its own, and a lease could be taken over on another node while a fenced transaction is open",
  ),
  patterns: unsupported(
    "this is a cluster (Galera), where rows are locked on one node, and numbers do not grow from node to node: the same could be decided twice",
  ),
};

const several = "this is a group with several primaries (Group Replication)";
const connect =
  "Let the group have one primary (group_replication_switch_to_single_primary_mode), or use versions";

/**
 * MySQL 9.7: to apply what another member has committed, the server undoes a transaction that is in its way; but the next
 * SELECT count(*) or SAVEPOINT of that transaction begins another one without a word, and COMMIT keeps what came after, here,
 * and all of it on the other members. Those who are to insert a row twice leave the group.
 */
export const group: ClusterGaps = {
  locks: unsupported(
    `${several}, whose server may commit the second half of a transaction that it has undone for another member. ${connect}`,
  ),
  session: unsupported(`${several}, where GET_LOCK is a lock of one member. ${connect}`),
  rows: unsupported(`${several}, where a row lock is one of the member that it was taken on. ${connect}`),
  leases: unsupported(
    `${several}, where each member has a clock of its own, and a lease could be taken over on another one while a fenced transaction is open. ${connect}`,
  ),
  patterns: unsupported(
    `${several}, where rows are locked on one member, and numbers do not grow from member to member. ${connect}`,
  ),
};

export const vitess = unsupported(
  "this is Vitess, which drops a lock of GET_LOCK whose connection is quiet for some seconds",
);

export const vitessSilence = unsupported(
  "this is Vitess, whose sessions are not those of the server. It has a limit of its own for transactions (queryserver-config-transaction-timeout)",
);
