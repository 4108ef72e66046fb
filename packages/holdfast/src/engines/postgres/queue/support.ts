/** What the parts of the store of queues share. */
import type { SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError } from "../../../seam/errors.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import type { ClaimedJob, JobPlace } from "../../../queue/store.ts";
import { failureOf } from "../locks/index.ts";

export type QueueRow = Record<string, unknown>;

export async function ask(connection: SqlConnection, statement: Statement): Promise<QueueRow[]> {
  const asking = connection.prepared?.(statement) ?? connection.query(statement);
  const { rows } = await asking.catch((error: unknown) => {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError("A table or function of queues", error)
      : error;
  });
  return rows as QueueRow[];
}

export const bound = (value: string | number | boolean | undefined | null, type: string) =>
  sql`${value === undefined || value === null ? null : String(value)}::text::${sql.raw(type)}`;

/** As it stands in a lease. */
export type WrittenLease = [
  id: number,
  failures: number,
  priority: number,
  at: number,
  key: string | null,
  group: string | null,
  payload: unknown,
];

export function jobOf([id, failures, priority, at, jobKey, group, payload]: WrittenLease): ClaimedJob {
  return { id, failures, priority, at, key: jobKey ?? undefined, group: group ?? undefined, payload };
}

export function numbersOf(value: unknown): number[] {
  const text = String(value ?? "{}");
  return text === "{}" ? [] : text.slice(1, -1).split(",").map(Number);
}

export const numberOf = (value: unknown) =>
  value === null || value === undefined ? undefined : Number(value);
export const textOf = (value: unknown) => (typeof value === "string" ? value : undefined);

export function jobsOf(text: unknown): ClaimedJob[] {
  return typeof text === "string" ? (JSON.parse(text) as WrittenLease[]).map(jobOf) : [];
}

export const sorted = (floors: JobPlace["floors"]) => [...floors.keys()].toSorted((a, b) => a - b);
