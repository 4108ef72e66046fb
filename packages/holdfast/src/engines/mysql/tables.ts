/** Rows of the caller's: read, locked, compared and set. */
import type { Row, SqlConnection } from "../../seam/database.ts";
import { type Holder, UnsupportedError, UsageError, some } from "../../seam/errors.ts";
import { type Identifier, type Statement, isStatement, sql } from "../../seam/sql.ts";
import type { RowOrder, RowCall, RowStrength, RowSelection, TableShape, Tables } from "../../seam/tables.ts";
import { noTableLocks } from "./gaps.ts";
import { onPrimary } from "./primary.ts";
import { asHolders } from "./sessions.ts";
import { refuseUnsafe, unsafeTable } from "./storage.ts";
import { asText, bound, fromText, isInteger, written } from "./values.ts";
import { bounded, briefly, failureOf, patiently } from "./waits.ts";

type Keys = readonly (readonly unknown[])[];

const column = (name: string) => sql`t.${sql.id(name)}`;

/** Flat: a list of ten thousand keys must not be copied for each of them, as nested fragments are. */
function list(items: readonly Statement[], separator = ", "): Statement {
  const parts: string[] = [];
  const values: unknown[] = [];
  let text = "";
  items.forEach((item, i) => {
    if (i > 0) text += separator;
    text += item.parts[0];
    item.values.forEach((value, j) => {
      parts.push(text);
      values.push(value);
      text = item.parts[j + 1] as string;
    });
  });
  return sql(Object.assign([...parts, text], { raw: [] }), ...values);
}

function typeOf({ shape }: { shape: TableShape }, name: string): string {
  const type = shape.columns.get(name);
  if (type === undefined)
    throw new UsageError(
      `${shape.name} has no column ${JSON.stringify(name)}; it has ${some([...shape.columns.keys()])}`,
    );
  return type;
}

/** Of tables that were asked about: each index, and its columns. */
const indexes = new WeakMap<TableShape, ReadonlyMap<string, readonly string[]>>();

async function describe(connection: SqlConnection, table: Identifier): Promise<TableShape | undefined> {
  const [schema, name] = table.path.length === 1 ? [undefined, table.path[0]] : table.path;
  if (table.path.length > 2) return undefined;
  const which = sql`table_schema = ${schema === undefined ? sql`DATABASE()` : sql`${schema}`} AND table_name = ${name}`;
  const { rows } = await connection.query(
    sql`SELECT table_schema AS schemaname, table_name AS tablename, column_name AS columnname, column_type AS columntype, ${unsafeTable(which)} AS unsafe
      FROM information_schema.columns WHERE ${which} AND ${onPrimary} ORDER BY ordinal_position`,
  );
  if (rows.length === 0) return undefined;
  refuseUnsafe(rows[0]?.unsafe);
  const found = await connection.query(
    sql`SELECT index_name AS indexname, column_name AS columnname FROM information_schema.statistics
      WHERE ${which} AND ${onPrimary} AND sub_part IS NULL ORDER BY index_name, seq_in_index`,
  );
  const all = new Map<string, string[]>();
  for (const { indexname, columnname } of found.rows) {
    const columns = all.get(String(indexname));
    if (columns) columns.push(String(columnname));
    else all.set(String(indexname), [String(columnname)]);
  }
  const shape: TableShape = {
    name: `${String(rows[0]?.schemaname)}.${String(rows[0]?.tablename)}`,
    key: all.get("PRIMARY") ?? [],
    columns: new Map(
      rows.map(({ columnname, columntype }) => [String(columnname), String(columntype).toLowerCase()]),
    ),
  };
  indexes.set(shape, all);
  return shape;
}

/**
 * Rows are locked in the order in which an index is read, before they are sorted, and every row that is read is locked
 * or waited for. So it must be the index of the columns that name the rows, and no other.
 */
function through({ shape }: RowCall, key: readonly string[]): Statement | undefined {
  for (const [name, columns] of indexes.get(shape) ?? [])
    if (key.every((each) => columns.slice(0, key.length).includes(each)))
      return sql` FORCE INDEX (${sql.id(name)})`;
  return undefined;
}

