/**
 * DuckDB as the generic stores see it. Whoever writes has the lock of the patterns, of which there is one in a database: what it reads
 * is what was committed last, and what it decides on it is still true when it is written. docs/decisions/0040-duckdb-patterns.md
 */
import { type Key, key } from "../../seam/key.ts";
import { own, sql } from "../../seam/sql.ts";
import { type StoreDialect, numberSequences } from "../sql/dialect.ts";
import { type ColumnKind, type Table, kindOf, mayBeNull } from "../sql/table.ts";
import { type DuckdbConnection, dialect } from "./dialect.ts";
import { PatternsBusy, classify, isMissingTable } from "./errors.ts";
import { begin, beganHere, end, lock } from "./locks.ts";

const types: Readonly<Record<ColumnKind, string>> = {
  text: "varchar",
  json: "varchar",
  integers: "varchar",
  boolean: "boolean",
  // What is beyond 2^53 ("unlimited") is no exact number here either; sums of bigint would be hugeint.
  integer: "double",
  moment: "double",
  serial: "bigint",
};

const sequenceOf = (name: string) => `${name}_number`;

export const sequences = numberSequences.map(
  (name) => sql`CREATE SEQUENCE IF NOT EXISTS ${own(sequenceOf(name))}`,
);

/**
 * In SQL, time stands still within a transaction. The database is part of this process: this is its clock, later than what others
 * were given before unless it was set back.
 */
let given = 0;
function moment(): number {
  const now = Date.now() * 1000;
  given = given >= now && given < now + 1000 ? given + 1 : now;
  return given;
}

const list = (names: readonly string[]) => names.map((name) => dialect.quote(name)).join(", ");
const named = (name: string) => sql`${sql.id(name)}`;

/** `schema`: each has a lock of its own. */
export function storeDialectIn(schema: string): StoreDialect<DuckdbConnection> {
  const patterns: Key = key("holdfast patterns", schema);
  const request = {
    locks: [{ key: patterns, mode: "exclusive" as const }],
    names: ["the patterns of this database"],
  };

  return {
    table: (name) => sql`${own(name)}`,
    get clock() {
      return sql`${moment()}`;
    },
    now: () => Promise.resolve(moment()),
    read: (_, column) => column,

    write(kind, value) {
      if (value === undefined || (value === null && kind !== "json")) return sql`${null}`;
      if (kind === "json" || kind === "integers") return sql`${JSON.stringify(value)}`;
      // The client takes whole numbers for BIGINT, and this is none.
      if (typeof value === "number" && !Number.isSafeInteger(value))
        return sql`CAST(${String(value)} AS double)`;
      return sql`${value}`;
    },

    locking: () => sql``,
    uniqueKeys: false,
    savepoints: false,

    // There is no unique index to ask: one that meets a row which an older snapshot still sees refuses it, though it is gone.
    insertMissing(table, columns, values) {
      const same = table.key.map((name) => sql`${sql.id("there", name)} = ${sql.id("given", name)}`);
      return sql`INSERT INTO ${own(table.name)} (${columns})
  SELECT DISTINCT ON (${sql.join(table.key.map(named))}) ${columns} FROM (VALUES ${values}) AS given (${columns})
  WHERE NOT EXISTS (SELECT 1 FROM ${own(table.name)} AS there WHERE ${sql.join(same, " AND ")})`;
    },

    async transaction(connection, waitMs, work) {
      const begun = await begin(connection, { ...request, wait: waitMs, readOnly: false });
      if (!begun.granted) throw new PatternsBusy();
      let value;
      try {
        value = await work();
      } catch (error) {
        await end(connection, "rollback").catch(() => {});
        throw error;
      }
      await end(connection, "commit");
      return value;
    },

    /** Whoever only reads sees one moment of everything, and changes nothing. */
    async inside(connection, waitMs, work) {
      const begun = beganHere(connection);
      if (begun?.readOnly) return work();
      const { granted } = await lock(connection, { ...request, wait: waitMs, joined: !begun });
      if (!granted) throw new PatternsBusy();
      return work();
    },

    optimistic: false,

    failure: (_, error) => (isMissingTable(error) ? "schema-missing" : classify(error as Error)),

    async numbers(connection, sequence, count) {
      const { rows } = await connection.query(
        sql`SELECT nextval(${own.text(sequenceOf(sequence))}) AS number FROM range(${count})`,
      );
      return rows.map((row) => Number(row["number"])).toSorted((a, b) => a - b);
    },

    // No indexes: a change of what they are on is a deletion and an insertion, which refuse each other in one transaction.
    create(table: Table) {
      const serial = Object.keys(table.columns).find((column) => kindOf(table, column) === "serial");
      const columns = Object.keys(table.columns).map((column) => {
        const type = `${list([column])} ${types[kindOf(table, column)]}`;
        const least = mayBeNull(table, column) ? type : `${type} NOT NULL`;
        return column === serial
          ? sql`${sql.raw(least)} DEFAULT nextval(${own.text(sequenceOf(table.name))})`
          : sql.raw(least);
      });
      return [
        ...(serial === undefined ? [] : [sql`CREATE SEQUENCE IF NOT EXISTS ${own(sequenceOf(table.name))}`]),
        sql`CREATE TABLE IF NOT EXISTS ${own(table.name)} (
  ${sql.join(columns, ",\n  ")}
)`,
      ];
    },
  };
}
