/** For `holdfast race`: scenarios on the database that DATABASE_URL says, and one that cannot run. */
import assert from "node:assert/strict";
import type { RaceScenario } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

const pool = new Pool({ connectionString: process.env["DATABASE_URL"], max: 4 });

const like = async () => {
  const { rows } = await pool.query("UPDATE post SET likes = likes + 1 RETURNING current_database() AS name");
  // Must not get into what `--json` prints.
  console.log(`liked in ${rows[0].name}`);
};

export const likes: RaceScenario = {
  name: "likes of a post",
  db: fromPg(pool),
  reset: () => pool.query("CREATE TABLE IF NOT EXISTS post AS SELECT 0 AS likes; UPDATE post SET likes = 0"),
  actors: {
    A: like,
    B: like,
  },
  invariant: async () => {
    const { rows } = await pool.query("SELECT likes FROM post");
    assert.deepEqual(rows, [{ likes: 2 }]);
  },
  // The pool stays open: the command ends all the same.
  close: () => pool.query("DROP TABLE post"),
};

export const alone: RaceScenario = { ...likes, name: "alone", actors: { A: like } };