/** ORs, not IN: MariaDB turns an IN of 1,000 values or more into a join, whose order is the optimizer's. */
function named(call: RowCall, key: readonly string[], keys: Keys): Statement {
  const one = (values: readonly unknown[]) =>
    list(
      key.map((name, i) => sql`${column(name)} = ${bound(values[i], typeOf(call, name))}`),
      " AND ",
    );
  return sql`(${list(
    keys.map((values) => one(values)),
    " OR ",
  )})`;
}

function condition(call: RowCall, where: unknown): Statement {
  if (isStatement(where)) return sql`(${where})`;
  const parts = Object.entries(where as Record<string, unknown>).map(([name, value]) => {
    const type = typeOf(call, name);
    if (value === null) return sql`${column(name)} IS NULL`;
    if (!Array.isArray(value)) return sql`${column(name)} = ${bound(value, type)}`;
    if (value.length === 0) return sql.raw("FALSE");
    return sql`${column(name)} IN (${list(value.map((each) => bound(each, type)))})`;
  });
  return list(parts, " AND ");
}

function columns(call: RowCall): Statement {
  if (!call.columns) return sql.raw("t.*");
  return list(
    call.columns.map((name) => {
      typeOf(call, name);
      return column(name);
    }),
  );
}

function ordered(call: RowCall, orderBy: readonly RowOrder[], key: readonly string[]): Statement {
  const parts = orderBy.map(({ column: name, descending }) => {
    typeOf(call, name);
    return descending ? sql`${column(name)} DESC` : column(name);
  });
  if (parts.length > 0) return list(parts);
  return list(
    key.map((name) => {
      typeOf(call, name);
      return column(name);
    }),
  );
}

const strengths: Readonly<Record<string, Readonly<Partial<Record<RowStrength, string>>>>> = {
  mysql: { update: "FOR UPDATE", share: "FOR SHARE" },
  mariadb: { update: "FOR UPDATE", share: "LOCK IN SHARE MODE" },
};

function clause({ strength, capabilities }: RowCall, wait: "skip" | "nowait" | "wait"): Statement {
  if (!strength) return sql``;
  const words = strengths[capabilities.flavour]?.[strength];
  if (words === undefined) throw new UnsupportedError(`Row locks for "${strength}" are not to be had here`);
  return sql.raw(` ${words}${wait === "skip" ? " SKIP LOCKED" : wait === "nowait" ? " NOWAIT" : ""}`);
}

type Found =
  { readonly granted: true; readonly rows: readonly Row[] } | Extract<RowSelection, { granted: false }>;

/** Runs a locking read as patiently as the call wants it. */
async function run(
  connection: SqlConnection,
  call: RowCall,
  statement: (clause: Statement) => Statement,
): Promise<Found> {
  const { wait, strength } = call;
  const ask = async (how: "skip" | "nowait"): Promise<Found> => ({
    granted: true,
    rows: (await connection.query(statement(clause(call, how)))).rows,
  });
  if (!strength || wait === "skip") return ask("skip");
  const started = performance.now();
  try {
    // What is free needs no bounded wait, which costs two round trips more. If it is not, what this has locked are the
    // first ones in the order in which the next statement asks for them again.
    return await ask("nowait");
  } catch (error) {
    if (failureOf(connection, error) !== "lock-timeout") throw error;
    if (wait === "nowait") return refused(call, error);
  }
  const left = Math.max(1, wait - (performance.now() - started));
  const waited = await patiently(connection, left, () => connection.query(statement(clause(call, "wait"))));
  return waited.over ? refused(call, waited.cause) : { granted: true, rows: waited.result.rows };
}

const position = "holdfastposition";
const keyText = (i: number) => `holdfastkey${i}`;

