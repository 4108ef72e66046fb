/**
 * A sketch of an engine that has nothing but a dialect: what it takes to bring the patterns to another database. It is a
 * real SQLite file, by Node's own module, without anything of the real engine for it: one writer at a time, and whoever
 * else wants to be asks again.
 */
import { DatabaseSync, type SQLInputValue } from "node:sqlite";
import { type Probed, unsupported } from "../../packages/holdfast/src/seam/capabilities.ts";
import type {
  Database,
  Engine,
  Migration,
  SqlConnection,
} from "../../packages/holdfast/src/seam/database.ts";
import { UnsupportedError } from "../../packages/holdfast/src/seam/errors.ts";
import { defaultSchema, prefixNames } from "../../packages/holdfast/src/seam/names.ts";
import { type Dialect, own, render, sql } from "../../packages/holdfast/src/seam/sql.ts";
import type { StoreDialect } from "../../packages/holdfast/src/engines/sql/dialect.ts";
import { type Table, kindOf, mayBeNull } from "../../packages/holdfast/src/engines/sql/table.ts";

const types = {
  text: "text",
  integer: "integer",
  serial: "integer",
  moment: "integer",
  json: "text",
  integers: "text",
  boolean: "integer",
} as const;

const written: Dialect = {
  placeholder: () => "?",
  quote: (name) => `"${name}"`,
  names: prefixNames(defaultSchema),
};

export const dialect: StoreDialect = {
  table: (name) => sql`${own(name)}`,
  // As exact as SQLite's own clock, which has milliseconds.
  clock: sql`(CAST(unixepoch('now', 'subsec') * 1000 AS integer) * 1000)`,
  read: (_, column) => column,
  write(kind, value) {
    if (value === undefined || value === null) return sql`${null}`;
    if (kind === "json" || kind === "integers") return sql`${JSON.stringify(value)}`;
    return sql`${kind === "boolean" ? Number(value) : value}`;
  },
  locking: () => sql``,
  insertMissing: (table, columns, values) =>
    sql`INSERT INTO ${dialect.table(table.name)} (${columns}) VALUES ${values} ON CONFLICT DO NOTHING`,
  async numbers(connection, sequence, count) {
    await connection.query(
      sql`INSERT INTO holdfast_sequence (name, given) VALUES (${sequence}, 0) ON CONFLICT DO NOTHING`,
    );
    const { rows } = await connection.query(
      sql`UPDATE holdfast_sequence SET given = given + ${count} WHERE name = ${sequence} RETURNING given`,
    );
    return Array.from({ length: count }, (_, i) => Number(rows[0]?.["given"]) - count + 1 + i);
  },
  async transaction(connection, waitMs, work) {
    await begin(connection, waitMs);
    try {
      const value = await work();
      await connection.query(sql`COMMIT`);
      return value;
    } catch (error) {
      await connection.query(sql`ROLLBACK`);
      throw error;
    }
  },
  // Whoever is inside is the writer already.
  inside: (_, __, work) => work(),
  optimistic: false,
  failure: (_, error) => classify(error as { errcode?: number; message?: string }),
  create(table: Table) {
    const columns = Object.keys(table.columns).map((column) => {
      const kind = kindOf(table, column);
      const serial = kind === "serial" ? " PRIMARY KEY AUTOINCREMENT" : "";
      return `"${column}" ${types[kind]}${mayBeNull(table, column) ? "" : " NOT NULL"}${serial}`;
    });
    const list = (names: readonly string[]) => names.map((name) => `"${name}"`).join(", ");
    const serial = Object.values(table.columns).includes("serial");
    const keys = [`${serial ? "UNIQUE" : "PRIMARY KEY"} (${list(table.key)})`].concat(
      (table.unique ?? []).map((names) => `UNIQUE (${list(names)})`),
    );
    return [
      sql.raw(`CREATE TABLE IF NOT EXISTS "holdfast_${table.name}" (${[...columns, ...keys].join(", ")})`),
      ...(table.indexes ?? []).map((names, i) =>
        sql.raw(
          `CREATE INDEX IF NOT EXISTS "holdfast_${table.name}_${i}" ON "holdfast_${table.name}" (${list(names)})`,
        ),
      ),
    ];
  },
};

