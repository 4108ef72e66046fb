/**
 * Deleted rows stay in the indexes until the server purges them, and are locked like rows until then. What a statement waits for
 * depends on that: with such a row two that look for it wait for each other's lock of the row; without it both lock the gap.
 */
import { setTimeout as sleep } from "node:timers/promises";
import type { SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";

const pollMs = 2;
const triesEach = 4;
/** On a machine that has time it takes 10. An old snapshot of another session keeps the server from it. */
const mostMs = 600;

/** Waits until what is deleted by now is purged. False: it is not, or this user may not know. */
export async function settle(connection: SqlConnection): Promise<boolean> {
  let woken = false;
  try {
    const until = performance.now() + mostMs;
    const { next } = await progress(connection);
    const isDone = async () => {
      const { purged, left } = await progress(connection);
      return purged >= next || left === 0;
    };
    const { rows } = await connection.query(sql.raw("SELECT VERSION() AS version"));
    const mariadb = /mariadb/i.test(String(rows[0]?.["version"]));
    for (let tries = 0; !(await isDone()); tries++) {
      if (performance.now() > until) return false;
      // MariaDB purges once a second, unless it is told to.
      if (mariadb) {
        await hurry(connection);
        continue;
      }
      if (tries % triesEach === 0) {
        woken = true;
        // Not everybody may.
        await wake(connection).catch(() => {});
      }
      await sleep(pollMs);
    }
    return true;
  } catch {
    return false;
  } finally {
    if (woken)
      await connection.query(sql.raw("DROP TEMPORARY TABLE IF EXISTS holdfast_purge")).catch(() => {});
  }
}

/** The number of the next transaction, of the first one that is not purged, and how many have left something to purge. */
async function progress(
  connection: SqlConnection,
): Promise<{ readonly next: number; readonly purged: number; readonly left: number }> {
  const { rows } = await connection.query(sql.raw("SHOW ENGINE INNODB STATUS"));
  const text = Object.values(rows[0] ?? {}).join("\n");
  const [, next, purged, left] =
    /Trx id counter (\d+)\s+Purge done for trx's n:o < (\d+).*\s+History list length (\d+)/.exec(text) ?? [];
  if (left === undefined) throw new Error("the server does not tell what it has purged");
  return { next: Number(next), purged: Number(purged), left: Number(left) };
}

/** The purge is idle, and has not heard of what was committed last: it hears of this. */
async function wake(connection: SqlConnection): Promise<void> {
  await connection.query(sql.raw("CREATE TEMPORARY TABLE IF NOT EXISTS holdfast_purge AS SELECT 0 AS n"));
  await connection.query(sql.raw("UPDATE holdfast_purge SET n = n + 1"));
}

/** Takes 100 ms: so often the server looks whether it is through. Ended where somebody's old snapshot is in the way. */
async function hurry(connection: SqlConnection): Promise<void> {
  await connection.query(
    sql.raw("SET @holdfast_time = @@max_statement_time, SESSION max_statement_time = 0.15"),
  );
  // Refused to users that may not set it, and by servers before 10.5.
  await connection.query(sql.raw("SET GLOBAL innodb_max_purge_lag_wait = 0")).catch(() => {});
  await connection.query(sql.raw("SET SESSION max_statement_time = @holdfast_time"));
}
