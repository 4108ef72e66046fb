/** What is written down of migrations, and whether the table that it is in is ours. */
import type { Migration, SqlConnection } from "./database.ts";
import { SchemaTakenError, message } from "./errors.ts";
import { type Statement, own, sql } from "./sql.ts";

type Recorded = Pick<Migration, "id" | "name">;

/** Reads a table that is there. `table`: its name, for people; `lacksColumn`: whether an error says that a column is missing; `where`: on which condition. */
export async function recorded(
  connection: SqlConnection,
  all: readonly Recorded[],
  table: string,
  lacksColumn: (error: unknown) => boolean,
  where?: Statement,
): Promise<Recorded[]> {
  const taken = (why: string, cause?: unknown) =>
    new SchemaTakenError(`The table ${table} is there, and is not Holdfast's: ${why}`, cause);
  const { rows } = await connection
    .query(sql`SELECT id, name FROM ${own("migration")}${where ? sql` WHERE ${where}` : sql``} ORDER BY id`)
    .catch((error: unknown) => {
      throw lacksColumn(error) ? taken(message(error), error) : error;
    });
  const known = new Map(all.map(({ id, name }) => [id, name]));
  const found = rows.map((row) => ({ id: Number(row.id), name: String(row.name) }));
  const other = found.find(({ id, name }) => !Number.isInteger(id) || (known.get(id) ?? name) !== name);
  if (other) throw taken(`its row ${String(other.id)} is called ${JSON.stringify(other.name)}`);
  return found;
}

/** The tables that these make, as their statements name them. */
export function tablesMade(
  migrations: readonly Migration[],
  print: (statement: Migration["statements"][number]) => string,
): readonly string[] {
  return migrations.flatMap(({ statements }) =>
    statements.flatMap(
      (each) => /^CREATE (?:UNLOGGED )?TABLE (?:IF NOT EXISTS )?(\S+)/.exec(print(each))?.[1] ?? [],
    ),
  );
}
