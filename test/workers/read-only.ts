/** What becomes of a lock on a file that this process may read, and not write. */
import { createClient } from "@libsql/client";
import Database from "better-sqlite3";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromLibsql } from "holdfast/libsql";
import { fromNodeSqlite } from "holdfast/node-sqlite";

const [file = ""] = process.argv.slice(2);
const told: Record<string, unknown> = {};
for (const [name, hf] of Object.entries({
  "better-sqlite3": holdfast(fromBetterSqlite3(() => new Database(file))),
  "node:sqlite": holdfast(fromNodeSqlite(() => new DatabaseSync(file))),
  libsql: holdfast(fromLibsql(createClient({ url: `file:${file}` }))),
} as Record<string, Holdfast<unknown>>))
  told[name] = await hf
    .transaction({ lock: key("upload", 1) }, async () => "entered")
    .catch((error: { code?: unknown }) => error.code);
console.log(JSON.stringify(told));
