/** Rows and tables of the caller's: read, locked, compared and set. */
import type { LockGrant, Row, SqlConnection } from "../../seam/database.ts";
import { type Holder, UsageError, some } from "../../seam/errors.ts";
import { Identifier, type Statement, isStatement, sql } from "../../seam/sql.ts";
import type {
  RowOrder,
  RowCall,
  RowStrength,
  RowSelection,
  TableMode,
  TableShape,
  Tables,
} from "../../seam/tables.ts";
import { render } from "./dialect.ts";
import { asHolder, sessionColumns } from "./locks/holders.ts";
import { granted, run, waitIsOver } from "./locks/index.ts";
import { onPrimary } from "./primary.ts";
import { setLocal } from "./settings.ts";
import { arrayText, text } from "./values.ts";
import * as protection from "../../seam/protections.ts";

const strengths: Readonly<Record<RowStrength, string>> = {
  update: "FOR UPDATE",
  "no key update": "FOR NO KEY UPDATE",
  share: "FOR SHARE",
  "key share": "FOR KEY SHARE",
};

/** Single words in lower case: some clients rewrite the case of others. Not a name that a table is likely to have. */
const positionAlias = "holdfastposition";

const list = (items: readonly (Statement | Identifier)[], separator = ", ") => sql.join(items, separator);
const column = (alias: string, name: string) => sql`${sql.raw(alias)}.${sql.id(name)}`;

/**
 * A value as its own text, cast to the column's type: every client sends text the same way, while each has its own
 * idea of what a number, a date or a list is to the server.
 */
function bound(value: unknown, type: string): Statement {
  return sql`${text(value, type)}::pg_catalog.text::${sql.raw(type)}`;
}

function arrayOf(values: readonly unknown[], type: string): Statement {
  return sql`${arrayText(values, type)}::pg_catalog.text::${sql.raw(type)}[]`;
}

function typeOf({ shape }: { shape: TableShape }, name: string): string {
  const type = shape.columns.get(name);
  if (type === undefined)
    throw new UsageError(
      `${shape.name} has no column ${JSON.stringify(name)}; it has ${some([...shape.columns.keys()])}`,
    );
  return type;
}

/** Named with its schema: an operator that somebody has put into the search path must not be taken for it. */
function equals({ shape }: { shape: TableShape }, name: string): Statement {
  return sql.raw(shape.equals?.get(name) ?? "OPERATOR(pg_catalog.=)");
}

/**
 * The operator of a column's type, if that is an extension's. Other types are compared by one of the server's own. The index of a
 * unique key compares by the same one.
 */
const operatorOf =
  sql.raw(`(SELECT pg_catalog.format('OPERATOR(%I.%s)', s.nspname, o.oprname) FROM pg_catalog.pg_type y
  JOIN pg_catalog.pg_type b ON b.oid OPERATOR(pg_catalog.=) CASE WHEN y.typtype OPERATOR(pg_catalog.=) 'd' THEN y.typbasetype ELSE y.oid END
    AND b.typnamespace OPERATOR(pg_catalog.<>) 'pg_catalog'::pg_catalog.regnamespace
  JOIN pg_catalog.pg_opclass p ON p.opcintype OPERATOR(pg_catalog.=) b.oid AND p.opcdefault
  JOIN pg_catalog.pg_am m ON m.oid OPERATOR(pg_catalog.=) p.opcmethod
  JOIN pg_catalog.pg_amop f ON f.amopfamily OPERATOR(pg_catalog.=) p.opcfamily AND f.amoplefttype OPERATOR(pg_catalog.=) b.oid AND f.amoprighttype OPERATOR(pg_catalog.=) b.oid
    AND f.amopstrategy OPERATOR(pg_catalog.=) CASE WHEN m.amname OPERATOR(pg_catalog.=) 'btree' THEN 3 WHEN m.amname OPERATOR(pg_catalog.=) 'hash' THEN 1 END
  JOIN pg_catalog.pg_operator o ON o.oid OPERATOR(pg_catalog.=) f.amopopr JOIN pg_catalog.pg_namespace s ON s.oid OPERATOR(pg_catalog.=) o.oprnamespace
  WHERE y.oid OPERATOR(pg_catalog.=) a.atttypid LIMIT 1)`);

