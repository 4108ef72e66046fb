/** With many actors, a bug between two of them is found before every order of all has been tried. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import Sqlite from "better-sqlite3";
import { type Exploration, explore, inThread } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type SqlClient, openSql, sqlServers } from "./harness/sql.ts";

const empty = [
  "DELETE FROM seen",
  "DELETE FROM stock",
  "INSERT INTO stock VALUES (1, 0), (2, 0), (3, 0), (4, 0)",
];
const tables = ["CREATE TABLE stock (id int PRIMARY KEY, qty int NOT NULL)", "CREATE TABLE seen (id int)"];

const foundEarly = (report: Exploration) => {
  expect(report, report.text).toMatchObject({ ok: false, preemptions: 1, anomaly: "lost update" });
  expect(report.runs).toBeLessThan(120);
};

describe.each(sqlServers)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let sql: SqlClient;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    sql = openSql(server, database.url, 8);
    await sql.script(...tables);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await sql?.end();
    await database?.drop();
  });

  test("five actors, of which the last two get in each other's way", async () => {
    const add = (id: number) => async () => {
      const qty = await sql.number(`SELECT qty FROM stock WHERE id = ${id}`);
      await sql.rows(`INSERT INTO seen VALUES (${id})`);
      await sql.rows(`UPDATE stock SET qty = ${qty + 1} WHERE id = ${id}`);
    };
    const report = await explore("five", {
      db: sql.db,
      reset: () => sql.script(...empty),
      actors: { A: add(1), B: add(2), C: add(3), D: add(4), E: add(4) },
      invariant: async () => expect(await sql.number("SELECT sum(qty) FROM stock")).toBe(5),
      maxMs: 60_000,
    });
    foundEarly(report);
  });
});

test("on SQLite", async () => {
  const folder = await mkdtemp(join(tmpdir(), "holdfast-early-"));
  const file = join(folder, "early.db");
  const db = new Sqlite(file);
  try {
    db.exec(`PRAGMA journal_mode = WAL; ${tables.join(";")}`);
    const module = new URL("./races/sqlite/early.ts", import.meta.url);
    const add = (id: number) => inThread(module, "add", file, id);
    const report = await explore("five", {
      reset: () => db.exec(empty.join(";")),
      actors: { A: add(1), B: add(2), C: add(3), D: add(4), E: add(4) },
      invariant: () => expect(db.prepare("SELECT sum(qty) FROM stock").pluck().get()).toBe(5),
      maxMs: 60_000,
    });
    foundEarly(report);
  } finally {
    db.close();
    await rm(folder, { recursive: true });
  }
});
