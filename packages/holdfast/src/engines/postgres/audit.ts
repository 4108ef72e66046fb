import type { Audits, WrittenLine } from "../../audit/store.ts";
import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { written } from "./hidden.ts";
import { namesOf } from "./dialect.ts";
import { failureOf } from "./locks/index.ts";
import { safely } from "./search-path.ts";
import { milliseconds as ms } from "./values.ts";

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
    return await safely(connection, statement);
  } catch (error) {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError(`The table ${namesOf(connection).own("audit")}`, error)
      : error;
  }
}

const text = (value: unknown) => (typeof value === "string" ? value : undefined);
const parsed = (value: unknown): unknown => (typeof value === "string" ? JSON.parse(value) : undefined);

export const audits: Audits<SqlConnection> = {
  async begin(connection, { actor, action, target, details }) {
    const [row] = await ask(
      connection,
      sql`INSERT INTO ${own("audit")} (actor, action, target, details)
  VALUES (${actor}::pg_catalog.text, ${action}::pg_catalog.text, ${target}::pg_catalog.text, ${details ?? null}::pg_catalog.text::pg_catalog.jsonb) RETURNING id::pg_catalog.text AS id`,
    );
    return Number(written(connection, row, "audit")["id"]);
  },

  async end(connection, id, { outcome, result, error }) {
    await ask(
      connection,
      sql`UPDATE ${own("audit")} SET outcome = ${outcome}::pg_catalog.text, result = ${result ?? null}::pg_catalog.text::pg_catalog.jsonb, error = ${error ?? null}::pg_catalog.text,
  ended_at = pg_catalog.clock_timestamp() WHERE id = ${String(id)}::pg_catalog.text::bigint RETURNING id`,
    );
  },

  async list(connection, { before, target, most }) {
    const below = before === undefined ? sql`true` : sql`a.id < ${String(before)}::pg_catalog.text::bigint`;
    const about = target === undefined ? sql`true` : sql`a.target = ${target}::pg_catalog.text`;
    const rows = await ask(
      connection,
      sql`SELECT a.id::pg_catalog.text AS id, a.actor, a.action, a.target, a.details::pg_catalog.text AS details, a.outcome, a.result::pg_catalog.text AS result,
  a.error, ${ms("a.at")} AS at, ${ms("a.ended_at")} AS ended FROM ${own("audit")} a WHERE ${below} AND ${about}
  ORDER BY a.id DESC LIMIT ${String(most)}::pg_catalog.text::int`,
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
