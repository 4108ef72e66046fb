import type { SessionLocks, SqlConnection } from "../../../seam/database.ts";
import type { LockRequest } from "../../../seam/key.ts";
import { sql } from "../../../seam/sql.ts";
import { identity, trying, unlocking, waiting } from "./keys.ts";
import { granted, waitIsOver } from "./index.ts";
import { isTrue, verifySessions } from "../probe.ts";
import { label, setLocal } from "../settings.ts";

/** The application's names of sessions that show a lock's, to be put back. */
const namesBefore = new WeakMap<SqlConnection, string>();

const held = (request: LockRequest) =>
  `EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND (classid, objid, objsubid) = ${identity(request)})`;

export const session: SessionLocks<SqlConnection> = {
  async take(connection, { locks, wait, names }) {
    const until = performance.now() + (wait === "nowait" ? 0 : wait);
    for (const [i, request] of locks.entries()) {
      try {
        if (wait === "nowait") {
          const [row] = (await connection.query(sql.raw(`SELECT ${trying([request], "session")} AS free`)))
            .rows;
          if (isTrue(row?.free)) continue;
          await session.clear(connection, locks.slice(0, i));
          return { granted: false, reason: "busy", usable: true };
        }
        // Local to the statement's own transaction, so it ends with it.
        const patience = setLocal("lock_timeout", `'${Math.max(1, Math.ceil(until - performance.now()))}'`);
        await connection.query(sql.raw(`SELECT ${patience}, ${waiting([request], "session").join()}`));
      } catch (error) {
        if (!waitIsOver(connection, error)) throw error;
        await session.clear(connection, locks.slice(0, i + 1));
        return { granted: false, reason: "timeout", usable: true, cause: error };
      }
    }
    await show(connection, names);
    return granted;
  },

  async give(connection, locks) {
    // pg_advisory_unlock answers false where it did not hold the lock, and warns where nobody looks.
    const given = locks.map((request, i) => `${unlocking(request)} AS given${i}`);
    const [row] = (await connection.query(sql.raw(`SELECT ${given.join(", ")}`))).rows;
    const before = namesBefore.get(connection);
    if (before !== undefined) {
      namesBefore.delete(connection);
      await connection.query(sql`SELECT set_config('application_name', ${before}, false)`);
    }
    return locks.every((_, i) => isTrue(row?.[`given${i}`]));
  },

  async clear(connection, locks) {
    // A timeout or a cancel can arrive although the lock was granted at that instant, and a session lock stays then.
    if (locks.length === 0) return;
    const given = locks.map((request) => `CASE WHEN ${held(request)} THEN ${unlocking(request)} END`);
    await connection.query(sql.raw(`SELECT ${given.join(", ")}`));
  },

  verify: verifySessions,

  async ping(connection) {
    await connection.query(sql.raw("SELECT 1 AS one"));
  },
};

/** Of several locks that share a session, the first one's name is shown. */
async function show(connection: SqlConnection, names: readonly string[]): Promise<void> {
  if (names.length === 0 || namesBefore.has(connection)) return;
  const [row] = (
    await connection.query(
      sql.raw(
        `SELECT current_setting('application_name') AS before, set_config('application_name', current_setting('application_name') || '${label(names)}', false)`,
      ),
    )
  ).rows;
  namesBefore.set(connection, String(row?.before));
}
