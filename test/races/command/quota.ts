/** For `holdfast race`: an upload that checks the quota, then writes; and one that locks the row first. */
import assert from "node:assert/strict";
import type { RaceContext, RaceScenario } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

const limit = 100;

/** Two uploads of 60 bytes at the same time; `lock` ends the statement that reads what is used. */
async function uploads(url: string, lock: "" | " FOR UPDATE"): Promise<RaceScenario> {
  const pool = new Pool({ connectionString: url, max: 4 });
  const drop = () => pool.query("DROP TABLE IF EXISTS person");
  await drop();
  await pool.query(
    "CREATE TABLE person (name text PRIMARY KEY, used int NOT NULL); INSERT INTO person VALUES ('<b>ada</b>', 0)",
  );

  async function upload(): Promise<void> {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      const { rows } = await client.query<{ used: number }>(
        `SELECT used FROM person WHERE name = $1${lock}`,
        ["<b>ada</b>"],
      );
      const used = (rows[0]?.used ?? 0) + 60;
      if (used <= limit)
        await client.query("UPDATE person SET used = $1 WHERE name = $2", [used, "<b>ada</b>"]);
      await client.query("COMMIT");
      if (used > limit) throw new Error("over the quota");
    } finally {
      client.release();
    }
  }

  return {
    db: fromPg(pool),
    reset: () => pool.query("UPDATE person SET used = 0"),
    actors: { A: upload, B: upload },
    invariant: (results) => {
      const granted = Object.values(results).filter(({ status }) => status === "fulfilled").length;
      assert.equal(granted, 1, `${granted} uploads of 60 fit into ${limit}`);
    },
    close: async () => {
      await drop();
      await pool.end();
    },
  };
}

export const naive = ({ url }: RaceContext) => uploads(url, "");
export const locked = async ({ url }: RaceContext) => ({
  ...(await uploads(url, " FOR UPDATE")),
  name: "quota with its row locked",
});
/** Exports that are no scenarios are no obstacle. */
export const bytes = 60;
export const add = (a: number, b: number) => a + b;