async function describe(connection: SqlConnection, table: Identifier): Promise<TableShape | undefined> {
  // The name as a literal of the catalog's own kind: quoted as in any statement, resolved by the search path. Types
  // with -1 for "no length": without it char(2) is called character, which as a cast means char(1).
  const name = render(sql`${table}`).text;
  const { rows } = await connection.query(
    sql`SELECT n.nspname::pg_catalog.text AS schemaname, c.relname::pg_catalog.text AS tablename, a.attname::pg_catalog.text AS columnname, pg_catalog.format_type(a.atttypid, -1) AS columntype, ${operatorOf} AS operator,
      pg_catalog.array_position((i.indkey::pg_catalog.int2[])[0:i.indnkeyatts OPERATOR(pg_catalog.-) 1], a.attnum)::int AS keyposition
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
      JOIN pg_catalog.pg_attribute a ON a.attrelid OPERATOR(pg_catalog.=) c.oid AND a.attnum OPERATOR(pg_catalog.>) 0::smallint AND NOT a.attisdropped
      LEFT JOIN pg_catalog.pg_index i ON i.indrelid OPERATOR(pg_catalog.=) c.oid AND i.indisprimary
      WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(${name}::pg_catalog.text) AND ${onPrimary} ORDER BY a.attnum`,
  );
  if (rows.length === 0) return undefined;
  const key = rows
    .filter(({ keyposition }) => keyposition !== null)
    .toSorted((a, b) => Number(a.keyposition) - Number(b.keyposition));
  return {
    name: `${String(rows[0]?.schemaname)}.${String(rows[0]?.tablename)}`,
    key: key.map(({ columnname }) => String(columnname)),
    columns: new Map(rows.map(({ columnname, columntype }) => [String(columnname), String(columntype)])),
    equals: new Map(
      rows.flatMap(({ columnname, operator }) =>
        typeof operator === "string" ? [[String(columnname), operator]] : [],
      ),
    ),
  };
}

/** `t` is the table, `k` the keys that were asked for, with their positions. */
function asked(call: RowCall, keys: readonly (readonly unknown[])[]): Statement {
  const arrays = call.key.map((name, i) =>
    arrayOf(
      keys.map((values) => values[i]),
      typeOf(call, name),
    ),
  );
  const names = list([...call.key.map((name) => sql.id(name)), sql.id(positionAlias)]);
  const listed = arrays.map((each) => sql`pg_catalog.unnest(${each})`);
  return sql`ROWS FROM (${list(listed)}) WITH ORDINALITY AS k (${names})`;
}

function sameKey(call: RowCall, one: string, other: string): Statement {
  return list(
    call.key.map((name) => sql`${column(one, name)} ${equals(call, name)} ${column(other, name)}`),
    " AND ",
  );
}

function condition(call: RowCall, where: unknown): Statement {
  // On a line of its own, as the caller's SQL may end with a comment.
  if (isStatement(where))
    return sql`(${where}
)`;
  const parts = Object.entries(where as Record<string, unknown>).map(([name, value]) => {
    const type = typeOf(call, name);
    if (value === null) return sql`${column("t", name)} IS NULL`;
    if (!Array.isArray(value)) return isValue(call, name, value);
    return sql`${column("t", name)} ${equals(call, name)} ANY (${arrayOf(value, type)})`;
  });
  return list(parts, " AND ");
}

function columns(call: RowCall, alias: string): Statement {
  if (!call.columns) return sql`${sql.raw(alias)}.*`;
  return list(
    call.columns.map((name) => {
      typeOf(call, name);
      return column(alias, name);
    }),
  );
}

function keyOf(call: RowCall, alias: string): Statement {
  return list(
    call.key.map((name) => {
      typeOf(call, name);
      return column(alias, name);
    }),
  );
}

/** Rows are locked in the order of the primary key, whatever columns they are named by: it is one for everybody. */
function lockOrder(call: RowCall): Statement {
  const { key } = call.shape;
  return key.length === 0 ? keyOf(call, "t") : list(key.map((name) => column("t", name)));
}

