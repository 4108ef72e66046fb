/** The schema: yours. */
import { type Check, type Finding, findings, promising } from "../check.ts";
import { type PostgresPatient, name, table } from "./patient.ts";

type PostgresCheck = Check<PostgresPatient>;

/** Tables of people: no system's, no extension's, nobody's temporary ones. */
const ordinary = (
  alias: string,
  { server }: PostgresPatient,
): string => `${alias}.relkind IN ('r', 'p') AND ${alias}.relpersistence <> 't' AND NOT ${alias}.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'holdfast', '${server.schema}') AND n.nspname NOT LIKE 'pg\\_%'
  AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass AND e.objid = ${alias}.oid AND e.deptype = 'e')`;

const columns = (numbers: string, relation: string): string =>
  `(SELECT array_agg(a.attname::text ORDER BY k.position) FROM unnest(${numbers}) WITH ORDINALITY AS k (number, position)
    JOIN pg_attribute a ON a.attrelid = ${relation} AND a.attnum = k.number)`;

const list = (value: unknown): string => (value as string[]).map(name).join(", ");

const foreignKeyIndex: PostgresCheck = {
  id: "fk-index",
  title: "a foreign key has no index on its own columns",
  async run(patient) {
    const rows =
      await patient.look(`SELECT n.nspname AS schema, t.relname AS "table", ${columns("c.conkey", "c.conrelid")} AS columns,
  c.confrelid::regclass::text AS parent, t.relkind = 'p' AS partitioned
FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid JOIN pg_namespace n ON n.oid = t.relnamespace
WHERE c.contype = 'f' AND c.conparentid = 0 AND ${ordinary("t", patient)}
  AND NOT EXISTS (SELECT FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam
    WHERE i.indrelid = c.conrelid AND i.indisvalid AND i.indpred IS NULL AND m.amname IN ('btree', 'hash')
      AND i.indnkeyatts >= cardinality(c.conkey)
      AND (string_to_array(i.indkey::text, ' ')::int2[])[1:cardinality(c.conkey)] @> c.conkey)
ORDER BY t.reltuples DESC, 1, 2, c.conname LIMIT 1000`);
    return findings(
      "warning",
      "Deleting a row that it points to, or changing that row's key, reads this whole table for rows that point back, and keeps the row locked meanwhile.",
      rows.map((row) => ({
        what: `${table(row)} (${list(row["columns"])}) → ${String(row["parent"])} has no index`,
        fix: `CREATE INDEX ${row["partitioned"] === true ? "" : "CONCURRENTLY "}ON ${table(row)} (${list(row["columns"])});`,
      })),
    );
  },
};

const primaryKey: PostgresCheck = {
  id: "primary-key",
  title: "a table has no primary key",
  async run(patient) {
    const rows = await patient.look(`SELECT n.nspname AS schema, c.relname AS "table",
  EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'id' AND NOT a.attisdropped) AS id,
  (SELECT x.relname FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate
    AND i.indpred IS NULL AND i.indexprs IS NULL AND NOT EXISTS (SELECT FROM unnest(i.indkey::int2[]) AS k (number)
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number WHERE NOT a.attnotnull) LIMIT 1) AS unique_index
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE ${ordinary("c", patient)} AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary) ORDER BY c.reltuples DESC, 1, 2 LIMIT 1000`);
    return findings(
      "warning",
      "Rows cannot be locked in one order (tx.rows needs the key), the same row can be there twice, and replicas cannot tell which one was changed.",
      rows.map((row) => ({
        what: `${table(row)} has no primary key`,
        fix:
          row["unique_index"] === null
            ? row["id"] === true
              ? `ALTER TABLE ${table(row)} ADD PRIMARY KEY ("id");`
              : `ALTER TABLE ${table(row)} ADD COLUMN "id" bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY;`
            : `ALTER TABLE ${table(row)} ADD PRIMARY KEY USING INDEX ${name(String(row["unique_index"]))};`,
      })),
    );
  },
};

const invalidIndex: PostgresCheck = {
  id: "invalid-index",
  title: "an index was not built to its end, and is not used",
  async run(patient) {
    const rows =
      await patient.look(`SELECT n.nspname AS schema, x.relname AS "table", t.relname AS of, i.indisunique AS "unique", x.relkind = 'I' AS partitioned
FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid JOIN pg_namespace n ON n.oid = x.relnamespace
WHERE NOT i.indisvalid AND n.nspname NOT LIKE 'pg\\_%'
  AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = i.indexrelid) ORDER BY 1, 2 LIMIT 1000`);
    return rows.map((row): Finding => ({
      severity: row["unique"] === true ? "error" : "warning",
      what: `${row["unique"] === true ? "unique " : ""}index ${table(row)} on ${String(row["of"])} is invalid`,
      why:
        row["unique"] === true
          ? "CREATE UNIQUE INDEX CONCURRENTLY failed, most likely on duplicates: what is there is not unique, though the schema looks as if it were. ON CONFLICT does not use it."
          : "CREATE INDEX CONCURRENTLY failed or was stopped: queries do not use it, every write still pays for it.",
      fix:
        row["partitioned"] === true
          ? `DROP INDEX ${table(row)};   -- or ATTACH the index of each partition that lacks one`
          : `REINDEX INDEX CONCURRENTLY ${table(row)};   -- remove duplicates first; or DROP INDEX CONCURRENTLY`,
    }));
  },
};

const idempotencyKeys: PostgresCheck = {
  id: "idempotency-keys",
  title: "a column named like an idempotency key is not unique",
  async run(patient) {
    const rows = await patient.look(
      `SELECT n.nspname AS schema, c.relname AS "table", a.attname AS column
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE ${ordinary("c", patient)} AND a.attname ~* $1
  AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND a.attnum = ANY(i.indkey::int2[]))
ORDER BY 1, 2, 3 LIMIT 1000`,
      [promising.source],
    );
    return findings(
      "warning",
      "Two calls with the same key at once both look, both find nothing, and both write. Only a unique index stops the second.",
      rows.map((row) => ({
        what: `${table(row)} (${name(String(row["column"]))}) is in no unique index`,
        fix: `CREATE UNIQUE INDEX CONCURRENTLY ON ${table(row)} (${name(String(row["column"]))});`,
      })),
    );
  },
};

export const tableChecks: readonly PostgresCheck[] = [
  foreignKeyIndex,
  primaryKey,
  invalidIndex,
  idempotencyKeys,
];
