/** The end of jobs: done, again later, or failed for good. */
import { Draft, later } from "./draft.ts";
import { Freed, Opened, groupId } from "./freed.ts";
import {
  type GroupRow,
  type HeldLease,
  type JobRow,
  type LeaseRow,
  type MarkRow,
  type QueueDecided,
  markId,
} from "./rows.ts";

export interface JobEnd {
  readonly lease: number;
  readonly place: number;
  /** Why, and in how many milliseconds it runs again; undefined: never. */
  readonly failure?: { readonly error: string; readonly again: number | undefined } | undefined;
}

/**
 * `leases`: of those that are named, the ones that are this worker's. `marks`: of the jobs that are said to have failed, those that were
 * completed in a committed transaction: they have ended well. `whole`: leases of which nothing is left. The answer: the leases that are ours.
 */
export function decideFinish(
  view: {
    readonly moment: number;
    readonly ordered: boolean;
    readonly leases: readonly LeaseRow[];
    readonly marks: readonly MarkRow[];
    readonly held: HeldLease | undefined;
  },
  whole: readonly number[],
  ended: readonly JobEnd[],
): QueueDecided<readonly number[]> {
  const { moment, ordered, held } = view;
  const draft = new Draft();
  const leases = new Map(view.leases.map((lease) => [lease.id, new Opened(lease)]));
  const freed = new Freed();
  const marked = new Set(view.marks.map(markId));
  const waits: { readonly row: JobRow; readonly until: number }[] = [];
  for (const { lease: id, place, failure: told } of ended) {
    const failure = marked.has(markId({ lease: id, place })) ? undefined : told;
    const lease = leases.get(id);
    const job = lease?.rows[place];
    if (!lease || !job) continue;
    if (failure?.again === undefined) freed.key(job);
    // What is noted already was written by the same call, whose answer was lost.
    if (lease.isDone(place)) continue;
    if (lease.row.counted) freed.group(job);
    if (!failure) continue;
    const row = { ...job, attempt: job.attempt + 1 };
    if (failure.again === undefined) {
      draft.insert.failed.push({ ...row, failed_at: moment, error: failure.error });
      continue;
    }
    const until = later(moment, failure.again);
    if (!ordered || row.grp === undefined) {
      draft.insert.delayed.push({ ...row, run_at: until });
      continue;
    }
    draft.insert.grouped.push(row);
    waits.push({ row, until });
    freed.touch(row);
  }
  if (!held && freed.any) return { need: freed.need };
  draft.remove.key.push(...freed.keysOf(held));
  const groups = freed.groupsOf(held, false);
  for (const { row, until } of waits) {
    const group = groups.get(groupId(row));
    if (group) groups.set(groupId(row), waitingFor(group, row, until));
  }
  draft.update.group.push(...groups.values());
  finishLeases(draft, leases, new Set(whole), ended);
  return { verdicts: [...leases.keys()], writes: draft };
}

function waitingFor(group: GroupRow, { id, priority }: JobRow, until: number): GroupRow {
  return {
    ...group,
    next: until,
    head: id,
    head_priority: priority,
    floor: undefined,
    floor_priority: undefined,
  };
}

function finishLeases(
  draft: Draft,
  leases: ReadonlyMap<number, Opened>,
  whole: ReadonlySet<number>,
  ended: readonly JobEnd[],
): void {
  for (const [id, lease] of leases) {
    if (whole.has(id)) {
      draft.remove.lease.push(id);
      continue;
    }
    const places = ended.filter(({ lease: of }) => of === id).map(({ place }) => place);
    const added = [...new Set(places)].filter((place) => !lease.isDone(place)).toSorted((a, b) => a - b);
    if (added.length > 0) draft.update.lease.push({ id, done: [...(lease.row.done ?? []), ...added] });
  }
}

/**
 * The end of jobs that were taken in a transaction of their handler's; `failure`: they were rolled back. `jobs`: their rows, which
 * that transaction has locked.
 */
export function decideSettle(
  view: { readonly moment: number; readonly jobs: readonly JobRow[]; readonly held: HeldLease | undefined },
  failure: JobEnd["failure"],
): QueueDecided<undefined> {
  const { moment, jobs, held } = view;
  const draft = new Draft();
  const freed = new Freed();
  for (const job of jobs) {
    draft.remove.waiting.push(job);
    if (failure?.again === undefined) freed.key(job);
    if (!failure) continue;
    const row = { ...job, attempt: job.attempt + 1 };
    if (failure.again === undefined)
      draft.insert.failed.push({ ...row, failed_at: moment, error: failure.error });
    else draft.insert.delayed.push({ ...row, run_at: later(moment, failure.again) });
  }
  if (!held && freed.any) return { need: freed.need };
  draft.remove.key.push(...freed.keysOf(held));
  return { verdicts: undefined, writes: draft };
}
