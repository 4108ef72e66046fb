import { Draft, namesOf } from "./draft.ts";
import type { JobRow, QueueWrites } from "./rows.ts";

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
