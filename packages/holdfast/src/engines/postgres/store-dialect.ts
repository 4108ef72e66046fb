/** PostgreSQL as the generic stores see it: on the same tables as its functions, at the same time. */
import type { SqlConnection } from "../../seam/database.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import type { Locking, NumberSequence, StoreDialect } from "../sql/dialect.ts";
import { type ColumnKind, never } from "../sql/table.ts";
import { arrayText, text } from "./values.ts";
import { newest, nextFence } from "./leases/fences.ts";
import { failureOf } from "./locks/index.ts";
import { fixPath, safely } from "./search-path.ts";

const epoch = sql.raw("pg_catalog.timestamptz 'epoch'");

/** As text, which every client sends the same way. */
function bound(kind: ColumnKind, value: unknown): Statement {
  const text = value === undefined || value === null ? null : String(value);
  switch (kind) {
    case "text":
      return sql`${text}::pg_catalog.text`;
    case "boolean":
      return sql`${text}::pg_catalog.text::boolean`;
    case "moment":
      if (value === never) return sql`'infinity'::pg_catalog.timestamptz`;
      if (value === -never) return sql`'-infinity'::pg_catalog.timestamptz`;
      return sql`(${epoch} + ${text}::pg_catalog.text::bigint * interval '1 microsecond')`;
    case "json":
      return sql`${value === undefined ? null : JSON.stringify(value)}::pg_catalog.text::pg_catalog.jsonb`;
    case "integers":
      return sql`${Array.isArray(value) ? `{${value.join()}}` : null}::pg_catalog.text::bigint[]`;
    default:
      return sql`${text}::pg_catalog.text::bigint`;
  }
}

/** A list of texts, each of which is read as its kind where it is used. */
function listed(kind: ColumnKind, values: readonly unknown[]): string {
  return arrayText(
    values.map((value) => {
      if (value === undefined) return null;
      // Null is a value of JSON's, too.
      if (kind === "json") return JSON.stringify(value);
      if (value === null) return null;
      if (kind === "moment" && value === never) return "infinity";
      if (kind === "moment" && value === -never) return "-infinity";
      return kind === "integers" && Array.isArray(value) ? `{${value.join()}}` : text(value);
    }),
  );
}

function readAs(kind: ColumnKind, column: Statement): Statement {
  switch (kind) {
    case "text":
      return column;
    case "boolean":
      return sql`${column}::boolean`;
    case "moment":
      return sql`CASE WHEN ${column} LIKE '%infinity' THEN ${column}::pg_catalog.timestamptz
  ELSE ${epoch} + ${column}::bigint * interval '1 microsecond' END`;
    case "json":
      return sql`${column}::pg_catalog.jsonb`;
    case "integers":
      return sql`${column}::bigint[]`;
    default:
      return sql`${column}::bigint`;
  }
}

/** How a transaction is opened that waits so long for rows, in milliseconds, and how that is changed inside of one. */
export interface StorePatience {
  begin(connection: SqlConnection, ms: string): Promise<unknown>;
  /** Also "5s", as the server itself writes it. */
  set(connection: SqlConnection, ms: string): Promise<unknown>;
  /** What an error that came in place of an answer to COMMIT means. Left out: that nothing was kept. */
  atCommit?(connection: SqlConnection, error: unknown): unknown;
}

const settingPatience: StorePatience = {
  async begin(connection, ms) {
    await connection.query(sql`BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`);
    await this.set(connection, ms);
  },
  set: (connection, ms) =>
    connection.query(
      sql`SELECT pg_catalog.set_config('lock_timeout', ${ms}::pg_catalog.text, true) AS patience, ${own.map} AS map`,
    ),
};

/** Connections whose path is ours until the work on them is done. */
const fixed = new WeakSet<SqlConnection>();

async function withFixedPath<T>(connection: SqlConnection, work: () => Promise<T>): Promise<T> {
  await connection.query(fixPath);
  fixed.add(connection);
  try {
    return await work();
  } finally {
    fixed.delete(connection);
  }
}

