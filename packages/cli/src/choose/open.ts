/** How each database is opened: the lines before those of an answer. */
import type { Database } from "./questions.ts";

export interface Opening {
  readonly imports: readonly string[];
  readonly code: string;
  /** What to install beside holdfast. */
  readonly install: string;
  /** What is different there, if it is. */
  readonly note?: string;
}

const mysql: Opening = {
  imports: ['import { fromMysql2 } from "holdfast/mysql2";', 'import { createPool } from "mysql2/promise";'],
  code: 'const hf = holdfast(fromMysql2(createPool(process.env.DATABASE_URL ?? "")));',
  install: "mysql2",
};

export const openings: Readonly<Record<Database, Opening>> = {
  postgres: {
    imports: ['import { fromPg } from "holdfast/pg";', 'import { Pool } from "pg";'],
    code: "const hf = holdfast(fromPg(new Pool({ connectionString: process.env.DATABASE_URL })));",
    install: "pg",
  },
  mysql,
  mariadb: mysql,
  sqlite: {
    imports: [
      'import { DatabaseSync } from "node:sqlite";',
      'import { fromNodeSqlite } from "holdfast/node-sqlite";',
    ],
    code: 'const hf = holdfast(fromNodeSqlite(() => new DatabaseSync("app.db")));',
    install: "",
    note: "One writer at a time in the whole file: a lock of one key also waits for that of another.",
  },
  libsql: {
    imports: [
      'import { createClient } from "@libsql/client";',
      'import { fromLibsql } from "holdfast/libsql";',
    ],
    code: 'const hf = holdfast(fromLibsql(createClient({ url: "file:app.db" })));',
    install: "@libsql/client",
    note: "Local files: one writer at a time in the whole file. Remote databases are not run by the tests.",
  },
  duckdb: {
    imports: [
      'import { DuckDBInstance } from "@duckdb/node-api";',
      'import { fromDuckdb } from "holdfast/duckdb";',
    ],
    code: 'const hf = holdfast(fromDuckdb(await DuckDBInstance.create("app.duckdb")));',
    install: "@duckdb/node-api",
    note: "Within one process: DuckDB lets no second one write to a file.",
  },
};
