/** The schema: yours, and Holdfast's. */
import { type Check, type Finding, findings, promising } from "../check.ts";
import type { Own } from "../own.ts";
import { type MysqlPatient, name } from "./patient.ts";

type MysqlCheck = Check<MysqlPatient>;

/** Not those of the server itself, if its own database was named. */
const here =
  "t.table_schema = DATABASE() AND t.table_schema NOT IN ('mysql', 'sys', 'performance_schema', 'information_schema')";

const ordinary = ({ server }: MysqlPatient): string =>
  `${here} AND t.table_type = 'BASE TABLE' AND t.table_name NOT LIKE 'holdfast\\\\_%' AND LEFT(t.table_name, ${server.own("").length}) <> '${server.own("")}'`;

const engines: MysqlCheck = {
  id: "engine",
  title: "a table's engine has no transactions (MyISAM, Aria, MEMORY…)",
  async run(patient) {
    const rows =
      await patient.look(`SELECT t.table_name AS name, t.engine AS engine FROM information_schema.tables t
JOIN information_schema.engines e ON e.engine = t.engine
WHERE ${here} AND t.table_type = 'BASE TABLE' AND COALESCE(e.transactions, 'NO') <> 'YES' ORDER BY 1 LIMIT 1000`);
    const found: Finding[] = findings(
      "error",
      "Nothing is rolled back there, and no row is locked: FOR UPDATE excludes nobody, and foreign keys are ignored.",
      rows.map((row) => ({
        what: `${name(String(row["name"]))} is ${String(row["engine"])}`,
        fix: `ALTER TABLE ${name(String(row["name"]))} ENGINE = InnoDB;`,
      })),
    );
    const usual = (await patient.settings()).get("default_storage_engine") ?? "InnoDB";
    if (!/^innodb$/i.test(usual))
      found.push({
        severity: "warning",
        what: `default_storage_engine is ${usual}`,
        why: "The next table that is made without saying so has no transactions.",
        fix: patient.maria
          ? "SET GLOBAL default_storage_engine = InnoDB;   -- and in my.cnf"
          : "SET PERSIST default_storage_engine = InnoDB;",
      });
    return found;
  },
};

const primaryKey: MysqlCheck = {
  id: "primary-key",
  title: "a table has no primary key",
  async run(patient) {
    const rows =
      await patient.look(`SELECT t.table_name AS name, EXISTS (SELECT 1 FROM information_schema.columns c WHERE c.table_schema = t.table_schema AND c.table_name = t.table_name AND c.column_name = 'id') AS id
FROM information_schema.tables t WHERE ${ordinary(patient)} AND NOT EXISTS (SELECT 1 FROM information_schema.statistics s
  WHERE s.table_schema = t.table_schema AND s.table_name = t.table_name AND s.index_name = 'PRIMARY') ORDER BY 1 LIMIT 1000`);
    return findings(
      "warning",
      "Rows cannot be locked in one order (tx.rows needs the key), the same row can be there twice, and clusters refuse the table.",
      rows.map((row) => ({
        what: `${name(String(row["name"]))} has no primary key`,
        fix:
          Number(row["id"]) === 1
            ? `ALTER TABLE ${name(String(row["name"]))} ADD PRIMARY KEY (\`id\`);`
            : `ALTER TABLE ${name(String(row["name"]))} ADD COLUMN \`id\` BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY;`,
      })),
    );
  },
};

/** InnoDB makes the index of the referencing columns itself, and does not let it go. What it allows is a parent that is not unique. */
const foreignKeyIndex: MysqlCheck = {
  id: "fk-index",
  title: "a foreign key points to columns that are not unique",
  async run(patient) {
    const rows =
      await patient.look(`SELECT k.table_name AS child, k.constraint_name AS fk, k.referenced_table_name AS parent,
  GROUP_CONCAT(k.referenced_column_name ORDER BY k.ordinal_position) AS cols, COUNT(*) AS n
FROM information_schema.key_column_usage k WHERE k.table_schema = DATABASE() AND k.referenced_table_name IS NOT NULL
GROUP BY k.table_name, k.constraint_name, k.referenced_table_name LIMIT 1000`);
    const unique =
      await patient.look(`SELECT s.table_name AS name, s.index_name AS idx, GROUP_CONCAT(s.column_name ORDER BY s.seq_in_index) AS cols
FROM information_schema.statistics s WHERE s.table_schema = DATABASE() AND s.non_unique = 0 GROUP BY s.table_name, s.index_name`);
    const keys = new Set(unique.map((row) => key(row["name"], row["cols"])));
    return findings(
      "warning",
      "Several rows can be the parent, and InnoDB locks all of them, with the gaps between, for each row that is written.",
      rows
        .filter((row) => !keys.has(key(row["parent"], row["cols"])))
        .map((row) => {
          const columns = String(row["cols"]).split(",").map(name).join(", ");
          return {
            what: `${String(row["fk"])} of ${name(String(row["child"]))} points to ${name(String(row["parent"]))} (${columns}), which is not unique`,
            fix: `ALTER TABLE ${name(String(row["parent"]))} ADD UNIQUE (${columns});`,
          };
        }),
    );
  },
};