/** Which of the keys a row has, as positions with commas: the server alone knows which texts are equal to it. */
function positions(call: RowCall, keys: Keys): Statement {
  const items = keys.map((values, i) => sql`IF(${named(call, call.key, [values])}, ${String(i)}, NULL)`);
  return sql`CONCAT_WS(',', ${list(items)}) AS ${sql.id(position)}`;
}

/** The key of each row, as text. */
function keyTexts(call: RowCall): Statement {
  return list(
    call.key.map((name, i) => sql`${asText(column(name), typeOf(call, name))} AS ${sql.id(keyText(i))}`),
  );
}

/** As `keyTexts` would bring it. What it does not know how to write is not found by it. */
function textOf(value: unknown): string {
  return value instanceof Uint8Array
    ? Buffer.from(value).toString("hex").toUpperCase()
    : String(typeof value === "boolean" ? Number(value) : value);
}

/** More than this many keys that have no row with their very text are compared with the rows that are left only. */
const fewKeys = 200;

/**
 * For each key, its row among those that were read with `keyTexts`. A key and a row with the same text are equal; the
 * server is asked about the rest only, since it has to compare each key with each row: 5,003 of them took it 30 s.
 */
async function placed(
  connection: SqlConnection,
  call: RowCall,
  keys: Keys,
  rows: readonly Row[],
): Promise<(Row | undefined)[]> {
  const textsOf = (row: Row) => call.key.map((_, i) => String(row[keyText(i)]));
  const byText = new Map(rows.map((row) => [JSON.stringify(textsOf(row)), row]));
  const found = keys.map((values) => byText.get(JSON.stringify(values.map(textOf))));
  const rest = keys.flatMap((_, i) => (found[i] ? [] : [i]));
  const taken = new Set(found);
  const open = rest.length <= fewKeys ? rows : rows.filter((row) => !taken.has(row));
  if (rest.length === 0 || open.length === 0) return found;
  const theirs = open.map((row) =>
    textsOf(row).map((text, i) => fromText(text, typeOf(call, call.key[i] as string))),
  );
  const { table, key } = call;
  // As it was read: what is locked is read with a lock, which shows it as it is now, and waits for nobody.
  const asking = sql`SELECT ${positions(
    call,
    rest.map((i) => keys[i] as readonly unknown[]),
  )}, ${keyTexts(call)} FROM ${table} t${through(call, key) ?? sql``} WHERE ${onPrimary} AND ${named(call, key, theirs)}${clause(call, "skip")}`;
  for (const row of (await connection.query(asking)).rows)
    for (const at of String(row[position]).split(",").filter(Boolean))
      found[rest[Number(at)] as number] = byText.get(JSON.stringify(textsOf(row)));
  return found;
}

/** Without what we have added to it. */
function bare(row: Row): Row {
  return Object.fromEntries(Object.entries(row).filter(([name]) => !name.startsWith("holdfastkey")));
}

async function byKeys(connection: SqlConnection, call: RowCall, keys: Keys): Promise<RowSelection> {
  const { key, table, shape, strength } = call;
  const extra = keys.length === 1 ? sql.raw("") : sql`${keyTexts(call)}, `;
  const those = named(call, key, keys);
  const force = through(call, key);
  const found =
    // If no index leads to them, every row would be locked on the way: found first, then locked by primary key.
    !force && strength && shape.key.length > 0
      ? await byCondition(connection, call, those, extra)
      : await run(
          connection,
          call,
          (lock) =>
            sql`SELECT ${extra}${columns(call)} FROM ${table} t${force ?? sql``} WHERE ${onPrimary} AND ${those}
              ORDER BY ${ordered(call, [], key)}${lock}`,
        );
  if (!found.granted) return found;
  if (keys.length === 1) return { granted: true, rows: [found.rows[0]] };
  const rows = await placed(connection, call, keys, found.rows);
  return { granted: true, rows: rows.map((row) => row && bare(row)) };
}

/** How many candidates are looked at for each one that is wanted, where others may have locked the first ones. */
const spare = { times: 4, more: 60 };

