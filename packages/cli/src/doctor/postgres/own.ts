import { type Check, findings } from "../check.ts";
import type { Own } from "../own.ts";
import { type PostgresPatient, name } from "./patient.ts";

export const postgresOwn: Own<PostgresPatient> = {
  async applied(patient) {
    const [row] = await patient.look("SELECT to_regclass($1) IS NOT NULL AS there", [
      patient.server.own("migration"),
    ]);
    if (row?.["there"] !== true) return undefined;
    const rows = await patient.look(`SELECT id FROM ${patient.server.own("migration")}`);
    return new Set(rows.map(({ id }) => Number(id)));
  },
  async keys(patient) {
    const rows = await patient.look(
      `SELECT c.relname AS "table",
  (SELECT string_agg(a.attname, ',' ORDER BY k.position) FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, position)
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number WHERE k.position <= i.indnkeyatts) AS columns
FROM pg_class c LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p')`,
      [patient.server.schema],
    );
    const found = new Map<string, string[]>();
    for (const row of rows) {
      const table = patient.server.own(String(row["table"]));
      found.set(table, [
        ...(found.get(table) ?? []),
        ...(row["columns"] === null ? [] : [String(row["columns"])]),
      ]);
    }
    return found;
  },
  async volatile(patient) {
    const rows = await patient.look(
      `SELECT relname AS "table" FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND relkind = 'r' AND relpersistence = 'u' ORDER BY 1`,
      [patient.server.schema],
    );
    return rows.map((row) => ({
      table: patient.server.own(String(row["table"])),
      fix: `ALTER TABLE ${name(patient.server.schema)}.${name(String(row["table"]))} SET LOGGED;`,
    }));
  },
  quote: name,
};

export const rowSecurityCheck: Check<PostgresPatient> = {
  id: "row-security",
  title: "row-level security hides rows of Holdfast's own tables",
  async run(patient) {
    const rows = await patient.look(
      `SELECT relname AS "table", relforcerowsecurity AS forced FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND relkind IN ('r', 'p') AND relrowsecurity ORDER BY 1`,
      [patient.server.schema],
    );
    return findings(
      "error",
      "What is granted is decided by all rows of a table. For a role that does not see them all, calls fail with HF_ROWS_HIDDEN.",
      rows.map((row) => {
        const table = `${name(patient.server.schema)}.${name(String(row["table"]))}`;
        return {
          what: `row-level security is on for ${patient.server.own(String(row["table"]))}, for ${row["forced"] === true ? "its owner too" : "every role but its owner"}`,
          fix: `ALTER TABLE ${table} DISABLE ROW LEVEL SECURITY${row["forced"] === true ? ", NO FORCE ROW LEVEL SECURITY" : ""};`,
        };
      }),
    );
  },
};
