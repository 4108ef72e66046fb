/**
 * SQLite as the generic stores see it. Whoever writes is the file's only writer from its BEGIN IMMEDIATE on: what it reads is locked
 * already, in one order with everybody, and what it decides on it is still true when it is written. docs/decisions/0037-one-writer.md
 */
import type { Result, SqlConnection } from "../../seam/database.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import type { StoreDialect } from "../sql/dialect.ts";
import { type ColumnKind, type Table, kindOf, mayBeNull } from "../sql/table.ts";
import { ask, asWriter, insist } from "./begin.ts";
import { clock } from "./clock.ts";
import { type SqliteConnection, dialect, render } from "./dialect.ts";
import { explained, failureOf, isBusy } from "./errors.ts";

/** A connection as stores use it. Outside of transactions they only read: without WAL a COMMIT of somebody's keeps them out for a moment. */
export class StoreConnection implements SqlConnection {
  readonly on: SqliteConnection;
  readonly lost: AbortSignal;
  /** It is the writer. */
  writes = false;

  constructor(on: SqliteConnection) {
    this.on = on;
    this.lost = on.lost;
  }

  async query(statement: Statement): Promise<Result> {
    const { on } = this;
    try {
      if (!on.inTransaction) return await ask(on, statement);
      return await (on.prepared ? on.prepared(statement) : on.query(statement));
    } catch (error) {
      throw explained(error);
    }
  }
}

/**
 * Clients are synchronous, or as good as that: what they are awaited for is there at once, so a worker with enough to do would let
 * neither timers nor sockets have their turn. They get it between two transactions, after so long.
 */
const breathMs = 5;
let breathedAt = 0;

async function breathe(): Promise<void> {
  if (performance.now() - breathedAt < breathMs) return;
  await new Promise((resolve) => setImmediate(resolve));
  breathedAt = performance.now();
}

/**
 * Numbers have no type, so that one beyond what JavaScript counts exactly ("unlimited", a moment in the far future) stays the REAL
 * that it is bound as: of integers that large, clients say that they cannot read them.
 */
const types: Readonly<Record<ColumnKind, string>> = {
  text: " text",
  json: " text",
  integers: " text",
  boolean: " integer",
  integer: "",
  moment: "",
  serial: " integer",
};

const list = (names: readonly string[]) => names.map((name) => dialect.quote(name)).join(", ");

/** Numbers of sequences, which are not given twice, also if the rows that had them are gone. */
export const sequenceTable: Statement = sql`CREATE TABLE IF NOT EXISTS ${own("sequence")} (
  name text NOT NULL PRIMARY KEY,
  given integer NOT NULL
) WITHOUT ROWID`;

const micros = sql`(${clock} * 1000)`;
const moment = sql`SELECT ${micros} AS given`;
const nextMoment = sql`INSERT INTO ${own("sequence")} (name, given) VALUES ('moment', ${micros})
  ON CONFLICT (name) DO UPDATE SET given = CASE WHEN given BETWEEN excluded.given AND excluded.given + 998 THEN given + 1 ELSE excluded.given END
  RETURNING given`;

const texts = new WeakMap<Names, WeakMap<Statement, string>>();

/** Of a statement that comes again and again: written once. */
function textOf(statement: Statement, names = dialect.names): string {
  let known = texts.get(names);
  if (!known) texts.set(names, (known = new WeakMap()));
  let text = known.get(statement);
  if (text === undefined) known.set(statement, (text = render(statement, names).text));
  return text;
}

async function writing<T>(connection: StoreConnection, work: () => Promise<T>): Promise<T> {
  connection.writes = true;
  try {
    return await work();
  } finally {
    connection.writes = false;
  }
}

function plain(kind: ColumnKind, value: unknown): unknown {
  if (value === undefined || (value === null && kind !== "json")) return null;
  return kind === "json" || kind === "integers" ? JSON.stringify(value) : value;
}