/** SQLite's own waiting would keep this process from everything else, and from whom it waits for. */
async function begin(connection: SqlConnection, waitMs: number): Promise<void> {
  await connection.query(sql`PRAGMA busy_timeout = 0`);
  const end = performance.now() + waitMs;
  for (;;)
    try {
      await connection.query(sql`BEGIN IMMEDIATE`);
      return;
    } catch (error) {
      if (classify(error as { errcode?: number }) !== "lock-timeout" || performance.now() > end) throw error;
      await new Promise((resolve) => setTimeout(resolve, 5));
    }
}

function classify({ errcode, message = "" }: { errcode?: number; message?: string }) {
  // SQLITE_BUSY; SQLITE_CONSTRAINT_PRIMARYKEY and _UNIQUE.
  if (errcode === 5) return "lock-timeout";
  if (errcode === 1555 || errcode === 2067) return "unique";
  return message.includes("no such table") ? "schema-missing" : undefined;
}

/** Lines of code that know of a pattern here: the list of its tables, and the line that gives it its store. */
export function bareSqlite(patterns: Partial<Engine<SqlConnection>>, tables: readonly Table[]) {
  const gap = unsupported("this engine is a sketch of the patterns alone");
  const migration: Migration = {
    id: 1,
    name: "patterns",
    statements: [
      sql`CREATE TABLE IF NOT EXISTS holdfast_sequence (name text PRIMARY KEY, given integer NOT NULL)`,
      ...tables.flatMap((table) => dialect.create(table)),
    ],
  };
  const engine: Engine<SqlConnection> = {
    quotas: gap,
    stock: gap,
    queues: gap,
    schedules: gap,
    audit: gap,
    ...patterns,
    name: "bare sqlite",
    async probe(): Promise<Probed> {
      return {
        engine: "bare sqlite",
        flavour: "SQLite",
        version: process.versions.sqlite ?? "",
        client: "node:sqlite",
        transactionLocks: "database write lock",
        joinedLocks: gap,
        sessionLocks: gap,
        sharedLocks: gap,
        exclusion: "held",
        granularity: "database",
        rowLocks: gap,
        tableLocks: gap,
        leases: gap,
        wake: gap,
        versions: gap,
        once: gap,
        savepoints: true,
        lockIsolation: ["serializable", "read committed"],
        lockFirstIsolation: [],
        isolation: ["serializable", "read committed"],
        defaultIsolation: "serializable",
        cancel: gap,
        serverDeadline: gap,
        commitOutcome: gap,
        holders: gap,
        inspect: gap,
        foreignKeys: gap,
        currentReads: true,
        namedLocks: gap,
        connections: "many",
      };
    },
    async begin(connection, { wait }) {
      await begin(connection, wait === "nowait" ? 0 : wait);
      return { granted: true, begun: {} };
    },
    async end(connection, how) {
      await connection.query(how === "commit" ? sql`COMMIT` : sql`ROLLBACK`);
      return true;
    },
    async savepoint(connection, name, action) {
      const words = { set: "SAVEPOINT", release: "RELEASE", rollback: "ROLLBACK TO" };
      await connection.query(sql`${sql.raw(words[action])} ${sql.id(name)}`);
    },
    lock: async () => ({ granted: true }),
    query: (connection, statement) => connection.query(statement),
    classify,
    migrations: {
      all: [migration],
      print: (statement) => render(statement, written).text,
      record: () => sql`SELECT 1`,
      applied: async () => [],
      async apply(connection) {
        for (const statement of migration.statements) await connection.query(statement);
        return [migration];
      },
    },
  };
  return engine;
}

/** A connection for each who asks: SQLite itself keeps them apart. */
export function fromBareSqlite(
  file: string,
  engine: Engine<SqlConnection>,
): Database<DatabaseSync, SqlConnection> {
  const never = new AbortController().signal;
  return {
    engine,
    traits: {
      client: "node:sqlite",
      cancel: false,
      listen: false,
      embedded: false,
      single: false,
      pinned: true,
      begins: false,
    },
    async connect() {
      const native = new DatabaseSync(file);
      // Nobody pulls the plug on it here.
      native.exec("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA busy_timeout = 5000");
      const connection: SqlConnection = {
        lost: never,
        async query(statement) {
          const { text, values } = render(statement, written);
          const prepared = native.prepare(text);
          prepared.setReadBigInts(true);
          const bound = values as SQLInputValue[];
          if (prepared.columns().length > 0) return { rows: prepared.all(...bound), affected: 0 };
          return { rows: [], affected: Number(prepared.run(...bound).changes) };
        },
      };
      return { connection, native, release: () => native.close() };
    },
    join() {
      throw new UnsupportedError("transaction: this engine is a sketch of the patterns alone");
    },
  };
}