function ordered(call: RowCall, orderBy: readonly RowOrder[], alias: string): Statement {
  const parts = orderBy.map(({ column: name, descending }) => {
    typeOf(call, name);
    return descending ? sql`${column(alias, name)} DESC` : column(alias, name);
  });
  return parts.length === 0 ? keyOf(call, alias) : list(parts);
}

/** What follows the order, for rows of `t`. */
function clause({ strength, wait }: RowCall): Statement {
  if (!strength) return sql``;
  return sql.raw(
    ` ${strengths[strength]} OF t${wait === "skip" ? " SKIP LOCKED" : wait === "nowait" ? " NOWAIT" : ""}`,
  );
}

/**
 * The rows to lock, in the order in which they are locked: the server sorts first and locks then. Rows that somebody
 * has changed meanwhile are compared with the condition again, under the lock. The table is alone in its FROM: in the
 * caller's own SQL a column's name must mean the table's.
 */
function candidates(call: RowCall, bounded = false): Statement {
  const { table, which, limit, orderBy, wait, strength } = call;
  const chosen = "keys" in which ? named(call, which.keys[0]) : condition(call, which.where);
  // Computed before the first row is looked at. Only a primary locks rows.
  const before = bounded ? sql`(SELECT now FROM holdfast_patience) IS NOT NULL` : !strength && onPrimary;
  // Found by the keys, whose number the planner knows. The other way round, with their places looked up afterwards, it
  // went by its guess at the rows: 31 s for 20,000 of a table that had been empty when it was last analysed.
  if (isList(which))
    return sql`${asked(call, which.keys)} JOIN ${table} t ON ${sameKey(call, "t", "k")}${before ? sql` WHERE ${before}` : sql``}
      ORDER BY ${lockOrder(call)}`;
  const matching = before ? sql`${before} AND ${chosen}` : chosen;
  if (limit === undefined) return sql`${table} t WHERE ${matching} ORDER BY ${lockOrder(call)}`;
  const first = sql`ORDER BY ${ordered(call, orderBy, "t")} LIMIT ${limit}::pg_catalog.text::bigint`;
  // Who does not wait cannot deadlock, so the order may be the caller's own; and what is locked does not count.
  if (wait === "skip" || !strength) return sql`${table} t WHERE ${matching} ${first}`;
  // Chosen first, locked in the order of keys: the condition is checked again, now under the lock.
  return sql`${table} t WHERE EXISTS (SELECT FROM (SELECT ${keyOf(call, "t")} FROM ${table} t WHERE ${chosen} ${first}) c WHERE ${sameKey(call, "t", "c")})
    AND ${matching} ORDER BY ${lockOrder(call)}`;
}

/** Several keys. */
function isList(which: RowCall["which"]): which is Extract<RowCall["which"], { keys: unknown }> {
  return "keys" in which && which.keys.length > 1;
}

/** What is locked, with its place among the keys. */
function locked(call: RowCall): Statement {
  return isList(call.which)
    ? sql`k.${sql.id(positionAlias)}::int AS ${sql.id(positionAlias)}, t.*`
    : sql`t.*`;
}

function named(call: RowCall, values: readonly unknown[] | undefined): Statement {
  if (!values) return sql`false`;
  return list(
    call.key.map((name, i) => isValue(call, name, values[i])),
    " AND ",
  );
}

function isValue(call: { shape: TableShape }, name: string, value: unknown): Statement {
  return sql`${column("t", name)} ${equals(call, name)} ${bound(value, typeOf(call, name))}`;
}

/** Those that were found, put into the order that the caller wants to see. */
function result(call: RowCall): Statement {
  const { which, orderBy } = call;
  if (!("keys" in which))
    return sql`SELECT ${columns(call, "l")} FROM holdfast_locked l WHERE ${restored} ORDER BY ${ordered(call, orderBy, "l")}`;
  if (which.keys.length === 1)
    return sql`SELECT ${columns(call, "l")} FROM holdfast_locked l WHERE ${restored}`;
  const place = call.columns ? sql`l.${sql.id(positionAlias)}, ` : sql``;
  return sql`SELECT ${place}${columns(call, "l")} FROM holdfast_locked l WHERE ${restored}`;
}

