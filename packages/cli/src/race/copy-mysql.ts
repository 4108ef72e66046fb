/** A database of the run's own on somebody's MySQL or MariaDB: with their tables and rows in it, or empty. */
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import { type OwnDatabase, quoted } from "../own-database.ts";
import type { Row, Server, Session } from "../server.ts";

/** Larger ones take long to copy, and room that somebody may need. */
const mostBytes = 1024 ** 3;

/** `keeper` stays: whoever finds the database sees by its lock that it is in use. */
export async function makeMysql(
  server: Server,
  own: OwnDatabase,
  empty: boolean,
  keeper: Session,
): Promise<void> {
  await keeper.query("SELECT GET_LOCK(?, 0)", [own.name]);
  const [it] = await keeper.query("SELECT DATABASE() AS name");
  const name = it?.["name"] == null ? undefined : String(it["name"]);
  if (name !== undefined && !empty) await refuseLarge(keeper, name);
  await create(server, own, keeper);
  if (name === undefined || empty) return;
  try {
    await copy(server, keeper, name, own.name);
  } catch (error) {
    if (error instanceof Failure) throw error;
    throw new Failure(
      `Could not copy "${name}" on ${server.shown}: ${describe(error)}. --empty takes an empty database in place of a copy.`,
      { cause: error },
    );
  }
}

async function refuseLarge(session: Session, name: string): Promise<void> {
  const [row] = await session.query(
    "SELECT COALESCE(SUM(data_length + index_length), 0) AS bytes FROM information_schema.tables WHERE table_schema = ?",
    [name],
  );
  const bytes = Number(row?.["bytes"]);
  if (bytes > mostBytes)
    throw new Failure(
      `"${name}" has ${(bytes / 1024 ** 3).toFixed(1)} GB, and race copies at most ${mostBytes / 1024 ** 3} GB. Name one with less in it; --empty takes an empty database in place of a copy.`,
    );
}

async function create(server: Server, own: OwnDatabase, session: Session): Promise<void> {
  const [set] = await session.query(
    "SELECT @@character_set_database AS chars, @@collation_database AS collation",
  );
  try {
    await own.make(() =>
      session.query(
        `CREATE DATABASE ${quoted(server, own.name)} CHARACTER SET ${String(set?.["chars"])} COLLATE ${String(set?.["collation"])}`,
      ),
    );
  } catch (error) {
    const { code } = error as { code?: unknown };
    if (code !== "ER_DBACCESS_DENIED_ERROR" && code !== "ER_ACCESS_DENIED_ERROR") throw error;
    throw new Failure(
      `${server.shown}: this user may not create a database, and race runs in one of its own: GRANT ALL ON \`holdfast\\_race\\_%\`.* TO … If no database is named (HOLDFAST_URL= DATABASE_URL= holdfast race …), it runs on a PostgreSQL of its own.`,
      { cause: error },
    );
  }
}

interface Thing {
  readonly name: string;
  readonly text: string;
  readonly mode: string | undefined;
}

/** Reads only. Events are left out: they would begin to run. */
async function copy(server: Server, session: Session, from: string, to: string): Promise<void> {
  const id = (name: string) => quoted(server, name);
  const [set] = await session.query("SELECT @@sql_mode AS mode");
  // Rows are read as they are, without locks that others would wait for.
  await session.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED");
  await session.query("SET SESSION foreign_key_checks = 0, SESSION unique_checks = 0");
  const named = async (text: string) =>
    (await session.query(text, [from])).map((row) => String(Object.values(row)[0]));
  const tables = await named(
    "SELECT table_name FROM information_schema.tables WHERE table_schema = ? AND table_type IN ('BASE TABLE', 'SYSTEM VERSIONED')",
  );
  const views = await named("SELECT table_name FROM information_schema.views WHERE table_schema = ?");
  const triggers = await named(
    "SELECT trigger_name FROM information_schema.triggers WHERE trigger_schema = ? ORDER BY action_order",
  );
  const functions = await named(
    "SELECT routine_name FROM information_schema.routines WHERE routine_schema = ? AND routine_type = 'FUNCTION'",
  );
  const procedures = await named(
    "SELECT routine_name FROM information_schema.routines WHERE routine_schema = ? AND routine_type = 'PROCEDURE'",
  );
  const read = async (kind: string, names: readonly string[]): Promise<Thing[]> => {
    const all: Thing[] = [];
    for (const name of names)
      all.push(thing(name, (await session.query(`SHOW CREATE ${kind} ${id(name)}`))[0] ?? {}, from));
    return all;
  };
  const things = [
    await read("TABLE", tables),
    await read("FUNCTION", functions),
    await read("PROCEDURE", procedures),
    await read("VIEW", views),
  ];
  const last = await read("TRIGGER", triggers);
  const columns = await Promise.all(tables.map((table) => columnsOf(session, from, table, id)));

  await session.query(`USE ${id(to)}`);
  for (const all of things) await makeAll(session, all);
  await session.query("SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO'");
  for (const [i, table] of tables.entries())
    if (columns[i])
      await session.query(
        `INSERT INTO ${id(table)} (${columns[i]}) SELECT ${columns[i]} FROM ${id(from)}.${id(table)}`,
      );
  await makeAll(session, last);
  await session.query("SET SESSION sql_mode = ?", [String(set?.["mode"])]);
}

function thing(name: string, row: Row, database: string): Thing {
  const [, found] = Object.entries(row).find(([title]) => /^create |^sql original/i.test(title)) ?? [];
  if (typeof found !== "string") throw new Failure(`This user may not see how ${name} was made.`);
  // What names its database would reach the original from the copy.
  const word = database.replaceAll(/[.*+?^${}()|[\]\\]/g, String.raw`\$&`);
  if (new RegExp(`(?:\`${word}\`|(?<![\\w$])${word})\\s*\\.`, "i").test(found))
    throw new Failure(
      `${name} names its database in its text ("${database}."), so that a copy of it would reach the original. --empty takes an empty database in place of a copy.`,
    );
  return { name, text: found, mode: typeof row["sql_mode"] === "string" ? row["sql_mode"] : undefined };
}

async function columnsOf(
  session: Session,
  database: string,
  table: string,
  id: (name: string) => string,
): Promise<string> {
  const rows = await session.query(
    "SELECT column_name AS name, extra AS extra FROM information_schema.columns WHERE table_schema = ? AND table_name = ? ORDER BY ordinal_position",
    [database, table],
  );
  return rows
    .filter(({ extra }) => !/\b(VIRTUAL|STORED|PERSISTENT) GENERATED\b/i.test(String(extra)))
    .map((row) => id(String(row["name"])))
    .join(", ");
}

/** Those that need others come after them, in as many rounds as it takes. */
async function makeAll(session: Session, things: readonly Thing[]): Promise<void> {
  for (let left = things; left.length > 0;) {
    const failed: Thing[] = [];
    let reason: unknown;
    for (const each of left) {
      try {
        if (each.mode !== undefined) await session.query("SET SESSION sql_mode = ?", [each.mode]);
        await session.query(each.text);
      } catch (error) {
        reason = error;
        failed.push(each);
      }
    }
    if (failed.length === left.length) throw reason;
    left = failed;
  }
}
