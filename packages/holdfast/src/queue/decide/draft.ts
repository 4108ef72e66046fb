import type {
  DelayedRow,
  FailedRow,
  GroupName,
  GroupRow,
  JobRow,
  KeyRow,
  LeaseRow,
  QueueWrites,
} from "./rows.ts";

/** What is to be written, while it is decided. */
export class Draft implements QueueWrites {
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

export const millisecond = 1000;

/** To the nearest microsecond. */
export const later = (moment: number, ms: number): number => moment + Math.round(ms * millisecond);

/** Of groups, each once, in order. */
export function namesOf(jobs: readonly { readonly group: string | undefined }[]): string[] {
  return [...new Set(jobs.flatMap(({ group }) => group ?? []))].toSorted(byText);
}

/** As the databases compare them: byte by byte, which is code point by code point. */
export const byText = (a: string, b: string): number => Buffer.compare(Buffer.from(a), Buffer.from(b));
