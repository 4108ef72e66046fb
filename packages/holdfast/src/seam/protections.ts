/**
 * What stands between two callers and a wrong result, by name. Always on: a constant of a module cannot be changed from
 * outside, and costs nothing. The check of our own tests (`npm run test:mutants`) loads this file with one of them off, and
 * expects to be told. So each name is used where the protection is, and what it protects against is said here.
 */

/** A transaction with a lock reads before it has the lock, and decides by what others are about to change. */
export const lockBeforeRead: boolean = true;

/** Two who want the same keys take them in different orders, and each waits for the other. */
export const keysInOrder: boolean = true;

/** A serialization failure or a deadlock, of which the server has undone everything, is passed on to the caller. */
export const failuresRetried: boolean = true;

/** A statement in a body goes through the outer client: it is not part of the transaction, and is not undone with it. */
export const wrongConnection: boolean = true;

/** A process that is frozen in a transaction keeps everybody else waiting, since only the server could end it. */
export const serverDeadline: boolean = true;

/** The answer to a COMMIT is lost, what it did is taken for undone, and done a second time. */
export const commitLookedUp: boolean = true;

/** The body has swallowed an error, the server answers COMMIT with ROLLBACK, and the call returns as if all was kept. */
export const abortedCommitSeen: boolean = true;

/** A transaction has another isolation than was asked for, by what stands between, and checks what does not hold. */
export const isolationVerified: boolean = true;

/** Locks keep nobody out, or what is read under them is older than they are, and whoever looks is told all is well. */
export const locksVerified: boolean = true;

/** Whoever has lost a lease, and does not know it yet, writes over what its successor has written. */
export const fenceChecked: boolean = true;

/** Two holders of a lease get the same fence, and nobody can tell the older one from the newer one. */
export const fenceGrows: boolean = true;

/** A standby that takes over, and has not heard of the newest fences, gives them a second time. */
export const fenceGeneration: boolean = true;

/** A lease is given to somebody else before its time is over, by the server's clock. */
export const leaseUntilOver: boolean = true;

/** A holder that cannot renew its lease goes on until it hears of it, while somebody else has it. */
export const leaseTrustEnds: boolean = true;

/** Two read the same version of a row, and the second one's write undoes the first one's. */
export const versionCompared: boolean = true;

/** Two calls with the same id run the body at the same time. */
export const onceLocked: boolean = true;

/** Two calls read the same count, and both find room for one more. */
export const quotaLocked: boolean = true;

/** A call that is made again with its id, since its answer was lost, is counted twice. */
export const quotaIdKept: boolean = true;

/** What is held for somebody is given away meanwhile, and then used as well. */
export const quotaHeldCounted: boolean = true;

/** More is taken from stock than there is. */
export const stockChecked: boolean = true;

/** What is reserved is sold to somebody else. */
export const stockReservedKept: boolean = true;

/** A worker that was given up for dead completes its job after somebody else has. */
export const jobStillOurs: boolean = true;

/** A job that always fails is run for ever, and so is one that ends its process. */
export const attemptsCounted: boolean = true;

/** The jobs of a worker that is alive are given to another one, and run twice. */
export const workerDeadFirst: boolean = true;

/** More jobs of a group run at the same time than it allows. */
export const groupCounted: boolean = true;

/** A tick of a schedule is run by every instance that finds it due. */
export const tickOnce: boolean = true;

/** A leader whose lease is lost goes on, beside the next one. */
export const leaderStops: boolean = true;

/** One process keeps locks as rows, another one as advisory locks, and both get the same one. */
export const strategyAgreed: boolean = true;

/** A process that takes a database for another shard looks in the wrong place, and what there is one of is given twice. */
export const shardAgreed: boolean = true;
