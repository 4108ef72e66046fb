/** What is left out because it comes to the same must come to the same. */
import { fromPg } from "holdfast/pg";
import { explore } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { random } from "./harness/random.ts";

describe("random functions, with and without leaving anything out", () => {
  let database: TestDatabase;
  let pool: Pool;

  beforeAll(async () => {
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 8 });
    // The third refers to the second; a trigger of the fourth writes to the first.
    await pool.query(`
      CREATE TABLE t0 (id int PRIMARY KEY, n int NOT NULL);
      CREATE TABLE t1 (id int PRIMARY KEY, n int NOT NULL);
      CREATE TABLE t2 (id int PRIMARY KEY REFERENCES t1 ON UPDATE CASCADE, n int NOT NULL);
      CREATE TABLE t3 (id int PRIMARY KEY, n int NOT NULL);
      CREATE FUNCTION echo() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN UPDATE t0 SET n = n * 2 + NEW.n WHERE id = 1; RETURN NEW; END $$;
      CREATE TRIGGER echo AFTER UPDATE ON t3 FOR EACH ROW EXECUTE FUNCTION echo();
      ${tables.map((table) => `ALTER TABLE ${table} SET (autovacuum_enabled = off)`).join(";")}`);
  });
  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  const tables = ["t0", "t1", "t2", "t3"];
  // What SERIALIZABLE takes for a conflict depends on plans and on free room in pages: each time all is as it was.
  const reset = () =>
    pool.query(
      `TRUNCATE t0, t1, t2, t3; ${tables.map((table) => `INSERT INTO ${table} VALUES (1, 1), (2, 2)`).join(";")}`,
    );

  /** One statement; `seen`: what was read so far, which decides what is written. */
  type Part = (seen: number) => string;

  function program(next: () => number): { parts: Part[]; transaction: string | undefined } {
    const pick = <T>(of: readonly T[]) => of[Math.floor(next() * of.length)] as T;
    const parts = Array.from({ length: 2 + Math.floor(next() * 2) }, (): Part => {
      const table = pick(tables);
      const row = pick([1, 2]);
      const kind = next();
      if (kind < 0.4) return () => `SELECT n FROM ${table} WHERE id = ${row}`;
      if (kind < 0.5) return () => `SELECT sum(n) AS n FROM ${table}`;
      if (kind < 0.6) return () => `SELECT n FROM ${table} WHERE id = ${row} FOR UPDATE`;
      if (kind < 0.8) return (seen) => `UPDATE ${table} SET n = ${seen + 1} WHERE id = ${row}`;
      return () => `UPDATE ${table} SET n = n * 3 WHERE id = ${row}`;
    });
    const level = pick(["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", undefined]);
    return { parts, transaction: level && `BEGIN ISOLATION LEVEL ${level}` };
  }

  function actor({ parts, transaction }: ReturnType<typeof program>): () => Promise<number> {
    return async () => {
      const client = await pool.connect();
      let seen = 0;
      try {
        if (transaction) await client.query(transaction);
        for (const part of parts) {
          const { rows } = await client.query(part(seen));
          if (rows[0]) seen = seen * 10 + Number(rows[0].n);
        }
        if (transaction) await client.query("COMMIT");
        return seen;
      } catch (error) {
        if (transaction) await client.query("ROLLBACK");
        throw error;
      } finally {
        client.release();
      }
    };
  }

  test.for(Array.from({ length: 12 }, (_, i) => i))("program %i", { timeout: 600_000 }, async (i) => {
    const seed = inject("seed") + i;
    const next = random(seed);
    const [A, B] = [actor(program(next)), actor(program(next))];
    const outcomes = async (prune: boolean) => {
      const found = new Set<string>();
      const report = await explore("program", {
        db: fromPg(pool),
        reset,
        actors: { A, B },
        prune,
        preemptions: 99,
        maxMs: 250_000,
        async invariant(results) {
          const { rows } = await pool.query(
            tables.map((table) => `SELECT id, n FROM ${table}`).join(" UNION ALL ") + " ORDER BY 1, 2",
          );
          const ends = Object.values(results).map((each) =>
            each.status === "fulfilled" ? each.value : (each.reason as { code: string }).code,
          );
          found.add(JSON.stringify([ends, rows.map(({ n }) => n)]));
        },
      });
      // Within a trigger nobody can be let in, so that it is never said of one that writes to the fourth.
      const within = report.levels.flatMap(({ unseen }) => unseen);
      for (const text of within) expect(text).toContain("UPDATE t3");
      if (within.length === 0) expect(report.coverage, `HOLDFAST_SEED=${seed}`).toBe("exhaustive");
      return { found: [...found].toSorted(), runs: report.runs };
    };
    const all = await outcomes(false);
    const pruned = await outcomes(true);
    expect(pruned.found, `HOLDFAST_SEED=${seed}`).toEqual(all.found);
    expect(pruned.runs).toBeLessThanOrEqual(all.runs);
  });
});
