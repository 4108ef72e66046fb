/**
 * Whatever DATABASE_URL names: PostgreSQL, MySQL, MariaDB or a file of SQLite. An application has one of them, and needs
 * none of this but a line like `holdfast(fromPg(pool))`. Statements are written with `sql`, and sent by `tx.query`, where they are
 * to be the same on all of them; `tx.client` is the client's own transaction.
 */
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, type HoldfastOptions, type Statement, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import mysql from "mysql2/promise";
import { Pool } from "pg";

export type Kind = "postgres" | "mysql" | "sqlite";

export interface Database extends AsyncDisposable {
  readonly kind: Kind;
  readonly hf: Holdfast<unknown>;
  /** In a transaction of its own. */
  query<Row extends object>(statement: Statement): Promise<Row[]>;
  /** CREATE TABLE and the like. */
  define(statement: string): Promise<void>;
}

export function kindOf(url: string): Kind {
  const [, scheme = ""] = /^([a-z]+):/i.exec(url) ?? [];
  const kinds: Readonly<Record<string, Kind>> = {
    postgres: "postgres",
    postgresql: "postgres",
    mysql: "mysql",
    mariadb: "mysql",
    file: "sqlite",
    sqlite: "sqlite",
  };
  const kind = kinds[scheme.toLowerCase()];
  if (kind) return kind;
  throw new Error("DATABASE_URL is none of postgres:, mysql:, mariadb:, file: and sqlite:");
}

interface Opened {
  readonly hf: Holdfast<unknown>;
  define(statement: string): Promise<unknown>;
  close?(): Promise<void>;
}

const opening: Readonly<Record<Kind, (url: string, options: HoldfastOptions) => Opened>> = {
  postgres(connectionString, options) {
    const pool = new Pool({ connectionString });
    return {
      hf: holdfast(fromPg(pool), options),
      define: (statement) => pool.query(statement),
      close: () => pool.end(),
    };
  },
  mysql(url, options) {
    // Both speak one protocol, of which the driver knows one name.
    const pool = mysql.createPool(url.replace(/^mariadb:/i, "mysql:"));
    return {
      hf: holdfast(fromMysql2(pool), options),
      define: (statement) => pool.query(statement),
      close: () => pool.end(),
    };
  },
  sqlite(url, options) {
    const path = url.replace(/^(?:file|sqlite):(?:\/\/(?=\/))?/i, "");
    const handle = () => {
      const made = new DatabaseSync(path);
      made.exec("PRAGMA busy_timeout = 5000; PRAGMA journal_mode = WAL");
      return made;
    };
    return {
      hf: holdfast(fromNodeSqlite(handle), options),
      async define(statement) {
        const own = handle();
        own.exec(statement);
        own.close();
      },
    };
  },
};

export function connect(url: string, options: HoldfastOptions = {}): Database {
  const kind = kindOf(url);
  const { hf, define, close } = opening[kind](url, options);
  return {
    kind,
    hf,
    query: <Row extends object>(statement: Statement) =>
      hf.transaction((tx) => tx.query(statement)) as Promise<Row[]>,
    define: async (statement) => void (await define(statement)),
    async [Symbol.asyncDispose]() {
      await hf.close();
      await close?.();
    },
  };
}

/** Makes the tables, given as names and columns, and drops them at the end of the scope. */
export async function open(url: string, tables: Readonly<Record<string, string>>): Promise<Database> {
  const database = connect(url);
  const drop = async () => {
    for (const name of Object.keys(tables)) await database.define(`DROP TABLE IF EXISTS ${name}`);
  };
  // A run that was killed has left them.
  await drop();
  for (const [name, columns] of Object.entries(tables))
    await database.define(`CREATE TABLE ${name} (${columns})`);
  return {
    ...database,
    async [Symbol.asyncDispose]() {
      await drop();
      await database[Symbol.asyncDispose]();
    },
  };
}
