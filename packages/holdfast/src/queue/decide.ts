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
 * transaction of its handler (a mark) has ended well. **What is given back** is as it was, and no attempt was made.
 *
 * **Groups.** `running` counts jobs of a group, if the queue limits groups, from their claim to their end, and is never below 0.
 * `since` and `started`: the window that began with a start, and the starts in it; one that began `group_per` milliseconds ago or
 * earlier is over. What comes back to a group is older than what was taken after it, so its floor is forgotten.
 */
import { type JobRow, leasedRows } from "./lease-text.ts";

export { type JobRow, claimedJobs, inOrder, leaseText, leasedRows } from "./lease-text.ts";

export interface QueueRow {
  readonly id: number;
  readonly name: string;
  readonly paused: boolean;
  readonly attempts: number;
  readonly most: number | undefined;
  readonly group_most: number | undefined;
  readonly group_rate: number | undefined;
  readonly group_per: number | undefined;
  readonly ordered: boolean;
}

export interface DelayedRow extends JobRow {
  readonly run_at: number;
}

export interface FailedRow extends JobRow {
  readonly failed_at: number;
  readonly error: string;
}

export interface KeyRow {
  readonly queue: number;
  readonly key: string;
  readonly job: number;
}

export interface GroupRow {
  readonly queue: number;
  readonly grp: string;
  readonly running: number;
  readonly since: number | undefined;
  readonly started: number;
  /** Not before, after a failure of a group in order, and the job that it waits for. */
  readonly next: number | undefined;
  readonly head: number | undefined;
  readonly head_priority: number | undefined;
  /** Of this priority, what is below it is gone: for engines that would walk over it. */
  readonly floor: number | undefined;
  readonly floor_priority: number | undefined;
}

export interface LeaseRow {
  readonly id: number;
  readonly worker: number;
  readonly queue: number;
  /** Its jobs are counted in their groups. */
  readonly counted: boolean;
  readonly size: number;
  readonly done: readonly number[] | undefined;
  readonly jobs: string;
}

export interface MarkRow {
  readonly lease: number;
  readonly place: number;
}

export interface WorkerState {
  readonly id: number;
  readonly queue: number;
  readonly beat: number;
  readonly ttl: number;
}

type GroupName = Pick<GroupRow, "queue" | "grp">;

/** What is to be written, by table. */
export interface QueueWrites {
  readonly insert: {
    readonly ready: readonly JobRow[];
    readonly grouped: readonly JobRow[];
    readonly delayed: readonly DelayedRow[];
    /** Unless they are there. */
    readonly failed: readonly FailedRow[];
    /** Unless they are there. */
    readonly group: readonly GroupName[];
  };
  readonly update: {
    readonly key: readonly KeyRow[];
    readonly group: readonly GroupRow[];
    readonly lease: readonly Pick<LeaseRow, "id" | "done">[];
  };
  readonly remove: {
    /** Wherever it waits. If it does not, or somebody has it, it stays. */
    readonly job: readonly Pick<JobRow, "queue" | "id">[];
    /** From where they wait, or were due. */
    readonly waiting: readonly JobRow[];
    readonly due: readonly DelayedRow[];
    readonly failed: readonly Pick<FailedRow, "queue" | "id">[];
    readonly key: readonly KeyRow[];
    /** With their marks. */
    readonly lease: readonly number[];
  };
}

class Draft {
  readonly insert = {
    ready: [] as JobRow[],
    grouped: [] as JobRow[],
    delayed: [] as DelayedRow[],
    failed: [] as FailedRow[],
    group: [] as GroupName[],
  };
  readonly update = {
    key: [] as KeyRow[],
    group: [] as GroupRow[],
    lease: [] as Pick<LeaseRow, "id" | "done">[],
  };
  readonly remove = {
    job: [] as Pick<JobRow, "queue" | "id">[],
    waiting: [] as JobRow[],
    due: [] as DelayedRow[],
    failed: [] as Pick<FailedRow, "queue" | "id">[],
    key: [] as KeyRow[],
    lease: [] as number[],
  };

