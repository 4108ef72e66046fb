/** MySQL and MariaDB as the generic stores see them: the same statements for both. docs/decisions/0036-patterns-on-mysql.md */
import type { SqlConnection } from "../../seam/database.ts";
import { key } from "../../seam/key.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { type Locking, type NumberSequence, type StoreDialect, numberSequences } from "../sql/dialect.ts";
import { type ColumnKind, type Table, kindOf, mayBeNull } from "../sql/table.ts";
import { boundedBy } from "../../waiting/interrupt.ts";
import { committed, oneCallNow } from "./one-call.ts";
import { onPrimary } from "./primary.ts";
import { brieflyLasting, failureOf, isMissing, lasting } from "./waits.ts";

/** Of an index, in bytes, with pages as large as they usually are. */
const longestIndex = 3072;
/** Of a text that is found by an index, in bytes: none is allowed to be longer. */
const longestText = 2000;

interface TableIndex {
  readonly name: string;
  readonly unique: boolean;
  readonly columns: readonly string[];
}

/** A number that the database gives is the primary key: who finds a row by its name, or by its number, locks both in one order. */
function indexesOf({ columns, key, unique = [], indexes = [] }: Table): readonly TableIndex[] {
  const serial = Object.keys(columns).filter((column) => columns[column] === "serial");
  const all = [
    ...(serial.length > 0 ? [serial, key] : [key]).map((names) => ({ names, unique: true })),
    ...unique.map((names) => ({ names, unique: true })),
    ...indexes.map((names) => ({ names, unique: false })),
  ];
  return all.map(({ names, unique: once }, i) => ({
    name: i === 0 ? "PRIMARY" : names.join("_"),
    unique: once,
    columns: names,
  }));
}

const byIndex = (table: Table): Statement =>
  sql`FORCE INDEX (${sql.join(indexesOf(table).map(({ name }) => sql`${sql.id(name)}`))})`;

/** As many bytes as all indexes that it is in have for each of their texts; undefined: it is in none. */
function bytesOf(table: Table, column: string): number | undefined {
  const shares = indexesOf(table)
    .filter(({ columns }) => columns.includes(column))
    .map(({ columns }) => {
      const texts = columns.filter((each) => kindOf(table, each) === "text").length;
      return Math.floor((longestIndex - 8 * (columns.length - texts)) / texts);
    });
  return shares.length > 0 ? Math.min(longestText, ...shares) : undefined;
}

/**
 * Texts that are found are bytes: they differ by case, accents and blanks at their end, their order is that of their bytes, and
 * limits of names are bytes too.
 */
function typeOf(table: Table, column: string): string {
  const kind = kindOf(table, column);
  const bytes = kind === "text" ? bytesOf(table, column) : undefined;
  return bytes === undefined ? types[kind] : `varbinary(${bytes})`;
}

/** To be read by people, and as exact. Each server reads the name that is meant for it. */
const exact = "longtext CHARACTER SET utf8mb4 COLLATE /*!80000 utf8mb4_0900_bin *//*M! utf8mb4_nopad_bin */";

const types: Readonly<Record<ColumnKind, string>> = {
  text: exact,
  integer: "bigint",
  serial: "bigint",
  moment: "bigint",
  // Not the type of that name, which is another on each server, and which some clients read by themselves.
  json: "longtext CHARACTER SET utf8mb4",
  integers: "longtext CHARACTER SET ascii",
  boolean: "boolean",
};

const lockings: Readonly<Record<Exclude<Locking, "current">, Statement>> = {
  update: sql`FOR UPDATE`,
  skip: sql`FOR UPDATE SKIP LOCKED`,
  // MariaDB has no other word for it.
  share: sql`LOCK IN SHARE MODE`,
};

/** In a transaction of ours, which is READ COMMITTED: each statement sees what there is. */
const ours = new WeakSet<SqlConnection>();

const point = "holdfast_store";

/** As the server says it, who would have waited longer. */
class StillLocked extends Error {
  readonly errno = 1205;
  constructor() {
    super("a row that somebody else has was not waited for any longer");
  }
}

/** In whole seconds, as the server counts. MySQL takes 0 for 1. */
const secondsOf = (waitMs: number): number => (waitMs <= 1 ? 0 : Math.min(Math.ceil(waitMs / 1000), 1e8));

/** The table that counts. */
export const counterOf = (sequence: NumberSequence) => `number_${sequence}`;