export const storeDialect: StoreDialect<StoreConnection> = {
  table: (name) => sql`${own(name)}`,
  clock: micros,

  // SQLite's clock has milliseconds. What is written within one of them gets the next microsecond, whoever writes it; a clock that was set
  // back is believed.
  async now(connection) {
    const { rows } = await connection.query(connection.writes ? nextMoment : moment);
    return Number(rows[0]?.["given"]);
  },

  read: (_, column) => column,

  write: (kind, value) => sql`${plain(kind, value)}`,
  plain,

  locking: () => sql``,

  insertMissing: (table, columns, values) =>
    sql`INSERT INTO ${own(table.name)} (${columns}) VALUES ${values} ON CONFLICT DO NOTHING`,

  // Those of this process stand in line, those of others try again.
  async transaction(connection, waitMs, work) {
    await breathe();
    return asWriter(connection.on, waitMs, () => writing(connection, work));
  },

  atOnce(connection, waitMs, work) {
    const { on } = connection;
    if (!on.atOnce) return undefined;
    const ask = (statement: Statement, values: readonly unknown[] = []) => {
      try {
        return (on as Required<SqliteConnection>).atOnce(textOf(statement, on.names), values);
      } catch (error) {
        throw explained(error);
      }
    };
    const now = () => Number(ask(nextMoment)[0]?.["given"]);
    return (async () => {
      await breathe();
      return asWriter(on, waitMs, () => work({ ask, now }), {
        ending: (value) => (value === undefined ? "rollback" : "commit"),
        atOnce: true,
      });
    })();
  },

  /** One that only reads is refused by SQLite itself, when it is to write. A caller's own may not be the writer yet. */
  async inside(connection, _, work) {
    const { on } = connection;
    if (!on.begun) await insist(on, true);
    return on.begun?.readOnly ? work() : writing(connection, work);
  },

  optimistic: false,
  failure: ({ on }, error) => (isBusy(on, error) ? "lock-timeout" : failureOf(on, error)),

  // Whoever has taken some is the writer, for whom everybody waits anyway. If it rolls back, they are given again, in the order of commits.
  async numbers(connection, sequence, count) {
    const { rows } = await connection.query(
      sql`INSERT INTO ${own("sequence")} (name, given) VALUES (${sequence}, ${count})
  ON CONFLICT (name) DO UPDATE SET given = given + excluded.given RETURNING given`,
    );
    const last = Number(rows[0]?.["given"]);
    return Array.from({ length: count }, (_, i) => last - count + 1 + i);
  },

  create(table: Table) {
    const { name, key, unique = [], indexes = [] } = table;
    const serial = Object.keys(table.columns).find((column) => kindOf(table, column) === "serial");
    const columns = Object.keys(table.columns).map((column) => {
      const type = types[kindOf(table, column)];
      // AUTOINCREMENT: a number is not given again when its row is gone.
      if (column === serial) return `${dialect.quote(column)}${type} PRIMARY KEY AUTOINCREMENT`;
      return `${dialect.quote(column)}${type}${mayBeNull(table, column) ? "" : " NOT NULL"}`;
    });
    const keys = [
      `${serial === undefined ? "PRIMARY KEY" : "UNIQUE"} (${list(key)})`,
      ...unique.map((names) => `UNIQUE (${list(names)})`),
    ];
    // Rows are found by their key: kept in its order they need no second tree.
    const kept = serial === undefined ? " WITHOUT ROWID" : "";
    return [
      sql`CREATE TABLE IF NOT EXISTS ${own(name)} (
  ${sql.raw([...columns, ...keys].join(",\n  "))}
)${sql.raw(kept)}`,
      ...indexes.map(
        (names) =>
          sql`CREATE INDEX IF NOT EXISTS ${own(`${name}_by_${names.join("_")}`)} ON ${own(name)} (${sql.raw(list(names))})`,
      ),
    ];
  },
};
