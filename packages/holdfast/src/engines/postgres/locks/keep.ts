/**
 * What is in the tables, kept in temporary ones, for tests that begin many times at the same place. Only what was written is
 * brought back, row by row: other tables are not touched, whoever writes there.
 */
import type { SqlConnection } from "../../../seam/database.ts";
import { UsageError } from "../../../seam/errors.ts";
import { sql } from "../../../seam/sql.ts";
import type { KeptStatement, OurSessions } from "../../../seam/protocol-reader.ts";
import { inSafeTransaction, inTransaction } from "../search-path.ts";
import { type Relation, RelationReach } from "../transaction/written-tables.ts";

/** Test data, not a copy of production. */
const mostRows = 50_000;

interface Table extends Relation {
  /** Quoted. */
  readonly id: string;
  readonly copy: string;
  readonly columns: readonly string[];
  /** Of its rows, to find them again: columns, and how the unique index compares each. */
  readonly key: readonly { readonly column: string; readonly equals: string }[];
  /** Those that an UPDATE may set. */
  readonly settable: readonly string[];
  /** Foreign keys lead to it. */
  readonly referenced: boolean;
  readonly parents: readonly string[];
}

interface Sequence {
  /** Quoted. */
  readonly id: string;
  readonly name: string;
  readonly value: string;
  readonly called: boolean;
  /** Tables that own it, or whose defaults ask it. */
  readonly tables: readonly string[];
}

export async function keep(connection: SqlConnection): Promise<KeptStatement> {
  const { rows } = await connection.query(
    sql`SELECT ${mark} AS mark, pg_catalog.array_to_json(pg_catalog.current_schemas(true))::pg_catalog.text AS path
      FROM pg_catalog.pg_stat_activity a WHERE a.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()`,
  );
  const before: ReadonlySet<unknown> = new Set(rows.map((row) => row["mark"]));
  const path = JSON.parse(String(rows[0]?.["path"] ?? "[]")) as string[];
  const { tables, sequences, reach } = await inSafeTransaction(connection, async () => ({
    tables: await tablesOf(connection),
    sequences: await sequencesOf(connection),
    reach: await RelationReach.of(connection, path),
  }));
  await copyAll(connection, tables);
  const replica = await mayReplicate(connection);
  return {
    async restore(written, ours) {
      const oids = reach.of(written);
      const touched = oids === "anything" ? tables : tables.filter(({ oid }) => oids.has(oid));
      const asked = sequences.filter(
        (each) =>
          oids === "anything" ||
          each.tables.some((oid) => oids.has(oid)) ||
          [each.name, each.name.split(".")[1] ?? ""].some((name) => written.sequences.has(name)),
      );
      const alone = () => refuseOthers(connection, before, ours, oids === "anything");
      if (touched.length + asked.length === 0) return alone();
      await inTransaction(connection, async () => {
        // An actor that left its transaction open is told; and nobody writes between the look and what follows.
        await connection.query(sql.raw("SET LOCAL lock_timeout = '10s'"));
        if (touched.length > 0)
          await connection.query(
            sql.raw(
              `LOCK TABLE ${touched.map(({ id }) => `ONLY ${id}`).join(", ")} IN SHARE ROW EXCLUSIVE MODE`,
            ),
          );
        await alone();
        await connection.query(sql.raw(restoring(touched, asked, replica)));
        if (!replica) await verify(connection, touched);
      });
    },
    async forget() {
      for (const { copy } of tables) await connection.query(sql.raw(`DROP TABLE IF EXISTS ${copy}`));
    },
  };
}

/** Neither triggers nor foreign keys, for those who may. */
async function mayReplicate(connection: SqlConnection): Promise<boolean> {
  try {
    await inTransaction(connection, async () => {
      await connection.query(sql.raw("SET LOCAL session_replication_role = replica"));
    });
    return true;
  } catch {
    return false;
  }
}

/** Another one with every statement of a session, from its beginning. */
const mark = sql`pg_catalog.concat(a.pid, ' ', a.query_start)`;

