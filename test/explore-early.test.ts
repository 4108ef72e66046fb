/** With many actors, a bug between two of them is found before every order of all has been tried. */
import { fromPg } from "holdfast/pg";
import { explore } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  await pool.query("CREATE TABLE stock (id int PRIMARY KEY, qty int NOT NULL); CREATE TABLE seen (id int)");
});
afterAll(async () => {
  await pool?.end();
  await database?.drop();
});

test("five actors, of which the last two get in each other's way", async () => {
  const add = (id: number) => async () => {
    const { rows } = await pool.query("SELECT qty FROM stock WHERE id = $1", [id]);
    await pool.query("INSERT INTO seen VALUES ($1)", [id]);
    await pool.query("UPDATE stock SET qty = $2 WHERE id = $1", [id, rows[0].qty + 1]);
  };
  const report = await explore("five", {
    db: fromPg(pool),
    reset: () =>
      pool.query(
        "DELETE FROM seen; DELETE FROM stock; INSERT INTO stock SELECT i, 0 FROM generate_series(1, 4) i",
      ),
    actors: { A: add(1), B: add(2), C: add(3), D: add(4), E: add(4) },
    async invariant() {
      const { rows } = await pool.query("SELECT sum(qty)::int AS n FROM stock");
      expect(rows[0].n).toBe(5);
    },
    maxMs: 60_000,
  });
  expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "lost update" });
  expect(report.runs).toBeLessThan(120);
});
