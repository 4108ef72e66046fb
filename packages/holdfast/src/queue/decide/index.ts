/**
 * What becomes of jobs: the rules of queues, written once. Pure: what was read comes in, what is to be written goes out. Who gets
 * a job is not decided here: to choose jobs that nobody else gets is what a store's claim does.
 *
 * Moments are whole microseconds since 1970, by the database's clock. What is undefined is NULL.
 *
 * **Where a job is.** It waits in `ready`, or if it has a group in `grouped`; in `delayed` while it is not due; in a lease while
 * a worker has it; in `failed` when it has failed for good. Of a job that ended well nothing is kept. A job that has been in a
 * lease knows when it came in whole milliseconds, rounded to the nearest.
 *
 * **Keys.** A key belongs to one job of its queue, from the moment at which that is added until it has ended, also for good. A
 * new job whose key is taken is not added, and its answer is the id of the one that has it. With `replace` it is added, takes the
 * key over, and the other one is taken out if it still waits: one that runs goes on without the key.
 *
 * **A job that failed** has failed once more. If it is to run again, it waits until then, to the nearest microsecond, and keeps its
 * key; in a queue whose groups are in order, it waits at the head of its group, which begins nothing until then. If not, it is with
 * the failed, and its key is free.
 *
 * **A lease** is a worker's, by its number: who names one that is not theirs changes nothing. Places of it that have ended are noted
 * in `done`, once: what is said of them again is passed over. It goes when nothing is left of it, and its marks with it.
 *
 * **What a dead worker had** is as if it had failed, but runs again at once, if it has an attempt left; what was completed in a
 * transaction of its handler (a mark) has ended well. **What is given back** is as it was, and no attempt was made. Whoever says that a
 * job has failed, or gives it back, is not believed if it has a mark: it has ended well.
 *
 * **Groups.** `running` counts jobs of a group, if the queue limits groups, from their claim to their end, and is never below 0.
 * `since` and `started`: the window that began with a start, and the starts in it; one that began `group_per` milliseconds ago or
 * earlier is over. What comes back to a group is older than what was taken after it, so its floor is forgotten.
 */
export { type Arrival, decideAdd } from "./add.ts";
export {
  type Swept,
  decideDue,
  decideGiveBack,
  decideRevive,
  decideSweep,
  isGone,
  lost,
} from "./come-back.ts";
export { byText } from "./draft.ts";
export { type JobEnd, decideFinish, decideSettle } from "./finish.ts";
export { claimedJobs, inOrder, leaseText, leasedRows } from "./lease-text.ts";
export { type GroupRoom, afterClaim, isLimited, roomForGroups, roomSoon, roomsOf, shareOf } from "./rooms.ts";
export { markId } from "./rows.ts";
export type {
  DelayedRow,
  FailedRow,
  GroupRow,
  HeldLease,
  JobRow,
  KeyRow,
  LeaseRow,
  MarkRow,
  QueueDecided,
  QueueNeed,
  QueueRow,
  QueueWrites,
  WorkerState,
} from "./rows.ts";