/**
 * Other people's sessions in this database that have done anything since: what they wrote into the same tables could not be told
 * from what the actors did. Sessions of other users hide what they do (one that has just begun has no state either).
 */
async function refuseOthers(
  connection: SqlConnection,
  before: ReadonlySet<unknown>,
  { ports }: OurSessions,
  anything: boolean,
): Promise<void> {
  const { rows } = await connection.query(sql`
    SELECT a.pid, a.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() AS self, a.usename AS name, a.application_name AS application, a.client_port AS port,
      a.state IS NULL AND a.query OPERATOR(pg_catalog.=) '<insufficient privilege>' AS hidden, a.state OPERATOR(pg_catalog.=) 'idle' AS idle, ${mark} AS mark, current_user AS me
    FROM pg_catalog.pg_stat_activity a WHERE a.datname OPERATOR(pg_catalog.=) pg_catalog.current_database() AND a.usename IS NOT NULL
      AND (a.backend_type IS NULL OR a.backend_type OPERATOR(pg_catalog.=) 'client backend' OR a.backend_type OPERATOR(pg_catalog.~~) 'logical replication%')`);
  const self = rows.find((row) => row["self"] === true);
  if (!ports.has(Number(self?.["port"]))) {
    // Something stands between: nobody here can be known by the port.
    if (!anything) return;
    throw new UsageError(
      "explore: what the actors write is not known from their statements (a trigger, a function, several at once), and this process cannot know its own sessions through what stands between it and the server: say with `reset` how the data is brought back",
    );
  }
  const others = rows
    .filter((row) => row["idle"] !== true || !before.has(row["mark"]))
    .filter((row) => row["self"] !== true && !ports.has(Number(row["port"])));
  if (others.length === 0) return;
  const named = others.slice(0, 3).map((row) => {
    const application = row["application"] ? ` (${String(row["application"])})` : "";
    return `session ${String(row["pid"])} of ${String(row["name"])}${application}`;
  });
  const list = `${named.join(", ")}${others.length > 3 ? ", …" : ""}`;
  throw new UsageError(
    `explore: others are ${
      others.every((row) => row["hidden"] === true)
        ? `in this database (${list}), and this user may not see whether they are at work: GRANT pg_read_all_stats TO ${String(self?.["me"])}. What they write`
        : `at work in this database (${list}), and what they write`
    } could be lost when the tables are brought back, so nothing was: use a database of its own, or say with \`reset\` how the data is brought back`,
  );
}

