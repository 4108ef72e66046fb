import type { Audits, WrittenLine } from "../../audit/store.ts";
import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { failureOf } from "./locks/index.ts";

export const auditTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("audit")} (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  actor text NOT NULL,
  action text NOT NULL,
  target text COLLATE "C" NOT NULL,
  details jsonb,
  outcome text NOT NULL DEFAULT 'begun' CHECK (outcome IN ('begun', 'done', 'failed')),
  result jsonb,
  error text,
  ended_at timestamptz
)`,
  sql`CREATE INDEX IF NOT EXISTS audit_target ON ${own("audit")} (target, id)`,
];

async function ask(connection: SqlConnection, statement: Statement): Promise<Record<string, unknown>[]> {
  try {
    return (await connection.query(statement)).rows as Record<string, unknown>[];
  } catch (error) {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError(`The table ${namesOf(connection).own("audit")}`, error)
      : error;
  }
}

const ms = (column: string) => sql.raw(`(extract(epoch FROM ${column}) * 1000)::float8`);
const text = (value: unknown) => (typeof value === "string" ? value : undefined);
const parsed = (value: unknown): unknown => (typeof value === "string" ? JSON.parse(value) : undefined);

export const audits: Audits<SqlConnection> = {
  async begin(connection, { actor, action, target, details }) {
    const [row] = await ask(
      connection,
      sql`INSERT INTO ${own("audit")} (actor, action, target, details)
  VALUES (${actor}::text, ${action}::text, ${target}::text, ${details ?? null}::text::jsonb) RETURNING id::text AS id`,
    );
    return Number(row?.["id"]);
  },

  async end(connection, id, { outcome, result, error }) {
    await ask(
      connection,
      sql`UPDATE ${own("audit")} SET outcome = ${outcome}::text, result = ${result ?? null}::text::jsonb, error = ${error ?? null}::text,
  ended_at = clock_timestamp() WHERE id = ${String(id)}::text::bigint`,
    );
  },

  async list(connection, { before, target, most }) {
    const below = before === undefined ? sql`true` : sql`a.id < ${String(before)}::text::bigint`;
    const about = target === undefined ? sql`true` : sql`a.target = ${target}::text`;
    const rows = await ask(
      connection,
      sql`SELECT a.id::text AS id, a.actor, a.action, a.target, a.details::text AS details, a.outcome, a.result::text AS result,
  a.error, ${ms("a.at")} AS at, ${ms("a.ended_at")} AS ended FROM ${own("audit")} a WHERE ${below} AND ${about}
  ORDER BY a.id DESC LIMIT ${String(most)}::text::int`,
    );
    return rows.map((row): WrittenLine => ({
      id: Number(row["id"]),
      at: Number(row["at"]),
      actor: String(row["actor"]),
      action: String(row["action"]),
      target: String(row["target"]),
      details: parsed(row["details"]),
      outcome: row["outcome"] as WrittenLine["outcome"],
      result: parsed(row["result"]),
      error: text(row["error"]),
      ended: row["ended"] === null ? undefined : Number(row["ended"]),
    }));
  },
};