/**
 * Found without a lock, locked by their keys, and compared with the condition again under the lock: a locking read by
 * the condition itself would lock, or wait for, every row that it looks at.
 */
async function byCondition(
  connection: SqlConnection,
  call: RowCall,
  where: Statement,
  extra = sql.raw(""),
): Promise<Found> {
  const { table, limit, orderBy, wait, shape, strength } = call;
  const key = shape.key.length > 0 ? shape.key : call.key;
  const order = ordered(call, orderBy, key);
  const shown = sql`${extra}${columns(call)}`;
  const most = (count: number | undefined) => (count === undefined ? sql`` : sql` LIMIT ${count}`);
  if (!strength) {
    const { rows } = await connection.query(
      sql`SELECT ${shown} FROM ${table} t WHERE ${onPrimary} AND ${where} ORDER BY ${order}${most(limit)}`,
    );
    return { granted: true, rows };
  }
  const texts = list(
    key.map((name, i) => sql`${asText(column(name), typeOf(call, name))} AS ${sql.id(`k${i}`)}`),
  );
  const candidates = async (count: number | undefined, from = 0): Promise<Keys> => {
    const { rows } = await connection.query(
      sql`SELECT ${texts} FROM ${table} t WHERE ${onPrimary} AND ${where} ORDER BY ${order}${most(count)}${from > 0 ? sql` OFFSET ${from}` : sql``}`,
    );
    return rows.map((row) => key.map((name, i) => fromText(row[`k${i}`], typeOf(call, name))));
  };
  const force = through(call, key) ?? sql``;
  // In the order of keys, or sorted after they are locked: either way the index is read from one end to the other.
  const lock = (keys: Keys, count?: number) =>
    run(
      connection,
      call,
      (locking) =>
        sql`SELECT ${shown} FROM ${table} t${force} WHERE ${named(call, key, keys)} AND ${where}
          ORDER BY ${order}${most(count)}${locking}`,
    );
  if (limit === undefined || wait !== "skip") {
    const keys = await candidates(limit);
    return keys.length === 0 ? { granted: true, rows: [] } : lock(keys);
  }
  // What others have locked does not count: the next ones do. In the order of keys the server stops at the last one
  // that is wanted; in another it would have locked them all before, so no more are asked for than are wanted.
  const rows: Row[] = [];
  const inKeyOrder = orderBy.length === 0;
  const batch = limit * spare.times + spare.more;
  for (let from = 0; ; from += batch) {
    const keys = await candidates(batch, from);
    for (let i = 0; i < keys.length && rows.length < limit;) {
      const wanted = limit - rows.length;
      const some = inKeyOrder ? keys : keys.slice(i, i + wanted);
      i += some.length;
      const found = await lock(some, inKeyOrder ? wanted : undefined);
      if (found.granted) rows.push(...found.rows);
    }
    if (rows.length >= limit || keys.length < batch) return { granted: true, rows };
  }
}

/** 1205 undoes the statement only, unless the server was told to undo the whole transaction. */
function refused({ wait, capabilities }: RowCall, cause: unknown): Extract<RowSelection, { granted: false }> {
  const usable = capabilities.details?.["rollbackOnTimeout"] !== true;
  return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable, cause };
}

async function select(connection: SqlConnection, call: RowCall): Promise<RowSelection> {
  const { which } = call;
  if ("keys" in which) return byKeys(connection, call, which.keys);
  return byCondition(connection, call, condition(call, which.where));
}

const present: Tables<SqlConnection>["present"] = async (connection, call) => {
  const { which, key, table } = call;
  if (!("keys" in which)) return new Set();
  const { rows } = await connection.query(
    sql`SELECT ${keyTexts(call)} FROM ${table} t WHERE ${onPrimary} AND ${named(call, key, which.keys)}`,
  );
  const found = await placed(connection, { ...call, strength: undefined }, which.keys, rows);
  return new Set(found.flatMap((row, i) => (row ? [i] : [])));
};

/**
 * The row is read after it was written: in the same transaction, so that nobody can have changed or deleted it. The
 * wait is ended from another connection; without one to be had, by the session's own setting, which stays as it is.
 */
