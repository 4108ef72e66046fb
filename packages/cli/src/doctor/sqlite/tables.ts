/** The schema. */
import type { Row } from "../../server.ts";
import { type Check, findings, promising } from "../check.ts";
import type { Own } from "../own.ts";
import { type SqlitePatient, name } from "./patient.ts";

type SqliteCheck = Check<SqlitePatient>;

/** Virtual tables bring others, whose shape is not ours to judge. */
const ordinary = (alias: string, { server }: SqlitePatient): string =>
  `${alias}.schema = 'main' AND ${alias}.type = 'table' AND ${alias}.name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND ${alias}.name NOT LIKE 'holdfast\\_%' ESCAPE '\\'
  AND substr(${alias}.name, 1, ${server.own("").length}) <> '${server.own("")}'`;

interface ForeignKey {
  readonly table: string;
  readonly parent: string;
  readonly columns: readonly string[];
  /** Null: the parent's primary key. */
  readonly to: readonly (string | null)[];
}

async function foreignKeys(patient: SqlitePatient): Promise<ForeignKey[]> {
  const rows =
    await patient.look(`SELECT t.name AS "table", f.id, f."table" AS parent, f."from" AS "column", f."to" AS target
FROM pragma_table_list t, pragma_foreign_key_list(t.name) f WHERE ${ordinary("t", patient)} ORDER BY t.name, f.id, f.seq`);
  return [...Map.groupBy(rows, (row) => JSON.stringify([row["table"], row["id"]])).values()].map((of) => ({
    table: String(of[0]?.["table"]),
    parent: String(of[0]?.["parent"]),
    columns: of.map((row) => String(row["column"])),
    to: of.map((row) => (row["target"] === null ? null : String(row["target"]))),
  }));
}

/** Columns of each index, in order. A table's own INTEGER PRIMARY KEY has no index: it is one. */
async function indexes(
  patient: SqlitePatient,
): Promise<
  Map<string, { readonly columns: readonly string[]; readonly unique: boolean; readonly partial: boolean }[]>
> {
  const rows =
    await patient.look(`SELECT t.name AS "table", i.name AS "index", i."unique", i.partial, x.name AS "column"
FROM pragma_table_list t, pragma_index_list(t.name) i, pragma_index_info(i.name) x WHERE t.schema = 'main' AND t.type = 'table' ORDER BY 1, 2, x.seqno`);
  const keys =
    await patient.look(`SELECT t.name AS "table", '' AS "index", 1 AS "unique", 0 AS partial, c.name AS "column"
FROM pragma_table_list t, pragma_table_info(t.name) c WHERE t.schema = 'main' AND t.type = 'table' AND c.pk > 0 ORDER BY 1, c.pk`);
  const found = new Map<string, { columns: string[]; unique: boolean; partial: boolean }[]>();
  for (const of of Map.groupBy([...rows, ...keys], (row: Row) =>
    JSON.stringify([row["table"], row["index"]]),
  ).values()) {
    const table = String(of[0]?.["table"]);
    found.set(table, [
      ...(found.get(table) ?? []),
      {
        columns: of.map((row) => String(row["column"])),
        unique: Number(of[0]?.["unique"]) === 1,
        partial: Number(of[0]?.["partial"]) === 1,
      },
    ]);
  }
  return found;
}

const same = (a: string, b: string): boolean => a.toLowerCase() === b.toLowerCase();

const foreignKeyIndex: SqliteCheck = {
  id: "fk-index",
  title: "a foreign key has no index on its own columns",
  async run(patient) {
    const there = await indexes(patient);
    const bare = (await foreignKeys(patient)).filter(
      ({ table, columns }) =>
        !there
          .get(table)
          ?.some(
            (index) =>
              !index.partial &&
              columns.every((column) =>
                index.columns.slice(0, columns.length).some((each) => same(each, column)),
              ),
          ),
    );
    return findings(
      "warning",
      "Deleting a row that it points to reads this whole table, and nobody else can write to the file meanwhile.",
      bare.map(({ table, columns, parent }) => ({
        what: `${name(table)} (${columns.map(name).join(", ")}) → ${name(parent)} has no index`,
        fix: `CREATE INDEX ${name(`${table}_${columns.join("_")}`)} ON ${name(table)} (${columns.map(name).join(", ")});`,
      })),
    );
  },
};

/** Of each table: enough to see that it happens, however large the table is. */
const sample = 1000;

