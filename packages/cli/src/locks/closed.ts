import type { Server } from "../server.ts";

/** Which of our own tables somebody has for itself, or waits to: whoever reads them waits, and who looks at locks must not. */
export async function closedTables(
  { kind, query, schema }: Server,
  names: readonly string[],
): Promise<string[]> {
  if (kind !== "postgres") return [];
  const rows = await query(
    `SELECT DISTINCT c.relname AS name FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
      WHERE l.mode = 'AccessExclusiveLock' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $2) AND c.relname = ANY ($1::text[])`,
    [names, schema],
  );
  return rows.map(({ name }) => String(name)).toSorted();
}
