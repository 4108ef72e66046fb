/** What the end of jobs sets free: places of leases, keys, and room in groups. */
import { leasedRows } from "./lease-text.ts";
import type { GroupName, GroupRow, HeldLease, JobRow, KeyRow, LeaseRow, QueueNeed } from "./rows.ts";

/** A lease whose jobs have been read. */
export class Opened {
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

export const groupId = ({ queue, grp }: { readonly queue: number; readonly grp?: string | undefined }) =>
  `${queue} ${grp ?? ""}`;

/** Keys of jobs that have ended, and groups that have fewer at work. */
export class Freed {
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
