/** What becomes of a transaction whose COMMIT would make a file larger than this process may. */
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { DuckDBInstance } from "@duckdb/node-api";
import { createClient } from "@libsql/client";
import Database from "better-sqlite3";
import { type Holdfast, holdfast, sql } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromDuckdb } from "holdfast/duckdb";
import { fromLibsql } from "holdfast/libsql";
import { fromNodeSqlite } from "holdfast/node-sqlite";

const [folder = ""] = process.argv.slice(2);
const file = (name: string) => join(folder, `${name}.db`);
const duckdb = await DuckDBInstance.create(file("duckdb"));
const instances: Record<string, Holdfast<unknown>> = {
  "better-sqlite3": holdfast(fromBetterSqlite3(() => new Database(file("better")))),
  "node:sqlite": holdfast(fromNodeSqlite(() => new DatabaseSync(file("node")))),
  libsql: holdfast(fromLibsql(createClient({ url: `file:${file("libsql")}` }))),
  duckdb: holdfast(fromDuckdb(duckdb)),
};
const told: Record<string, unknown> = {};
for (const [name, hf] of Object.entries(instances)) {
  await hf.transaction((tx) => tx.query(sql`CREATE TABLE t (text varchar)`));
  told[name] = await hf
    .transaction(async (tx) => {
      // So that nothing is written before.
      if (name !== "duckdb") await tx.query(sql`PRAGMA cache_size = -100000`);
      for (let i = 0; i < 100; i++) await tx.query(sql`INSERT INTO t VALUES (${String(i).repeat(50_000)})`);
    })
    .then(
      () => "committed",
      ({ code, message }: { code?: unknown; message: string }) => code ?? message,
    );
}
console.log(JSON.stringify(told));
process.exit();
