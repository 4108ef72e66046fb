/** Jobs that others can have again: given back, left behind by the dead, begun anew, or due. */
import { Draft, millisecond, namesOf } from "./draft.ts";
import type { JobEnd } from "./finish.ts";
import { Freed, Opened } from "./freed.ts";
import {
  type DelayedRow,
  type FailedRow,
  type HeldLease,
  type LeaseRow,
  type MarkRow,
  type QueueDecided,
  type QueueRow,
  type QueueWrites,
  type WorkerState,
  markId,
} from "./rows.ts";

/** What a worker had not started. `leases`: those that are still its own. `marks`: of their jobs; these have ended well. */
export function decideGiveBack(
  view: {
    readonly leases: readonly LeaseRow[];
    readonly marks: readonly MarkRow[];
    readonly held: HeldLease | undefined;
  },
  unstarted: readonly Pick<JobEnd, "lease" | "place">[],
): QueueDecided<undefined> {
  const { leases, marks, held } = view;
  const draft = new Draft();
  const freed = new Freed();
  const marked = new Set(marks.map(markId));
  for (const row of leases) {
    const lease = new Opened(row);
    const places = new Set(unstarted.filter(({ lease: id }) => id === row.id).map(({ place }) => place));
    for (const place of [...places].toSorted((a, b) => a - b)) {
      const job = lease.rows[place];
      if (!job || lease.isDone(place)) continue;
      if (row.counted) freed.group(job);
      if (marked.has(markId({ lease: row.id, place }))) freed.key(job);
      else draft.wait(job);
    }
    const done = [...new Set([...(row.done ?? []), ...places])];
    if (done.length >= row.size) draft.remove.lease.push(row.id);
    else draft.update.lease.push({ id: row.id, done });
  }
  if (!held && freed.any) return { need: freed.need };
  draft.remove.key.push(...freed.keysOf(held));
  draft.update.group.push(...freed.groupsOf(held, true).values());
  return { verdicts: undefined, writes: draft };
}

/** Why a job has failed whose worker was lost during its last attempt. */
export const lost = "the worker was lost while it had this job";

/** A worker that did not say in time that it lives, or whose session has ended. */
export function isGone(
  { beat, ttl, unlocked = false }: Pick<WorkerState, "beat" | "ttl"> & { readonly unlocked?: boolean },
  moment: number,
): boolean {
  return unlocked || beat < moment - ttl * millisecond;
}

export interface Swept {
  /** Jobs that others can have, or that have failed, and the queues that they are of. */
  readonly jobs: number;
  readonly queues: readonly string[];
  /** Leases whose text cannot be read: they stay as they are, and do not keep the others. */
  readonly unreadable: readonly number[];
}

/** `leases`: of workers that are gone, with the marks of their jobs and the settings of their queues. */
export function decideSweep(view: {
  readonly moment: number;
  readonly leases: readonly LeaseRow[];
  readonly marks: readonly MarkRow[];
  readonly queues: ReadonlyMap<number, Pick<QueueRow, "name" | "attempts">>;
  readonly held: HeldLease | undefined;
}): QueueDecided<Swept> {
  const { moment, leases, marks, queues, held } = view;
  const draft = new Draft();
  const freed = new Freed();
  const marked = new Set(marks.map(markId));
  const unreadable: number[] = [];
  const names = new Set<string>();
  let jobs = 0;
  for (const row of leases) {
    const queue = queues.get(row.queue);
    if (!queue) continue;
    const lease = opened(row);
    if (!lease) {
      unreadable.push(row.id);
      continue;
    }
    names.add(queue.name);
    for (const [place, job] of lease.rows.entries()) {
      if (lease.isDone(place)) continue;
      if (row.counted) freed.group(job);
      if (marked.has(markId({ lease: row.id, place }))) {
        freed.key(job);
        continue;
      }
      jobs++;
      const again = { ...job, attempt: job.attempt + 1 };
      if (again.attempt < queue.attempts) draft.wait(again);
      else {
        draft.insert.failed.push({ ...again, failed_at: moment, error: lost });
        freed.key(job);
      }
    }
    draft.remove.lease.push(row.id);
  }
  if (!held && freed.any) return { need: freed.need };
  draft.remove.key.push(...freed.keysOf(held));
  draft.update.group.push(...freed.groupsOf(held, true).values());
  return { verdicts: { jobs, queues: [...names], unreadable }, writes: draft };
}

function opened(row: LeaseRow): Opened | undefined {
  try {
    return new Opened(row);
  } catch {
    return undefined;
  }
}

/**
 * Failed jobs begin anew, from the first attempt. `holders`: the job that each of their keys belongs to; a key that was free belongs to
 * the first of them, by id. One whose key another job has stays where it is. `back`: groups to which some have come back.
 */
export function decideRevive(
  failed: readonly FailedRow[],
  holders: ReadonlyMap<string, number>,
): {
  readonly verdicts: { readonly count: number; readonly back: readonly string[] };
  readonly writes: QueueWrites;
} {
  const draft = new Draft();
  for (const row of failed) {
    const { queue, id, priority, at, key, grp, payload } = row;
    if (key !== undefined && holders.get(key) !== id) continue;
    draft.remove.failed.push({ queue, id });
    draft.wait({ queue, id, priority, attempt: 0, at, key, grp, payload });
  }
  const back = namesOf(draft.insert.grouped.map(({ grp: group }) => ({ group })));
  return { verdicts: { count: draft.remove.failed.length, back }, writes: draft };
}

/** What is due goes where it can be claimed. The answer: groups to which some have come. */
export function decideDue(due: readonly DelayedRow[]): {
  readonly verdicts: readonly string[];
  readonly writes: QueueWrites;
} {
  const draft = new Draft();
  for (const { run_at: _, ...row } of due) draft.wait(row);
  draft.remove.due.push(...due);
  return { verdicts: namesOf(due.map(({ grp: group }) => ({ group }))), writes: draft };
}