/** Those that others refer to first. */
async function tablesOf(connection: SqlConnection): Promise<Table[]> {
  const { rows } = await connection.query(sql`
    SELECT c.oid::text AS oid, n.nspname AS schema, c.relname AS name, format('%I.%I', n.nspname, c.relname) AS id,
      (SELECT coalesce(json_agg(quote_ident(a.attname) ORDER BY a.attnum), '[]')::text FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '') AS columns,
      (SELECT coalesce(json_agg(quote_ident(a.attname) ORDER BY a.attnum), '[]')::text FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity <> 'a'
          AND a.attnum <> ALL (coalesce(k.indkey::int2[], '{}'))) AS settable,
      (SELECT coalesce(json_agg(json_build_object('column', quote_ident(a.attname), 'equals', format('OPERATOR(%I.%s)', s.nspname, o.oprname))), '[]')::text
        FROM unnest(k.indkey::int2[], k.indclass::oid[]) u (attnum, opclass)
          JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = u.attnum
          JOIN pg_opclass b ON b.oid = u.opclass
          JOIN pg_amop p ON p.amopfamily = b.opcfamily AND p.amoplefttype = b.opcintype AND p.amoprighttype = b.opcintype AND p.amopstrategy = 3
          JOIN pg_operator o ON o.oid = p.amopopr JOIN pg_namespace s ON s.oid = o.oprnamespace) AS key,
      EXISTS (SELECT FROM pg_constraint f WHERE f.contype = 'f' AND f.confrelid = c.oid) AS referenced,
      (SELECT coalesce(json_agg(DISTINCT f.confrelid::text), '[]')::text FROM pg_constraint f
        WHERE f.contype = 'f' AND f.conrelid = c.oid AND f.confrelid <> c.oid) AS parents
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN LATERAL (SELECT i.indkey, i.indclass FROM pg_index i
      WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
      ORDER BY i.indisprimary DESC, i.indexrelid LIMIT 1) k ON true
    WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
    ORDER BY c.oid`);
  const list = (value: unknown): string[] => JSON.parse(String(value)) as string[];
  const left = new Map(
    rows.map((row): [string, Table] => {
      const oid = String(row["oid"]);
      return [
        oid,
        {
          oid,
          schema: String(row["schema"]),
          name: String(row["name"]),
          id: String(row["id"]),
          copy: `pg_temp.holdfast_kept_${oid}`,
          columns: list(row["columns"]),
          settable: list(row["settable"]),
          key: JSON.parse(String(row["key"])) as Table["key"],
          referenced: row["referenced"] === true,
          parents: list(row["parents"]),
        },
      ];
    }),
  );
  const sorted: Table[] = [];
  while (left.size > 0) {
    const all = [...left.values()];
    // Tables that refer to each other are taken as they come.
    const table = all.find(({ parents }) => !parents.some((parent) => left.has(parent))) ?? all[0];
    if (!table) break;
    left.delete(table.oid);
    if (table.columns.length > 0) sorted.push(table);
  }
  return sorted;
}

async function sequencesOf(connection: SqlConnection): Promise<Sequence[]> {
  const { rows } = await connection.query(sql`
    SELECT format('%I.%I', s.schemaname, s.sequencename) AS id, lower(s.schemaname || '.' || s.sequencename) AS name,
      coalesce(s.last_value, s.start_value)::text AS value, s.last_value IS NOT NULL AS called,
      (SELECT coalesce(json_agg(t.oid::text), '[]')::text FROM (
        SELECT d.refobjid AS oid FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
          AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
        UNION SELECT a.adrelid FROM pg_depend d JOIN pg_attrdef a ON a.oid = d.objid
          WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid) t) AS tables
    FROM pg_sequences s JOIN pg_namespace n ON n.nspname = s.schemaname
      JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = s.sequencename
    WHERE s.schemaname !~ '^pg_'`);
  return rows.map((row) => ({
    id: String(row["id"]),
    name: String(row["name"]),
    value: String(row["value"]),
    called: row["called"] === true,
    tables: JSON.parse(String(row["tables"])) as string[],
  }));
}

async function copyAll(connection: SqlConnection, tables: readonly Table[]): Promise<void> {
  let rows = 0;
  for (const { id, copy, columns } of tables) {
    // One row too many is enough to know, and a table of millions is not copied for that.
    await connection.query(
      sql.raw(
        `CREATE TEMPORARY TABLE ${copy.replace("pg_temp.", "")} AS SELECT ${columns.join(", ")} FROM ONLY ${id} LIMIT ${mostRows - rows + 1}`,
      ),
    );
    const counted = await connection.query(
      sql.raw(`SELECT pg_catalog.count(*)::pg_catalog.int4 AS n FROM ${copy}`),
    );
    rows += Number(counted.rows[0]?.["n"]);
    if (rows > mostRows)
      throw new UsageError(
        `explore: more than ${mostRows.toLocaleString("en")} rows in this database; say with \`reset\` how the data is brought back`,
      );
  }
}

/** Whole rows as text, since not every type can be compared; and which of several that are the same. */
function numbered({ columns }: Table, from: string, more: string): string {
  const row = `ROW(${columns.join(", ")})::pg_catalog.text`;
  return `(SELECT ${more}, ${row} AS holdfast_row, pg_catalog.row_number() OVER (PARTITION BY ${row}) AS holdfast_nth FROM ${from})`;
}