/** In any order: a key of (b, a) is as unique. */
const key = (table: unknown, columns: unknown): string =>
  JSON.stringify([table, String(columns).toLowerCase().split(",").toSorted()]);

const idempotencyKeys: MysqlCheck = {
  id: "idempotency-keys",
  title: "a column named like an idempotency key is not unique",
  async run(patient) {
    const rows =
      await patient.look(`SELECT c.table_name AS name, c.column_name AS col FROM information_schema.columns c
JOIN information_schema.tables t ON t.table_schema = c.table_schema AND t.table_name = c.table_name
WHERE ${ordinary(patient)} AND (c.column_name LIKE 'idempoten%' OR c.column_name LIKE 'dedup%') AND NOT EXISTS (SELECT 1 FROM information_schema.statistics s
  WHERE s.table_schema = c.table_schema AND s.table_name = c.table_name AND s.column_name = c.column_name AND s.non_unique = 0) ORDER BY 1, 2 LIMIT 1000`);
    return findings(
      "warning",
      "Two calls with the same key at once both look, both find nothing, and both write. Only a unique index stops the second.",
      rows
        .filter((row) => promising.test(String(row["col"])))
        .map((row) => ({
          what: `${name(String(row["name"]))} (${name(String(row["col"]))}) is in no unique index`,
          fix: `ALTER TABLE ${name(String(row["name"]))} ADD UNIQUE (${name(String(row["col"]))});`,
        })),
    );
  },
};

export const mysqlOwn: Own<MysqlPatient> = {
  async seesRoutines(patient) {
    // Each shows the user its own privileges only. A role's are not among them: then it is not said that they are missing.
    const rows = await patient.look(`SELECT 1 FROM information_schema.user_privileges
      WHERE privilege_type IN ('EXECUTE', 'CREATE ROUTINE', 'ALTER ROUTINE', 'SHOW_ROUTINE')
      UNION ALL SELECT 1 FROM information_schema.schema_privileges
      WHERE privilege_type IN ('EXECUTE', 'CREATE ROUTINE', 'ALTER ROUTINE') AND DATABASE() LIKE table_schema LIMIT 1`);
    return rows.length > 0;
  },
  async applied(patient) {
    const [row] = await patient.look(
      "SELECT COUNT(*) AS n FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?",
      [patient.server.own("migration")],
    );
    if (Number(row?.["n"]) === 0) return undefined;
    return new Set(
      (await patient.look(`SELECT id FROM ${patient.server.own("migration")}`)).map(({ id }) => Number(id)),
    );
  },
  async keys(patient) {
    const tables = await patient.look(
      "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE() AND LEFT(table_name, CHAR_LENGTH(?)) = ?",
      [patient.server.own(""), patient.server.own("")],
    );
    const rows = await patient.look(
      `SELECT s.table_name AS name, s.index_name AS idx, GROUP_CONCAT(s.column_name ORDER BY s.seq_in_index) AS cols
FROM information_schema.statistics s WHERE s.table_schema = DATABASE() AND s.non_unique = 0 AND LEFT(s.table_name, CHAR_LENGTH(?)) = ? GROUP BY s.table_name, s.index_name`,
      [patient.server.own(""), patient.server.own("")],
    );
    return new Map(
      tables.map((table) => [
        String(table["name"]),
        rows.filter((row) => row["name"] === table["name"]).map((row) => String(row["cols"])),
      ]),
    );
  },
  quote: name,
};

export const tableChecks: readonly MysqlCheck[] = [engines, primaryKey, foreignKeyIndex, idempotencyKeys];