  /** Where it can be claimed. */
  wait(row: JobRow): void {
    (row.grp === undefined ? this.insert.ready : this.insert.grouped).push(row);
  }
}

/** Keys and groups that have to be read, and locked, before it can be decided. */
export interface QueueNeed {
  readonly keys: readonly Pick<KeyRow, "queue" | "key">[];
  readonly groups: readonly GroupName[];
}

/** They were read, with locks, as far as they are there. */
export interface HeldLease {
  readonly keys: readonly KeyRow[];
  readonly groups: readonly GroupRow[];
}

export type QueueDecided<Verdicts> =
  { readonly need: QueueNeed } | { readonly verdicts: Verdicts; readonly writes: QueueWrites };

const millisecond = 1000;

/** To the nearest microsecond. */
const later = (moment: number, ms: number): number => moment + Math.round(ms * millisecond);

// Adding

/** A job to be added. */
export interface Arrival {
  readonly payload: string;
  readonly priority: number;
  /** Not before. */
  readonly runAt: number | undefined;
  readonly group: string | undefined;
  readonly key: string | undefined;
  readonly replace: boolean;
}

/**
 * `ids`: one for each of them. `holders`: the job that each of their keys belongs to; a key that was free belongs to the first of
 * them that has it. `alone`: outside of a caller's transaction, so that rows of groups are made known at once.
 */
export function decideAdd(
  view: {
    readonly queue: number;
    readonly moment: number;
    readonly ids: readonly number[];
    readonly holders: ReadonlyMap<string, number>;
    readonly alone: boolean;
  },
  jobs: readonly Arrival[],
): {
  readonly verdicts: readonly { readonly id: number; readonly added: boolean }[];
  readonly writes: QueueWrites;
} {
  const draft = new Draft();
  const { queue, moment, ids, alone } = view;
  const verdicts = ids.map((id) => ({ id, added: true }));
  const holders = new Map(view.holders);
  for (const [i, { key, replace }] of jobs.entries()) {
    if (key === undefined) continue;
    const id = ids[i] as number;
    const holder = holders.get(key) as number;
    if (holder === id) continue;
    if (!replace) {
      verdicts[i] = { id: holder, added: false };
      continue;
    }
    holders.set(key, id);
    // One of the same call never comes to be.
    const earlier = ids.indexOf(holder);
    if (earlier >= 0) verdicts[earlier] = { id: holder, added: false };
    else draft.remove.job.push({ queue, id: holder });
  }
  for (const [key, job] of holders)
    if (view.holders.get(key) !== job) draft.update.key.push({ queue, key, job });
  for (const [i, { payload, priority, runAt, group: grp, key }] of jobs.entries()) {
    if (!verdicts[i]?.added) continue;
    const row: JobRow = { queue, priority, attempt: 0, id: ids[i] as number, at: moment, key, grp, payload };
    if (runAt !== undefined && runAt > moment) draft.insert.delayed.push({ ...row, run_at: runAt });
    else draft.wait(row);
  }
  if (alone) for (const grp of namesOf(jobs)) draft.insert.group.push({ queue, grp });
  return { verdicts, writes: draft };
}

function namesOf(jobs: readonly Pick<Arrival, "group">[]): string[] {
  return [...new Set(jobs.flatMap(({ group }) => group ?? []))].toSorted(byText);
}

/** As the databases compare them: byte by byte, which is code point by code point. */
export const byText = (a: string, b: string): number => Buffer.compare(Buffer.from(a), Buffer.from(b));

// The end of jobs

export interface JobEnd {
  readonly lease: number;
  readonly place: number;
  /** Why, and in how many milliseconds it runs again; undefined: never. */
  readonly failure?: { readonly error: string; readonly again: number | undefined } | undefined;
}

/**
 * `leases`: of those that are named, the ones that are this worker's. `whole`: leases of which nothing is left. The answer: the leases
 * that are ours.
 */