/** Rows of the first that the second has not. */
function difference(table: Table, from: string, other: string, more: string): string {
  return `SELECT a.* FROM ${numbered(table, from, more)} a WHERE NOT EXISTS (
    SELECT FROM ${numbered(table, other, "1")} b WHERE b.holdfast_row OPERATOR(pg_catalog.=) a.holdfast_row AND b.holdfast_nth OPERATOR(pg_catalog.=) a.holdfast_nth)`;
}

/** One statement, so one round trip. */
function restoring(tables: readonly Table[], sequences: readonly Sequence[], replica: boolean): string {
  // A row that others refer to must stay, so that nothing of theirs goes with it: it is changed back.
  const stays = ({ referenced, key }: Table) => !replica && referenced && key.length > 0;
  const same = ({ key }: Table) =>
    key.map(({ column, equals }) => `k.${column} ${equals} t.${column}`).join(" AND ");
  const deletes = tables.toReversed().map((table) => {
    const { id, copy } = table;
    return stays(table)
      ? `DELETE FROM ONLY ${id} t WHERE NOT EXISTS (SELECT FROM ${copy} k WHERE ${same(table)});`
      : `DELETE FROM ONLY ${id} WHERE ctid OPERATOR(pg_catalog.=) ANY (SELECT d.holdfast_id FROM (${difference(table, `ONLY ${id}`, copy, "ctid AS holdfast_id")}) d);`;
  });
  const inserts = tables.map((table) => {
    const { id, copy, columns } = table;
    const missing = stays(table)
      ? `${copy} k WHERE NOT EXISTS (SELECT FROM ONLY ${id} t WHERE ${same(table)})`
      : `(${difference(table, copy, `ONLY ${id}`, columns.join(", "))}) k`;
    return `INSERT INTO ${id} (${columns.join(", ")}) OVERRIDING SYSTEM VALUE SELECT ${columns.map((each) => `k.${each}`).join(", ")} FROM ${missing};`;
  });
  const updates = tables
    .filter((table) => stays(table) && table.settable.length > 0)
    .map((table) => {
      const { id, copy, columns, settable } = table;
      const row = (of: string) =>
        `ROW(${columns.map((each) => `${of}.${each}`).join(", ")})::pg_catalog.text`;
      return `UPDATE ONLY ${id} t SET ${settable.map((each) => `${each} = k.${each}`).join(", ")} FROM ${copy} k WHERE ${same(table)} AND ${row("t")} OPERATOR(pg_catalog.<>) ${row("k")};`;
    });
  const values = sequences.map(
    ({ id, value, called }) =>
      `PERFORM pg_catalog.setval('${id.replaceAll("'", "''")}'::pg_catalog.regclass, ${value}, ${called}) FROM ${id} s
      WHERE s.last_value OPERATOR(pg_catalog.<>) ${value}::bigint OR s.is_called OPERATOR(pg_catalog.<>) ${called};`,
  );
  return `DO $holdfast$ BEGIN
    SET LOCAL extra_float_digits = 3;
    ${replica ? "SET LOCAL session_replication_role = replica;" : ""}
    ${[...deletes, ...inserts, ...updates, ...values].join("\n    ")}
  END $holdfast$`;
}

/** Where triggers could not be turned off, they may have had another opinion. */
async function verify(connection: SqlConnection, tables: readonly Table[]): Promise<void> {
  for (const table of tables) {
    const { id, copy } = table;
    const { rows } = await connection.query(
      sql.raw(
        `SELECT 1 FROM (${difference(table, `ONLY ${id}`, copy, "1")}) a UNION ALL SELECT 1 FROM (${difference(table, copy, `ONLY ${id}`, "1")}) b LIMIT 1`,
      ),
    );
    if (rows.length > 0)
      throw new UsageError(
        `explore: ${id} could not be brought back as it was: its triggers ran, which only a superuser can turn off; say with \`reset\` how the data is brought back`,
      );
  }
}
