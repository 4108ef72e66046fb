/**
 * What is in the tables, kept in temporary ones, for tests that begin many times at the same place. Only tables that were
 * written to, and have changed, are brought back: others are not touched, whoever writes there.
 */
import type { Row, SqlConnection } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { type Identifier, type Statement, sql } from "../../seam/sql.ts";
import type { KeptStatement, OurSessions, WrittenTables } from "../../seam/protocol-reader.ts";

/** Test data, not a copy of production. */
const mostRows = 50_000;

interface Table {
  readonly key: string;
  readonly name: Identifier;
  readonly copy: Identifier;
  readonly columns: Statement;
}

export async function keep(connection: SqlConnection): Promise<KeptStatement> {
  await refuseTriggers(connection);
  const others = await Others.of(connection);
  const tables = await tablesOf(connection);
  const reach = await KeepReach.of(
    connection,
    tables.map(({ key }) => key),
  );
  await lenient(connection, () => copyAll(connection, tables));
  const before = await checksums(connection, tables);
  return {
    async restore(written, ours) {
      const reached = reach.of(written);
      const touched = reached === "anything" ? tables : tables.filter(({ key }) => reached.has(key));
      const alone = () => others.refuse(ours, reached === "anything");
      await alone();
      const now = await checksums(connection, touched);
      const changed = touched.filter(({ key }) => now.get(key) !== before.get(key));
      // The rows are locked by then: whoever has come meanwhile has written nothing that would be lost.
      if (changed.length > 0) await lenient(connection, () => restore(connection, changed, alone));
    },
    async forget() {
      for (const { copy } of tables) await connection.query(sql`DROP TEMPORARY TABLE IF EXISTS ${copy}`);
    },
  };
}

/** They cannot be turned off. */
async function refuseTriggers(connection: SqlConnection): Promise<void> {
  const [row] = (
    await connection.query(
      sql`SELECT event_object_table AS name FROM information_schema.triggers WHERE trigger_schema = DATABASE() LIMIT 1`,
    )
  ).rows;
  if (row)
    throw new UsageError(
      `explore: ${String(row["name"])} has triggers, which would run when its rows are brought back; say with \`reset\` how the data is`,
    );
}

async function tablesOf(connection: SqlConnection): Promise<Table[]> {
  const { rows } = await connection.query(sql`
    SELECT c.table_name AS tablename, c.column_name AS columnname, c.extra AS extra FROM information_schema.columns c
    JOIN information_schema.tables t ON t.table_schema = c.table_schema AND t.table_name = c.table_name
    WHERE c.table_schema = DATABASE() AND t.table_type IN ('BASE TABLE', 'SYSTEM VERSIONED')
    ORDER BY c.table_name, c.ordinal_position`);
  return [...Map.groupBy(rows, (row) => String(row["tablename"]))].map(([name, columns], i) => ({
    key: name.toLowerCase(),
    name: sql.id(name),
    copy: sql.id(`holdfast_kept_${i}`),
    columns: sql.join(
      columns
        .filter(({ extra }) => !/\b(VIRTUAL|STORED|PERSISTENT) GENERATED\b/i.test(String(extra)))
        .map(({ columnname }) => sql.id(String(columnname))),
    ),
  }));
}

/** Which tables statements can have written, beyond those that they name. */
class KeepReach {
  readonly #tables: ReadonlySet<string>;
  readonly #along: ReadonlyMap<string, readonly Row[]>;
  /** Functions of somebody's own, and views. */
  readonly #unknown: ReadonlySet<string>;
  readonly #database: string;

  constructor(
    tables: readonly string[],
    along: readonly Row[],
    unknown: ReadonlySet<string>,
    database: string,
  ) {
    this.#tables = new Set(tables);
    this.#along = Map.groupBy(along, (row) => String(row["parent"]));
    this.#unknown = unknown;
    this.#database = database;
  }