/** Of numbers: no row stays in them. */
export const counters: readonly Statement[] = numberSequences.map(
  (sequence) =>
    sql`CREATE TABLE IF NOT EXISTS ${own(counterOf(sequence))} (id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY) ENGINE=InnoDB`,
);

/** So many in one statement: MariaDB makes a join of longer lists. */
const mostNumbers = 500;

/** Rows of whole numbers, as one value: a SELECT for each of 500 took the server ten times as long to read as to delete them. */
function listed(columns: readonly string[], rows: readonly (readonly unknown[])[]): Statement {
  const each = columns.map((column, i) => sql`${sql.id(column)} bigint PATH ${sql.raw(`'$[${i}]'`)}`);
  return sql`JSON_TABLE(${JSON.stringify(rows)}, '$[*]' COLUMNS (${sql.join(each)}))`;
}

function givenRows(
  table: Table,
  columns: readonly string[],
  rows: readonly (readonly unknown[])[],
): Statement {
  const kinds = columns.map((column) => kindOf(table, column));
  if (kinds.every((kind) => kind === "integer" || kind === "moment")) return listed(columns, rows);
  const selects = rows.map((values, i) => {
    const bound = values.map((value, j) => sql`${plain(kinds[j] as ColumnKind, value)}`);
    const named = bound.map((value, j) => sql`${value} AS ${sql.id(columns[j] as string)}`);
    return sql`SELECT ${sql.join(i === 0 ? named : bound)}`;
  });
  return sql`(${sql.join(selects, " UNION ALL ")})`;
}

/** The first number, and how far the next one is from it. */
async function given(
  connection: SqlConnection,
  count: number,
  insertId: number | undefined,
): Promise<[number, number]> {
  if (count === 1 && insertId) return [insertId, 1];
  const {
    rows: [row],
  } = await connection.query(sql`SELECT LAST_INSERT_ID() AS first, @@auto_increment_increment AS step`);
  return [Number(row?.["first"]), Number(row?.["step"])];
}

/**
 * A counter in a row would be locked from its first use to the COMMIT. What is inserted is deleted at once; both are committed, so that
 * a replica that takes over knows how far it was counted.
 */
async function count(connection: SqlConnection, sequence: NumberSequence, most: number): Promise<number[]> {
  const counter = own(counterOf(sequence));
  const rows = sql.raw(Array.from({ length: most }, () => "(NULL)").join());
  const { insertId } = await connection.query(sql`INSERT INTO ${counter} (id) VALUES ${rows}`);
  const [first, step] = await given(connection, most, insertId);
  const numbers = Array.from({ length: most }, (_, i) => first + i * step);
  await connection.query(
    sql`DELETE c FROM ${listed(
      ["id"],
      numbers.map((number) => [number]),
    )} given STRAIGHT_JOIN ${counter} c FORCE INDEX (PRIMARY) ON c.id = given.id`,
  );
  return numbers;
}

/** What a call has written is undone, and the caller's transaction goes on: here a statement that fails undoes no more than itself. */
async function undo(connection: SqlConnection): Promise<void> {
  for (let attempt = 1; !connection.lost.aborted; attempt++)
    try {
      await connection.query(sql.raw(`ROLLBACK TO SAVEPOINT ${point}`));
      return;
    } catch (error) {
      // The server has undone the whole transaction.
      if (isMissing(connection, error)) return;
      // An abort may end this very statement; the next one comes after it.
      if (attempt === 3 || failureOf(connection, error) !== "canceled") throw error;
    }
}

const clock = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/**
 * SYSDATE goes on during a statement, as the session's zone shows it: what has passed since its beginning is the same in all. Not if the
 * zone puts its clocks forward or back meanwhile, nor if the server takes SYSDATE for NOW (--sysdate-is-now): nothing takes no time at all.
 */
const passed = "TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))";
const mostPassed = 1_000_000_000;

/** Texts as bytes: the connection's character set need not have all of theirs. */
function plain(kind: ColumnKind, value: unknown): unknown {
  if (value === undefined || value === null) return null;
  switch (kind) {
    case "text":
      return Buffer.from(String(value));
    case "json":
      return Buffer.from(JSON.stringify(value));
    case "integers":
      return JSON.stringify(value);
    case "boolean":
      return value ? 1 : 0;
    default:
      return value;
  }
}

/** What GET_LOCK calls the lock of a session's number. */
const sessionLockName = "holdfast:session:";