/**
 * Puts the caller's own timeout back once all rows are locked, also if there are none. It depends on nothing in the
 * query around it, so the server computes it first, as a one-time filter.
 */
const restored = sql.raw(
  `(SELECT ${setLocal("lock_timeout", "(SELECT before FROM holdfast_patience)")} FROM (SELECT pg_catalog.count(*) FROM holdfast_locked) c) IS NOT NULL`,
);

function patience(wait: number): Statement {
  return sql.raw(
    `holdfast_patience AS MATERIALIZED (SELECT pg_catalog.current_setting('lock_timeout') AS before, ${setLocal("lock_timeout", `'${wait}'`)} AS now)`,
  );
}

/** One statement, so that the wait is bounded in one round trip, through any client. */
function waiting(call: RowCall, wait: number): Statement {
  return sql`WITH ${patience(wait)},
    holdfast_locked AS MATERIALIZED (SELECT ${locked(call)} FROM ${candidates(call, true)}${clause(call)}) ${result(call)}`;
}

/** Without a wait there is nothing to bound. */
function immediate(call: RowCall): Statement {
  const { which, limit, strength, wait } = call;
  const keyed = "keys" in which;
  const asIs =
    (keyed && which.keys.length === 1) ||
    (!keyed && (limit !== undefined ? wait === "skip" || !strength : call.orderBy.length === 0));
  if (asIs) return sql`SELECT ${columns(call, "t")} FROM ${candidates(call)}${clause(call)}`;
  const first = sql`WITH holdfast_patience AS (SELECT pg_catalog.current_setting('lock_timeout') AS before),
    holdfast_locked AS MATERIALIZED (SELECT ${locked(call)} FROM ${candidates(call)}${clause(call)})`;
  return sql`${first} ${result(call)}`;
}

/** One entry per key, in the order of these, or simply the rows. */
function arranged({ which }: RowCall, rows: readonly Row[]): readonly (Row | undefined)[] {
  if (!("keys" in which)) return rows;
  if (which.keys.length === 1) return [rows[0]];
  const found: (Row | undefined)[] = which.keys.map(() => undefined);
  for (const { [positionAlias]: position, ...row } of rows) found[Number(position) - 1] = row;
  return found;
}

async function select(connection: SqlConnection, call: RowCall): Promise<RowSelection> {
  const { wait, which, strength } = call;
  try {
    if (typeof wait !== "number" || !strength) {
      const { rows } = await connection.query(immediate(call));
      return { granted: true, rows: arranged(call, rows) };
    }
    // One row that is free needs no bounded wait, which costs the server a sixth of the whole transaction. (Of several
    // rows the later ones must not be locked while an earlier one is waited for.)
    if ("keys" in which && which.keys.length === 1) {
      const statement = immediate({ ...call, wait: "skip" });
      // One key is the same plan for all values. As a transaction's first statement it may be kept by the session.
      const { rows } = await (connection.prepared?.(statement) ?? connection.query(statement));
      if (rows.length > 0) return { granted: true, rows };
    }
    const { rows } = await connection.query(waiting(call, wait));
    return { granted: true, rows: arranged(call, rows) };
  } catch (error) {
    if (!strength || !waitIsOver(connection, error)) throw error;
    // The error has ruined the transaction, up to the last savepoint.
    return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: false, cause: error };
  }
}

async function present(connection: SqlConnection, call: RowCall): Promise<ReadonlySet<number>> {
  if (!("keys" in call.which)) return new Set();
  const { rows } = await connection.query(
    sql`SELECT k.${sql.id(positionAlias)}::int AS ${sql.id(positionAlias)} FROM ${asked(call, call.which.keys)}
      WHERE EXISTS (SELECT FROM ${call.table} t WHERE ${sameKey(call, "t", "k")})`,
  );
  return new Set(rows.map((row) => Number(row[positionAlias]) - 1));
}

const savepoint = "holdfast_table";

