/** What the parts of the store of queues share. */
import type { SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError } from "../../../seam/errors.ts";
import type { Statement } from "../../../seam/sql.ts";
import type { ClaimedJob, JobPlace } from "../../../queue/store.ts";
import { failureOf } from "../locks/index.ts";
import { safely } from "../search-path.ts";

export type QueueRow = Record<string, unknown>;

/** Calls of one function, and what is sent often: their names are written in full. */
export async function ask(connection: SqlConnection, statement: Statement): Promise<readonly QueueRow[]> {
  const asking = connection.prepared?.(statement) ?? connection.query(statement);
  return answered(
    connection,
    asking.then(({ rows }) => rows),
  );
}

/** What compares and computes by itself. */
export const askSafely = (connection: SqlConnection, statement: Statement): Promise<readonly QueueRow[]> =>
  answered(connection, safely(connection, statement));

async function answered(
  connection: SqlConnection,
  asking: Promise<readonly QueueRow[]>,
): Promise<readonly QueueRow[]> {
  return asking.catch((error: unknown) => {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError("A table or function of queues", error)
      : error;
  });
}

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