export function transactionsBy(
  patience: StorePatience,
): Pick<StoreDialect<SqlConnection>, "transaction" | "inside"> {
  return {
    async transaction(connection, waitMs, work) {
      try {
        await patience.begin(connection, timeout(waitMs));
        const value = await withFixedPath(connection, work);
        await connection.query(sql`COMMIT`).catch((error: unknown) => {
          throw patience.atCommit?.(connection, error) ?? error;
        });
        return value;
      } catch (error) {
        // A connection that is gone has rolled back by itself; the first error is the one that counts.
        await connection.query(sql`ROLLBACK`).catch(() => {});
        throw error;
      }
    },
    async inside(connection, waitMs, work) {
      const { rows } = await connection.query(
        sql`SELECT pg_catalog.current_setting('lock_timeout') AS patience, pg_catalog.current_setting('search_path') AS path`,
      );
      const restore = async () => {
        await connection.query(
          sql`SELECT pg_catalog.set_config('search_path', ${String(rows[0]?.["path"])}::pg_catalog.text, true)`,
        );
        await patience.set(connection, String(rows[0]?.["patience"]));
      };
      await patience.set(connection, timeout(waitMs));
      let value: Awaited<ReturnType<typeof work>>;
      try {
        value = await withFixedPath(connection, work);
      } catch (error) {
        // An error of the server's has ended the transaction, and the settings with it.
        await restore().catch(() => {});
        throw error;
      }
      await restore();
      return value;
    },
  };
}

/** 0 would mean for ever. */
const timeout = (waitMs: number) =>
  Number.isFinite(waitMs) ? String(Math.min(Math.max(1, Math.ceil(waitMs)), 2_147_483_647)) : "0";

const lockings: Readonly<Record<Locking, Statement>> = {
  update: sql`FOR NO KEY UPDATE`,
  skip: sql`FOR UPDATE SKIP LOCKED`,
  share: sql`FOR SHARE`,
  current: sql``,
};

const sequences: Readonly<Record<NumberSequence, Statement>> = {
  fence: nextFence,
  audit: sql`pg_catalog.nextval(${own.text("audit_id_seq")})`,
  queue: newest("queue_id_seq", false),
  queue_job: newest("queue_job_id", false),
  queue_lease: newest("queue_lease_id_seq", false),
  queue_worker: newest("queue_worker_id_seq", false),
};

export const storeDialect: StoreDialect<SqlConnection> = {
  table: (name) => sql`${own(name)}`,
  clock: sql`(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint`,

  read(kind, column) {
    switch (kind) {
      case "moment":
        return sql`CASE ${column} WHEN 'infinity' THEN ${sql.raw(String(never))} WHEN '-infinity' THEN ${sql.raw(String(-never))}
  ELSE (extract(epoch FROM ${column}) * 1000000)::bigint END`;
      case "json":
        return sql`${column}::pg_catalog.text`;
      case "integers":
        return sql`pg_catalog.array_to_json(${column})::pg_catalog.text`;
      default:
        return column;
    }
  },

  write: bound,

  locking: (how) => lockings[how],

  insertMissing: (table, columns, values) =>
    sql`INSERT INTO ${own(table.name)} (${columns}) OVERRIDING SYSTEM VALUE VALUES ${values} ON CONFLICT DO NOTHING`,

  given(columns) {
    const lists = columns.map(
      ({ kind, values }) =>
        sql`pg_catalog.unnest(${listed(kind, values)}::pg_catalog.text::pg_catalog.text[])`,
    );
    const read = columns.map(
      ({ name, kind }) => sql`${readAs(kind, sql`u.${sql.id(name)}`)} AS ${sql.id(name)}`,
    );
    const names = columns.map(({ name }) => sql`${sql.id(name)}`);
    return sql`(SELECT ${sql.join(read)} FROM ROWS FROM (${sql.join(lists)}) u (${sql.join(names)})) given`;
  },

  ...transactionsBy(settingPatience),

  look: async (connection, statement) =>
    fixed.has(connection) ? (await connection.query(statement)).rows : safely(connection, statement),

  optimistic: true,
  failure: failureOf,

  async numbers(connection, sequence, count) {
    const { rows } = await connection.query(
      sql`SELECT ${sequences[sequence]} AS n FROM pg_catalog.generate_series(1, ${String(count)}::pg_catalog.text::int)`,
    );
    return rows.map(({ n }) => Number(n));
  },

  // As the functions do.
  exclude: (name, shared) =>
    sql`SELECT pg_catalog.pg_advisory_xact_lock${sql.raw(shared ? "_shared" : "")}(pg_catalog.hashtextextended(${name}::pg_catalog.text, 0))::pg_catalog.text`,

  create() {
    throw new Error("the tables of PostgreSQL come by its migrations");
  },
};
