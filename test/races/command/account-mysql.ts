/** The same on MySQL and MariaDB. */
import assert from "node:assert/strict";
import type { RaceContext, RaceScenario } from "@holdfast/cli";
import { fromMysql2 } from "holdfast/mysql2";
import { type RowDataPacket, createPool } from "mysql2/promise";

export function spend({ url }: RaceContext): RaceScenario {
  const pool = createPool({ uri: url.replace(/^mariadb:/, "mysql:"), connectionLimit: 4 });
  const act = async () => {
    const [[row]] = await pool.query<RowDataPacket[]>("SELECT balance FROM rich WHERE id = 1");
    if (row && row["balance"] >= 60)
      await pool.query("UPDATE account SET balance = ? WHERE id = 1", [row["balance"] - 60]);
  };
  return {
    db: fromMysql2(pool),
    // Its tables have triggers, which cannot be turned off here.
    reset: () => pool.query("UPDATE account SET balance = 100 WHERE id = 1"),
    actors: { A: act, B: act },
    invariant: async () => {
      const [[row]] = await pool.query<RowDataPacket[]>(
        "SELECT balance, doubled(balance) AS twice, (SELECT count(*) FROM journal) AS n FROM account WHERE id = 1",
      );
      assert.ok(row && row["n"] > 0 && row["twice"] === row["balance"] * 2);
    },
    close: () => pool.end(),
  };
}