async function lock(
  connection: SqlConnection,
  { table, mode, wait }: { table: Identifier; mode: TableMode; wait: number | "nowait" },
): Promise<LockGrant> {
  const name = render(sql`${table}`).text;
  const nowait = wait === "nowait" ? " NOWAIT" : "";
  try {
    await run(connection, [
      `SAVEPOINT ${savepoint}`,
      ...(wait === "nowait"
        ? []
        : [
            `SELECT ${setLocal("holdfast.patience", "pg_catalog.current_setting('lock_timeout')")}, ${setLocal("lock_timeout", `'${wait}'`)}`,
          ]),
      `LOCK TABLE ${name} IN ${mode.toUpperCase()} MODE${nowait}`,
      ...(wait === "nowait"
        ? []
        : [`SELECT ${setLocal("lock_timeout", "pg_catalog.current_setting('holdfast.patience')")}`]),
      `RELEASE SAVEPOINT ${savepoint}`,
    ]);
    return granted;
  } catch (error) {
    if (!waitIsOver(connection, error)) throw error;
    await run(connection, [`ROLLBACK TO SAVEPOINT ${savepoint}`, `RELEASE SAVEPOINT ${savepoint}`]);
    return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: true, cause: error };
  }
}

const write: Tables<SqlConnection>["write"] = async (connection, call) => {
  const { table, shape, key, id, version, expected, changes, waitMs, alone } = call;
  const sets = Object.entries(changes).map(
    ([name, value]) => sql`${sql.id(name)} = ${bound(value, typeOf({ shape }, name))}`,
  );
  const where = key.map((name, i) => isValue(call, name, id[i]));
  const same = protection.versionCompared ? isValue(call, version, expected) : sql`true`;
  const update = sql`UPDATE ${table} t SET ${list([...sets, sql`${sql.id(version)} = ${column("t", version)} OPERATOR(pg_catalog.+) 1`])}
    WHERE (SELECT now FROM holdfast_patience) IS NOT NULL AND ${list(where, " AND ")}
      AND ${same} RETURNING t.*`;
  // By itself it is a transaction, and the timeout ends with it; inside of one the caller's own is put back.
  const statement = alone
    ? sql`WITH ${patience(waitMs)} ${update}`
    : sql`WITH ${patience(waitMs)}, holdfast_locked AS (${update}) SELECT l.* FROM holdfast_locked l WHERE ${restored}`;
  try {
    const { rows } = await connection.query(statement);
    return { granted: true, rows };
  } catch (error) {
    if (!waitIsOver(connection, error)) throw error;
    return { granted: false, reason: "timeout", usable: false, cause: error };
  }
};

/** Whoever locked or changed the rows has left a transaction's id on them. Several sharers leave one that says nothing here. */
async function holders(connection: SqlConnection, call: RowCall): Promise<Holder[]> {
  const rows = candidates({ ...call, strength: undefined, limit: call.limit ?? 100 });
  const found = await connection.query(
    sql`SELECT DISTINCT ${sql.raw(sessionColumns)} FROM (SELECT t.xmax FROM ${rows}) r JOIN pg_catalog.pg_locks l ON l.locktype OPERATOR(pg_catalog.=) 'transactionid' AND l.granted AND l.transactionid OPERATOR(pg_catalog.=) r.xmax
      JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid WHERE l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()`,
  );
  return found.rows.map(asHolder);
}

/** Around what an ORM sends: it cannot be put into its own statement, so the timeout is set before and put back after. */
const around: Tables<SqlConnection>["around"] = async (connection, { wait }, send) => {
  const bounded = typeof wait === "number";
  if (bounded)
    await connection.query(
      sql.raw(
        `SELECT ${setLocal("holdfast.patience", "pg_catalog.current_setting('lock_timeout')")}, ${setLocal("lock_timeout", `'${wait}'`)}`,
      ),
    );
  try {
    const value = await send();
    if (bounded)
      await connection.query(
        sql.raw(`SELECT ${setLocal("lock_timeout", "pg_catalog.current_setting('holdfast.patience')")}`),
      );
    return { granted: true, value };
  } catch (error) {
    if (!waitIsOver(connection, error)) throw error;
    return { granted: false, reason: bounded ? "timeout" : "busy", usable: false, cause: error };
  }
};

export const tables: Tables<SqlConnection> = { describe, select, present, lock, write, around, holders };