  static async of(connection: SqlConnection, tables: readonly string[]): Promise<KeepReach> {
    const along = await connection.query(sql`
      SELECT LOWER(referenced_table_name) AS parent, LOWER(table_name) AS child
      FROM information_schema.referential_constraints WHERE constraint_schema = DATABASE()
        AND NOT (delete_rule IN ('RESTRICT', 'NO ACTION') AND update_rule IN ('RESTRICT', 'NO ACTION'))`);
    const unknown = await connection.query(sql`
      SELECT LOWER(routine_name) AS name FROM information_schema.routines WHERE routine_schema = DATABASE()
      UNION SELECT LOWER(table_name) AS name FROM information_schema.views WHERE table_schema = DATABASE()`);
    const { rows } = await connection.query(sql`SELECT LOWER(DATABASE()) AS name`);
    return new KeepReach(
      tables,
      along.rows,
      new Set(unknown.rows.map((row) => String(row["name"]))),
      String(rows[0]?.["name"]),
    );
  }

  of({ anything, tables, calls }: WrittenTables): ReadonlySet<string> | "anything" {
    const found = new Set<string>();
    if (anything || [...calls].some((call) => this.#unknown.has(call))) return "anything";
    for (const name of tables) {
      const [table = "", database = this.#database] = name.split(".").toReversed();
      // Of another database, or temporary.
      if (database !== this.#database) continue;
      if (this.#unknown.has(table)) return "anything";
      if (this.#tables.has(table)) found.add(table);
    }
    // Grows while it is gone through.
    for (const table of found)
      for (const row of this.#along.get(table) ?? []) found.add(String(row["child"]));
    return found;
  }
}

async function copyAll(connection: SqlConnection, tables: readonly Table[]): Promise<void> {
  let rows = 0;
  for (const { name, copy, columns } of tables) {
    // One row too many is enough to know, and a table of millions is not copied for that.
    const { affected } = await connection.query(
      sql`CREATE TEMPORARY TABLE ${copy} AS SELECT ${columns} FROM ${name} LIMIT ${sql.raw(String(mostRows - rows + 1))}`,
    );
    rows += affected;
    if (rows > mostRows)
      throw new UsageError(
        `explore: more than ${mostRows.toLocaleString("en")} rows in this database; say with \`reset\` how the data is brought back`,
      );
  }
}

/** Of the rows, as the server adds them up: their order does not count. */
async function checksums(
  connection: SqlConnection,
  tables: readonly Table[],
): Promise<ReadonlyMap<string, string>> {
  if (tables.length === 0) return new Map();
  const { rows } = await connection.query(sql`CHECKSUM TABLE ${sql.join(tables.map(({ name }) => name))}`);
  return new Map(
    rows.map((row) => {
      const [table, sum] = Object.values(row);
      return [String(table).split(".").at(-1)?.toLowerCase() ?? "", String(sum)];
    }),
  );
}

interface KeepSession {
  readonly id: string;
  readonly who: string;
  /** Undefined: it is here by another way than TCP. */
  readonly port: number | undefined;
  readonly self: boolean;
  /** Another one after every statement. */
  readonly mark: string;
}

/** Sessions in this database, as far as this user may see them: its own, or all with the privilege PROCESS. */
async function sessionsOf(connection: SqlConnection, mariadb: boolean): Promise<KeepSession[]> {
  const { rows } = await connection.query(
    mariadb
      ? sql`SELECT id AS id, user AS user, host AS host, id = CONNECTION_ID() AS self, query_id AS mark
          FROM information_schema.processlist WHERE db = DATABASE() AND command <> 'Daemon'`
      : sql`SELECT p.id AS id, p.user AS user, p.host AS host, p.id = CONNECTION_ID() AS self, s.variable_value AS mark
          FROM performance_schema.processlist p JOIN performance_schema.threads t ON t.processlist_id = p.id
          JOIN performance_schema.status_by_thread s ON s.thread_id = t.thread_id AND s.variable_name = 'Questions'
          WHERE p.db = DATABASE() AND p.command <> 'Daemon'`,
  );
  return rows.map((row) => {
    const [, port] = /:(\d+)$/.exec(String(row["host"])) ?? [];
    return {
      id: String(row["id"]),
      who: `${String(row["user"])}@${String(row["host"])}`,
      port: port === undefined ? undefined : Number(port),
      self: Number(row["self"]) === 1,
      mark: String(row["mark"]),
    };
  });
}

/**
 * Other people's sessions that have done anything since: what they wrote into the same tables could not be told from what the
 * actors did.
 */
class Others {
  readonly #connection: SqlConnection;
  readonly #mariadb: boolean;
  readonly #marks: ReadonlyMap<string, string>;

  constructor(connection: SqlConnection, mariadb: boolean, sessions: readonly KeepSession[]) {
    this.#connection = connection;
    this.#mariadb = mariadb;
    this.#marks = new Map(sessions.map(({ id, mark }) => [id, mark]));
  }

  static async of(connection: SqlConnection): Promise<Others> {
    const { rows } = await connection.query(sql`SELECT VERSION() AS version`);
    const mariadb = /mariadb/i.test(String(rows[0]?.["version"]));
    return new Others(connection, mariadb, await sessionsOf(connection, mariadb));
  }

  async refuse({ ports }: OurSessions, anything: boolean): Promise<void> {
    const all = await sessionsOf(this.#connection, this.#mariadb);
    const isOurs = ({ self, port }: KeepSession) => self || (port !== undefined && ports.has(port));
    if (all.some(({ self, port }) => self && !ports.has(port ?? -1))) {
      // Something stands between: nobody here can be known by the port.
      if (!anything) return;
      throw new UsageError(
        "explore: what the actors write is not known from their statements (a function, a view, several at once), and this process cannot know its own sessions through what stands between it and the server: say with `reset` how the data is brought back",
      );
    }
    const others = all.filter((each) => !isOurs(each) && this.#marks.get(each.id) !== each.mark);
    if (others.length === 0) return;
    const named = others.slice(0, 3).map(({ id, who }) => `session ${id} of ${who}`);
    throw new UsageError(
      `explore: others are at work in this database (${named.join(", ")}${others.length > 3 ? ", …" : ""}), and what they write could be lost when the tables are brought back, so nothing was: use a database of its own, or say with \`reset\` how the data is brought back`,
    );
  }
}

/** Counters of AUTO_INCREMENT go on: to set one back takes 40 ms on MariaDB. */
async function restore(
  connection: SqlConnection,
  tables: readonly Table[],
  check: () => Promise<void>,
): Promise<void> {
  await connection.query(sql.raw("START TRANSACTION"));
  try {
    for (const { name, copy, columns } of tables) {
      await connection.query(sql`DELETE FROM ${name}`);
      await connection.query(sql`INSERT INTO ${name} (${columns}) SELECT ${columns} FROM ${copy}`);
    }
    await check();
    await connection.query(sql.raw("COMMIT"));
  } catch (error) {
    await connection.query(sql.raw("ROLLBACK"));
    throw error;
  }
}

/** Rows are taken as they are, in any order; and an actor that left its transaction open is told. */
async function lenient(connection: SqlConnection, body: () => Promise<void>): Promise<void> {
  await connection.query(
    sql.raw(`SET @holdfast_checks = @@foreign_key_checks, @holdfast_mode = @@sql_mode,
      @holdfast_wait = @@innodb_lock_wait_timeout, @holdfast_patience = @@lock_wait_timeout,
      SESSION foreign_key_checks = 0, SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO',
      SESSION innodb_lock_wait_timeout = 10, SESSION lock_wait_timeout = 10`),
  );
  try {
    await body();
  } finally {
    await connection.query(
      sql.raw(`SET SESSION foreign_key_checks = @holdfast_checks, SESSION sql_mode = @holdfast_mode,
        SESSION innodb_lock_wait_timeout = @holdfast_wait, SESSION lock_wait_timeout = @holdfast_patience`),
    );
  }
}