export function decideFinish(
  view: {
    readonly moment: number;
    readonly ordered: boolean;
    readonly leases: readonly LeaseRow[];
    readonly held: HeldLease | undefined;
  },
  whole: readonly number[],
  ended: readonly JobEnd[],
): QueueDecided<readonly number[]> {
  const { moment, ordered, held } = view;
  const draft = new Draft();
  const leases = new Map(view.leases.map((lease) => [lease.id, new Opened(lease)]));
  const freed = new Freed();
  const waits: { readonly row: JobRow; readonly until: number }[] = [];
  for (const { lease: id, place, failure } of ended) {
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

/** A lease whose jobs have been read. */
class Opened {
  readonly row: LeaseRow;
  readonly rows: readonly JobRow[];
  readonly #done: ReadonlySet<number>;

  constructor(row: LeaseRow) {
    this.row = row;
    this.rows = leasedRows(row.queue, row.jobs);
    this.#done = new Set(row.done);
  }

  isDone(place: number): boolean {
    return this.#done.has(place);
  }
}

const groupId = ({ queue, grp }: { readonly queue: number; readonly grp?: string | undefined }) =>
  `${queue} ${grp ?? ""}`;

/** Keys of jobs that have ended, and groups that have fewer at work. */
class Freed {
  readonly #keys = new Map<string, KeyRow>();
  readonly #groups = new Map<string, { readonly name: GroupName; less: number }>();

  key({ queue, key, id }: JobRow): void {
    if (key !== undefined) this.#keys.set(`${queue} ${id} ${key}`, { queue, key, job: id });
  }

  group(job: JobRow): void {
    const group = this.touch(job);
    if (group) group.less++;
  }

  touch({ queue, grp }: JobRow): { less: number } | undefined {
    if (grp === undefined) return undefined;
    const id = groupId({ queue, grp });
    let group = this.#groups.get(id);
    if (!group) this.#groups.set(id, (group = { name: { queue, grp }, less: 0 }));
    return group;
  }

  get any(): boolean {
    return this.#keys.size + this.#groups.size > 0;
  }

  get need(): QueueNeed {
    return { keys: [...this.#keys.values()], groups: [...this.#groups.values()].map(({ name }) => name) };
  }

  /** Those that are still theirs. */
  keysOf(held: HeldLease | undefined): KeyRow[] {
    return (held?.keys ?? []).filter(({ queue, key, job }) => this.#keys.has(`${queue} ${job} ${key}`));
  }

  /** As they are from now on. `back`: their jobs have come back to them. */
  groupsOf(held: HeldLease | undefined, back: boolean): Map<string, GroupRow> {
    const groups = new Map<string, GroupRow>();
    for (const group of held?.groups ?? []) {
      const freed = this.#groups.get(groupId(group));
      if (!freed) continue;
      const floors = back ? { floor: undefined, floor_priority: undefined } : {};
      groups.set(groupId(group), {
        ...group,
        ...floors,
        running: Math.max(0, group.running - freed.less),
      });
    }
    return groups;
  }
}

// What comes back

/** What a worker had not started. `leases`: those that are still its own. */
export function decideGiveBack(
  view: { readonly leases: readonly LeaseRow[]; readonly held: HeldLease | undefined },
  unstarted: readonly Pick<JobEnd, "lease" | "place">[],
): QueueDecided<undefined> {
  const { leases, held } = view;
  const draft = new Draft();
  const freed = new Freed();
  for (const row of leases) {
    const lease = new Opened(row);
    const places = new Set(unstarted.filter(({ lease: id }) => id === row.id).map(({ place }) => place));
    for (const place of [...places].toSorted((a, b) => a - b)) {
      const job = lease.rows[place];
      if (!job || lease.isDone(place)) continue;
      draft.wait(job);
      if (row.counted) freed.group(job);
    }
    const done = [...new Set([...(row.done ?? []), ...places])];
    if (done.length >= row.size) draft.remove.lease.push(row.id);
    else draft.update.lease.push({ id: row.id, done });
  }
  if (!held && freed.any) return { need: freed.need };
  draft.update.group.push(...freed.groupsOf(held, true).values());
  return { verdicts: undefined, writes: draft };
}

/** Why a job has failed whose worker was lost during its last attempt. */
export const lost = "the worker was lost while it had this job";

/** A worker that did not say in time that it lives. */
export function isGone({ beat, ttl }: Pick<WorkerState, "beat" | "ttl">, moment: number): boolean {
  return beat < moment - ttl * millisecond;
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
  const marked = new Set(marks.map(({ lease, place }) => `${lease} ${place}`));
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
      if (marked.has(`${row.id} ${place}`)) {
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

// Rooms and shares

/**
 * Of a claim of so many, how many are for jobs of groups: half of it, and all that jobs without a group have left. Of one alone, a
 * coin decides.
 */
export function roomForGroups(most: number, found: number, coin: () => boolean): number {
  return Math.max(most - found, most === 1 ? Number(coin()) : Math.floor(most / 2));
}

/** How many jobs of one group go into a claim: up to ten. */
export function shareOf({ group_most }: Pick<QueueRow, "group_most">, room: number): number {
  return Math.max(1, Math.min(10, room, group_most ?? Infinity));
}

export const isLimited = ({ group_most, group_rate }: Pick<QueueRow, "group_most" | "group_rate">): boolean =>
  group_most !== undefined || group_rate !== undefined;

/** What began then, or earlier, is over. */
function windowStart({ group_per }: Pick<QueueRow, "group_per">, moment: number): number | undefined {
  return group_per === undefined ? undefined : moment - group_per * millisecond;
}

export interface GroupRoom {
  readonly group: GroupRow;
  /** How many of its jobs may begin; 0 or less: none. */
  readonly room: number;
  /** The window that they would begin in, and the starts in it so far. */
  readonly since: number;
  readonly used: number;
}

/** Of groups in their order, and so many places for all of them: each has an equal share, as far as its limits allow. */
export function roomsOf(
  queue: Pick<QueueRow, "group_most" | "group_rate" | "group_per">,
  groups: readonly GroupRow[],
  { moment, share, left }: { readonly moment: number; readonly share: number; readonly left: number },
): GroupRoom[] {
  const start = windowStart(queue, moment);
  return groups.map((group, i) => {
    const open = start !== undefined && group.since !== undefined && group.since > start;
    const used = open ? group.started : 0;
    const room = Math.min(
      share,
      left - i * share,
      (queue.group_most ?? Infinity) - group.running,
      (queue.group_rate ?? Infinity) - used,
    );
    return { group, room, used, since: open ? group.since : moment };
  });
}

/**
 * After so many jobs of it have begun: as it is from now on; `forget`: it has none, and nothing that it must remember; undefined: as
 * it was.
 */
export function afterClaim(
  queue: Pick<QueueRow, "group_most" | "group_rate" | "group_per">,
  { group, room, since, used }: GroupRoom,
  begun: number,
  moment: number,
): GroupRow | "forget" | undefined {
  if (begun > 0) {
    if (!isLimited(queue)) return undefined;
    const running = group.running + begun;
    return { ...group, running, since, started: used + begun, next: undefined, head: undefined };
  }
  const start = windowStart(queue, moment);
  const over =
    queue.group_rate === undefined ||
    group.since === undefined ||
    (start !== undefined && group.since <= start);
  return room > 0 && group.running === 0 && over ? "forget" : undefined;
}

/**
 * Milliseconds until the first of them has room again or, if it has no jobs, can be forgotten; undefined: none waits for a moment.
 */
export function roomSoon(
  { group_per }: Pick<QueueRow, "group_per">,
  groups: readonly GroupRow[],
  moment: number,
): number | undefined {
  const waits = groups.flatMap(({ next, since }) => {
    const opens =
      group_per === undefined || since === undefined ? -Infinity : since + group_per * millisecond;
    const at = Math.max(next ?? -Infinity, opens);
    return at > moment ? [(at - moment) / millisecond] : [];
  });
  return waits.length > 0 ? Math.min(...waits) : undefined;
}
