/** For `holdfast race`: scenarios that bring their own database, and one that cannot run. */
import assert from "node:assert/strict";
import type { RaceScenario } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

const pool = new Pool({ connectionString: process.env["OBJECTS_URL"], max: 4 });

const like = () => pool.query("UPDATE post SET likes = likes + 1");

export const likes: RaceScenario = {
  name: "likes of a post",
  db: fromPg(pool),
  reset: () => pool.query("CREATE TABLE IF NOT EXISTS post AS SELECT 0 AS likes; UPDATE post SET likes = 0"),
  actors: {
    A: () => {
      // Must not get into what `--json` prints.
      console.log("liked");
      return like();
    },
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