export const storeDialect: StoreDialect<SqlConnection> = {
  sessionLocks: {
    key: (number) => key.getLock(`${sessionLockName}${number}`),
    isFree: (number) => sql`IS_FREE_LOCK(CONCAT(${sql.raw(`'${sessionLockName}'`)}, ${number})) = 1`,
  },
  table: (name) => sql`${own(name)}`,
  clock: sql.raw(clock),
  lockedClock: sql.raw(`CASE WHEN ${passed} BETWEEN 1 AND ${mostPassed} THEN ${clock} + ${passed} END`),

  // As bytes, too.
  read: (kind, column) => (kind === "text" || kind === "json" ? sql`CAST(${column} AS BINARY)` : column),

  onPrimary,

  write: (kind, value) => sql`${plain(kind, value)}`,
  plain,

  committed,

  locking: (how, connection) =>
    how === "current" ? (ours.has(connection) ? sql`` : lockings.share) : lockings[how],

  // InnoDB locks every row that it looks at, and waits for those of others: a small table it would read from end to end.
  indexed: byIndex,

  // A plain DELETE takes no such hint, and one of several tables reads no ranges: they are looked up one by one.
  removing(table, columns, rows) {
    const same = columns.map((column) => sql`${sql.id("t", column)} = ${sql.id("given", column)}`);
    return sql`DELETE t FROM ${givenRows(table, columns, rows)} given
  STRAIGHT_JOIN ${own(table.name)} t ${byIndex(table)} ON ${sql.join(same, " AND ")}`;
  },

  // IGNORE locks what is there in share mode, and two who go on to change that wait for each other; but ON DUPLICATE KEY counts it
  // as affected if the client wants to know how many rows were found, as most do.
  insertMissing(table, columns, values, counted) {
    const into = sql`INTO ${own(table.name)} (${columns}) VALUES ${values}`;
    if (counted) return sql`INSERT IGNORE ${into}`;
    const first = sql.id(table.key[0] as string);
    return sql`INSERT ${into} ON DUPLICATE KEY UPDATE ${first} = ${first}`;
  },

  transaction: (connection, waitMs, work) =>
    brieflyLasting(connection, secondsOf(waitMs), async () => {
      ours.add(connection);
      try {
        return await work();
      } finally {
        ours.delete(connection);
      }
    }),

  oneCall: oneCallNow,

  async briefly(connection, ms, work) {
    // A client that cannot ask for it waits for a second, which is the least that the server can.
    if (!connection.cancel) return work();
    const done = await boundedBy(connection, ms, work);
    if (!done) throw new StillLocked();
    return done.value;
  },

  inside: (connection, waitMs, work) =>
    lasting(connection, secondsOf(waitMs), async () => {
      // It is not released: savepoints that work has set would go with it.
      await connection.query(sql.raw(`SAVEPOINT ${point}`));
      try {
        return await work();
      } catch (error) {
        await undo(connection);
        throw error;
      }
    }),

  // Whether an UPDATE tells how many rows it has found or changed is the client's choice.
  optimistic: false,
  failure: failureOf,
  // MariaDB takes 16 MB at once unless it was told otherwise; a character has up to three bytes, and some clients write two digits for each.
  largest: 2 * 1024 * 1024,

  async numbers(connection, sequence, most) {
    const numbers: number[] = [];
    while (numbers.length < most)
      numbers.push(...(await count(connection, sequence, Math.min(mostNumbers, most - numbers.length))));
    return numbers;
  },

  create(table) {
    const columns = Object.keys(table.columns).map((column) => {
      const needed = mayBeNull(table, column) ? "" : " NOT NULL";
      const given = kindOf(table, column) === "serial" ? " AUTO_INCREMENT" : "";
      return sql`${sql.id(column)} ${sql.raw(`${typeOf(table, column)}${needed}${given}`)}`;
    });
    const indexes = indexesOf(table).map(({ name, unique, columns: of }) => {
      const list = sql.join(of.map((column) => sql`${sql.id(column)}`));
      if (name === "PRIMARY") return sql`PRIMARY KEY (${list})`;
      return sql`${sql.raw(unique ? "UNIQUE KEY" : "KEY")} ${sql.id(name)} (${list})`;
    });
    return [
      sql`CREATE TABLE IF NOT EXISTS ${own(table.name)} (
  ${sql.join([...columns, ...indexes], ",\n  ")}
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC`,
    ];
  },
};