const write: Tables<SqlConnection>["write"] = async (connection, call) => {
  const { table, shape, key, id, version, expected, changes, waitMs, alone } = call;
  const sets = Object.entries(changes).map(
    ([name, value]) => sql`${column(name)} = ${written(value, typeOf({ shape }, name))}`,
  );
  const row = list(
    key.map((name, i) => sql`${column(name)} = ${bound(id[i], typeOf({ shape }, name))}`),
    " AND ",
  );
  const counted = sql`${column(version)} = ${column(version)} + 1`;
  const update = sql`UPDATE ${table} t SET ${list([...sets, counted])}
    WHERE ${onPrimary} AND ${row} AND ${column(version)} = ${bound(expected, typeOf({ shape }, version))}`;
  const set = async (): Promise<RowSelection> => {
    const waited = await bounded(connection, waitMs, Infinity, () => connection.query(update));
    if (waited.over) {
      const usable = failureOf(connection, waited.cause) === "canceled";
      return { granted: false, reason: "timeout", usable, cause: waited.cause };
    }
    // The version changes whatever else does, so rows found and rows changed are as many.
    if (waited.result.affected === 0) return { granted: true, rows: [] };
    const { rows } = await connection.query(sql`SELECT t.* FROM ${table} t WHERE ${onPrimary} AND ${row}`);
    return { granted: true, rows };
  };
  return alone ? briefly(connection, set) : set();
};

/** What the server shows of a lock on a row: its primary key, of those types that are written in one way only. */
function lockData(call: RowCall, keys: Keys): string[] {
  return keys.slice(0, 100).flatMap((values) => {
    const parts = values.map((value, i) => {
      if (isInteger(typeOf(call, call.key[i] as string))) return String(value);
      return typeof value === "string" ? `'${value}'` : undefined;
    });
    return parts.includes(undefined) ? [] : [parts.join(", ")];
  });
}

/** MySQL tells who has locked a row; MariaDB only whom somebody waits for, and we no longer do. */
async function holders(connection: SqlConnection, call: RowCall): Promise<Holder[]> {
  const { which, capabilities, shape, key } = call;
  if (capabilities.flavour !== "mysql" || !("keys" in which) || String(key) !== String(shape.key)) return [];
  const data = lockData(call, which.keys);
  if (data.length === 0) return [];
  const [schema, name] = shape.name.split(".");
  const { rows } = await connection.query(
    sql`SELECT DISTINCT th.processlist_id AS id FROM performance_schema.data_locks l
      JOIN performance_schema.threads th ON th.thread_id = l.thread_id
      WHERE l.object_schema = ${schema} AND l.object_name = ${name} AND l.index_name = 'PRIMARY' AND l.lock_type = 'RECORD'
        AND l.lock_status = 'GRANTED' AND l.lock_data IN (${list(data.map((each) => sql`${each}`))})
        AND th.processlist_id <> CONNECTION_ID()`,
  );
  return asHolders(connection, new Map(rows.map(({ id }) => [String(id), {}])), capabilities);
}

/** Around what an ORM sends, whose clause says whether it waits at all. */
const around: Tables<SqlConnection>["around"] = async (connection, { wait, capabilities }, send) => {
  const usable = capabilities.details?.["rollbackOnTimeout"] !== true;
  if (typeof wait === "number") {
    const waited = await patiently(connection, wait, send);
    return waited.over
      ? { granted: false, reason: "timeout", usable, cause: waited.cause }
      : { granted: true, value: waited.result };
  }
  try {
    return { granted: true, value: await send() };
  } catch (error) {
    if (failureOf(connection, error) !== "lock-timeout") throw error;
    return { granted: false, reason: "busy", usable, cause: error };
  }
};

export const tables: Tables<SqlConnection> = {
  describe,
  select,
  present,
  async lock() {
    throw new UnsupportedError(noTableLocks.why);
  },
  write,
  around,
  holders,
};
