/** For `holdfast race`: on tables that are there, and without a `reset` of its own. */
import assert from "node:assert/strict";
import type { RaceContext, RaceScenario } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

const open = (connectionString: string | undefined) => new Pool({ connectionString, max: 6 });

async function spend(pool: Pool): Promise<void> {
  const { rows } = await pool.query("SELECT balance FROM account WHERE id = 1");
  if (rows[0].balance >= 60)
    await pool.query("UPDATE account SET balance = $1 WHERE id = 1", [rows[0].balance - 60]);
}

function scenario(pool: Pool, actors = pool): RaceScenario {
  return {
    db: fromPg(pool),
    actors: { A: () => spend(actors), B: () => spend(actors) },
    invariant: async () => {
      const { rows } = await pool.query(
        "SELECT balance, current_setting('holdfast.told', true) AS told FROM account",
      );
      console.log(`told: ${rows[0].told}`);
      assert.ok(rows[0].balance >= 0);
    },
    close: async () => {
      await pool.end();
      if (actors !== pool) await actors.end();
    },
  };
}

export const fine = ({ url }: RaceContext) => scenario(open(url));

/** Somebody's database, that no option has named. */
export const elsewhere = () => scenario(open(process.env["ELSEWHERE"]));
export const declared = () => ({ ...scenario(open(process.env["ELSEWHERE"])), ownDatabase: true });

/** Goes on until it is stopped. */
export function endless({ url }: RaceContext): RaceScenario {
  const pool = open(url);
  const astray = process.env["ELSEWHERE"] === undefined ? pool : open(process.env["ELSEWHERE"]);
  const act = async () => {
    for (let i = 0; i < 6; i++) await astray.query("SELECT balance FROM account FOR UPDATE");
    await pool.query("UPDATE account SET balance = balance + 1 WHERE id = 2");
  };
  return {
    db: fromPg(pool),
    actors: { A: act, B: act, C: act, D: act },
    invariant: () => {},
    prune: false,
    maxMs: 600_000,
    onProgress: ({ runs }) => {
      if (runs === 3) console.error("under way");
    },
  };
}

export const broken = async ({ url }: RaceContext): Promise<RaceScenario> => {
  await open(url).query("SELECT 1");
  throw new Error("no idea");
};