const danglingRows: SqliteCheck = {
  id: "foreign-keys",
  title: `rows point to nothing: some connection writes without foreign_keys (the newest ${sample} rows of each table)`,
  async run(patient) {
    const tables = await patient.look(
      `SELECT t.name AS "table", t.wr FROM pragma_table_list t WHERE t.schema = 'main'`,
    );
    const rowless = new Set(
      tables.filter((row) => Number(row["wr"]) === 1).map((row) => String(row["table"])),
    );
    const there = await indexes(patient);
    const found: { what: string; fix: string }[] = [];
    for (const { table, parent, columns, to } of await foreignKeys(patient)) {
      const keys = there.get(parent) ?? [];
      const targets = to.map((column, i) => column ?? keys.find((key) => key.unique)?.columns[i] ?? "rowid");
      // The parent is looked up by its key, or it would be read in full for each row.
      if (!keys.some((key) => targets.every((target) => key.columns.some((column) => same(column, target)))))
        continue;
      const order = rowless.has(table) ? "" : " ORDER BY rowid DESC";
      const [row] = await patient.look(
        `SELECT count(*) AS n FROM (SELECT * FROM ${name(table)}${order} LIMIT ${sample}) c WHERE ${columns.map((column) => `c.${name(column)} IS NOT NULL`).join(" AND ")}
AND NOT EXISTS (SELECT 1 FROM ${name(parent)} p WHERE ${columns.map((column, i) => `p.${name(targets[i] ?? "")} = c.${name(column)}`).join(" AND ")})`,
      );
      if (Number(row?.["n"]) > 0)
        found.push({
          what: `${name(table)} (${columns.map(name).join(", ")}) → ${name(parent)}: ${String(row?.["n"])} rows point to nothing`,
          fix: `PRAGMA foreign_keys = ON;   -- on every connection, right after it is opened\nPRAGMA foreign_key_check(${name(table)});`,
        });
    }
    return findings(
      "error",
      "SQLite obeys foreign keys only on connections that say so: checked here, written there, the row may be gone meanwhile.",
      found,
    );
  },
};

const primaryKey: SqliteCheck = {
  id: "primary-key",
  title: "a table has no primary key",
  async run(patient) {
    const rows =
      await patient.look(`SELECT t.name AS "table" FROM pragma_table_list t WHERE ${ordinary("t", patient)}
AND NOT EXISTS (SELECT 1 FROM pragma_table_info(t.name) c WHERE c.pk > 0) ORDER BY 1`);
    return findings(
      "warning",
      "Rows cannot be named by a key (tx.rows needs one), and the same row can be there twice.",
      rows.map((row) => ({
        what: `${name(String(row["table"]))} has no primary key`,
        fix: `CREATE TABLE ${name(`new_${String(row["table"])}`)} (id INTEGER PRIMARY KEY, …);   -- copy the rows, drop the old table, rename`,
      })),
    );
  },
};

const idempotencyKeys: SqliteCheck = {
  id: "idempotency-keys",
  title: "a column named like an idempotency key is not unique",
  async run(patient) {
    const there = await indexes(patient);
    const rows = await patient.look(
      `SELECT t.name AS "table", c.name AS "column" FROM pragma_table_list t, pragma_table_info(t.name) c WHERE ${ordinary("t", patient)} ORDER BY 1, 2`,
    );
    const bare = rows.filter((row) => {
      const [table, column] = [String(row["table"]), String(row["column"])];
      return (
        promising.test(column) &&
        !there.get(table)?.some((index) => index.unique && index.columns.some((each) => same(each, column)))
      );
    });
    return findings(
      "warning",
      "Two calls with the same key, one after the other, both write. Only a unique index stops the second.",
      bare.map((row) => {
        const [table, column] = [String(row["table"]), String(row["column"])];
        return {
          what: `${name(table)} (${name(column)}) is in no unique index`,
          fix: `CREATE UNIQUE INDEX ${name(`${table}_${column}`)} ON ${name(table)} (${name(column)});`,
        };
      }),
    );
  },
};

export const sqliteOwn: Own<SqlitePatient> = {
  async applied(patient) {
    const [row] = await patient.look("SELECT count(*) AS n FROM sqlite_schema WHERE name = ?", [
      patient.server.own("migration"),
    ]);
    if (Number(row?.["n"]) === 0) return undefined;
    return new Set(
      (await patient.look(`SELECT id FROM ${patient.server.own("migration")}`)).map(({ id }) => Number(id)),
    );
  },
  async keys(patient) {
    const there = await indexes(patient);
    const tables = await patient.look(
      "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table'",
    );
    return new Map(
      tables.map((row) => {
        const table = String(row["name"]);
        const keys = (there.get(table) ?? []).filter(({ unique, partial }) => unique && !partial);
        return [table, keys.map(({ columns }) => columns.join(","))];
      }),
    );
  },
  quote: name,
};

export const tableChecks: readonly SqliteCheck[] = [
  foreignKeyIndex,
  danglingRows,
  primaryKey,
  idempotencyKeys,
];
