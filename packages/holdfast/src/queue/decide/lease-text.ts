/**
 * The jobs of a lease, as the text that a worker reads: [[id, attempt, priority, at, key, group, payload], …], by priority and
 * id; `at` in whole milliseconds. A payload is copied as it stands, so that a job that comes back has the same one, whoever
 * wrote it and however.
 */
import type { ClaimedJob } from "../store.ts";
import type { JobRow } from "./rows.ts";

type Written = [
  id: number,
  failures: number,
  priority: number,
  at: number,
  key: string | null,
  group: string | null,
  payload: unknown,
];

/** In the order in which they are begun. */
export const inOrder = (a: JobRow, b: JobRow): number => a.priority - b.priority || a.id - b.id;

export function leaseText(jobs: readonly JobRow[]): string {
  const text = ({ id, attempt, priority, at, key, grp, payload }: JobRow) =>
    `[${id},${attempt},${priority},${Math.round(at / 1000)},${JSON.stringify(key ?? null)},${JSON.stringify(grp ?? null)},${payload}]`;
  return `[${jobs.toSorted(inOrder).map(text).join(",")}]`;
}

/** For the worker. */
export function claimedJobs(text: string): ClaimedJob[] {
  return (JSON.parse(text) as Written[]).map(([id, failures, priority, at, key, group, payload]) => ({
    id,
    failures,
    priority,
    at,
    key: key ?? undefined,
    group: group ?? undefined,
    payload,
  }));
}

/** To be written elsewhere. By their places. Throws if it is no such text. */
export function leasedRows(queue: number, text: string): JobRow[] {
  const rows = (JSON.parse(text) as Written[]).map(([id, attempt, priority, at, key, grp]) => ({
    queue,
    priority,
    attempt,
    id,
    at: at * 1000,
    key: key ?? undefined,
    grp: grp ?? undefined,
    payload: "",
  }));
  const payloads = payloadsOf(text);
  return rows.map((row, place) => ({ ...row, payload: payloads[place] as string }));
}

/** What comes after the sixth comma of each job, up to its end. */
function payloadsOf(text: string): string[] {
  const found: string[] = [];
  let depth = 0;
  let commas = 0;
  let from = 0;
  for (let i = 0; i < text.length; i++) {
    switch (text[i]) {
      case '"':
        i = endOfString(text, i);
        break;
      case "[":
      case "{":
        if (++depth === 2) commas = 0;
        break;
      case ",":
        if (depth === 2 && ++commas === 6) from = i + 1;
        break;
      case "]":
      case "}":
        if (depth-- === 2) found.push(text.slice(from, i).trim());
        break;
    }
  }
  return found;
}

function endOfString(text: string, start: number): number {
  let i = start + 1;
  while (i < text.length && text[i] !== '"') i += text[i] === "\\" ? 2 : 1;
  return i;
}
