/** What a role needs that uses every pattern and lock. Functions run with the rights of their caller, so tables are granted too. */
import type { Rights, SqlConnection } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { type Right, each, listed, onTables } from "../../seam/rights.ts";
import type { Routine } from "../../seam/routine.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { dialect, longest, render, schemaOf } from "./dialect.ts";
import { arrayText } from "./values.ts";

const sequence = (...names: readonly string[]): Right => ({
  kind: "sequence",
  privileges: ["USAGE"],
  names,
});

/** SELECT … FOR UPDATE, or FOR any other lock, needs UPDATE as well. */
export const tableRights: readonly Right[] = [
  onTables("SELECT", "migration origin routine"),
  onTables("SELECT, INSERT", "agreed stock_movement"),
  onTables(
    "SELECT, INSERT, UPDATE",
    "audit lock queue quota_bucket resource schedule stock_level stock_reservation",
  ),
  onTables("SELECT, INSERT, DELETE", "queue_mark quota_hold stock_reserved"),
  onTables(
    "SELECT, INSERT, UPDATE, DELETE",
    "exec_run lease once schedule_run quota_grant quota_line",
    "queue_delayed queue_failed queue_group queue_grouped queue_key queue_lease queue_ready queue_worker",
  ),
  sequence("fence", "queue_job_id", "queue_lease_id_seq", "queue_worker_id_seq"),
  // It is compared by calls that go by a map of shards, and changed by none but `renumber`.
  { kind: "sequence", privileges: ["SELECT"], names: ["map_epoch"] },
];

/** The generic stores take numbers that a column gives otherwise. */
export const genericRights: readonly Right[] = [...tableRights, sequence("audit_id_seq", "queue_id_seq")];

/** Trigger functions are run by whatever fires them; views are for people. */
function isCalled(text: string): boolean {
  return text.startsWith("CREATE OR REPLACE FUNCTION") && !/RETURNS trigger/i.test(text);
}

/** What a terminal would act upon, or not show. */
const unseen = /[\p{C}\u2028\u2029]/u;

function roleName(role: string): string {
  const refuse = (why: string) => {
    throw new UsageError(`hf.grantSql: ${JSON.stringify(role)} cannot be a role: ${why}`);
  };
  if (Buffer.byteLength(role) > longest)
    refuse(`PostgreSQL keeps ${longest} bytes of a name, and would grant to another one`);
  // Quoted or not.
  if (role === "public") refuse("it would grant to everybody. Name a role of your own");
  const quoted = dialect.quote(role);
  if (!unseen.test(quoted)) return quoted;
  const code = (character: string) => `\\+${character.codePointAt(0)?.toString(16).padStart(6, "0") ?? ""}`;
  return `U&${quoted.replaceAll("\\", "\\\\").replaceAll(new RegExp(unseen, "gu"), code)}`;
}

const kinds = { schema: "SCHEMA ", table: "", sequence: "SEQUENCE ", routine: "FUNCTION " } as const;

function grantsIn(names: Names, rights: readonly Right[], role: string): readonly string[] {
  const to = roleName(role);
  return rights.map(({ kind, privileges, names: things }) => {
    const written = kind === "schema" ? [schemaOf(names)] : things.map((name) => names.own(name));
    return `GRANT ${privileges.join(", ")} ON ${kinds[kind]}${written.join(", ")} TO ${to}`;
  });
}

/** By the catalogs: of a schema that the role may not use, nothing else can be asked. What is not there is not lacking. */
function lackingOf(
  rights: readonly Right[],
  kind: Right["kind"],
  has: string,
  catalog: Statement,
): Statement {
  const asked = each(rights, kind);
  const list = (values: readonly string[]) =>
    sql`pg_catalog.unnest(${arrayText(values)}::pg_catalog.text::pg_catalog.text[])`;
  return sql`SELECT w.name, w.privilege FROM ROWS FROM (${list(asked.map(({ name }) => name))}, ${list(asked.map(({ privilege }) => privilege))}) w (name, privilege)
  JOIN ${catalog} ON c.name OPERATOR(pg_catalog.=) w.name AND c.schema OPERATOR(pg_catalog.=) ${own.schema}
  WHERE NOT pg_catalog.${sql.raw(has)}(c.oid, w.privilege)`;
}

const relations = sql`(SELECT r.oid, r.relname::pg_catalog.text AS name, n.nspname::pg_catalog.text AS schema FROM pg_catalog.pg_class r JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) r.relnamespace) c`;
const functions = sql`(SELECT p.oid, p.proname::pg_catalog.text AS name, n.nspname::pg_catalog.text AS schema FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace) c`;
const schemas = sql`(SELECT n.oid, n.nspname::pg_catalog.text AS name, n.nspname::pg_catalog.text AS schema FROM pg_catalog.pg_namespace n) c`;

export function rightsIn(
  names: Names,
  tables: readonly Right[],
  routines: readonly Routine[],
): Rights<SqlConnection> {
  // When it is asked for: few processes ever do.
  const all = (): readonly Right[] => {
    const called = routines
      .filter(({ statement }) => isCalled(render(statement, names).text))
      .map(({ name }) => name.slice(names.schema.length + 1));
    return [
      { kind: "schema", privileges: ["USAGE"], names: [names.schema] },
      ...tables,
      { kind: "routine", privileges: ["EXECUTE"], names: called },
    ];
  };
  return {
    grants: (role) => grantsIn(names, all(), role),
    async lacking(connection) {
      const rights = all();
      const questions = [
        lackingOf(rights, "schema", "has_schema_privilege", schemas),
        lackingOf(rights, "table", "has_table_privilege", relations),
        lackingOf(rights, "sequence", "has_sequence_privilege", relations),
        lackingOf(rights, "routine", "has_function_privilege", functions),
      ];
      const { rows } = await connection.query(sql.join(questions, "\nUNION ALL "));
      return listed(
        rows.map(({ name, privilege }) => ({
          privilege: String(privilege),
          name: name === names.schema ? `the schema ${schemaOf(names)}` : names.own(String(name)),
        })),
      );
    },
  };
}
