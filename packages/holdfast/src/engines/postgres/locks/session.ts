import type { SessionLocks, SqlConnection } from "../../../seam/database.ts";
import { type LockRequest, isWorkersLock } from "../../../seam/key.ts";
import { sql } from "../../../seam/sql.ts";
import { namesOf } from "../dialect.ts";
import { isLock, trying, unlocking, waiting } from "./keys.ts";
import { checked, granted, waitIsOver } from "./index.ts";
import { inUseOn } from "../map.ts";
import { atPrimary } from "../primary.ts";
import { isTrue, verifySessions } from "../probe.ts";
import { label, setLocal } from "../settings.ts";

/** What a session shows of its locks in its application's name: the first of those that have names, until that one is given back. */
interface Shown {
  /** The application's own name, to be put back. */
  readonly before: string;
  /** By the id of a call's first key, in the order of the calls. */
  readonly names: Map<string, readonly string[]>;
}

const shownBy = new WeakMap<SqlConnection, Shown>();

const idOf = (locks: readonly LockRequest[]): string => locks[0]?.key.id ?? "";

const held = (request: LockRequest) =>
  `EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype OPERATOR(pg_catalog.=) 'advisory' AND pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() AND granted AND ${isLock("", request)})`;

/** Who changes the map of several databases finds by it that a session has locks. After the lock itself, so that no failure leaves it behind. */
function inUse(connection: SqlConnection, { key }: LockRequest): readonly LockRequest[] {
  const names = namesOf(connection);
  return names.check === undefined || isWorkersLock(key) ? [] : [inUseOn(names)];
}

export const session: SessionLocks<SqlConnection> = {
  async take(connection, { locks, wait, names }) {
    // A lock of a standby would keep nobody out.
    const checks = [`${atPrimary} AS here`, ...checked(connection)];
    const until = performance.now() + (wait === "nowait" ? 0 : wait);
    for (const [i, request] of locks.entries()) {
      try {
        if (wait === "nowait") {
          const tried = trying([request, ...inUse(connection, request)], "session");
          const [row] = (
            await connection.query(sql.raw(`SELECT ${[...checks, `${tried} AS free`].join(", ")}`))
          ).rows;
          if (isTrue(row?.free)) continue;
          await session.clear(connection, locks.slice(0, i));
          return { granted: false, reason: "busy", usable: true };
        }
        // Local to the statement's own transaction, so it ends with it.
        const patience = setLocal("lock_timeout", `'${Math.max(1, Math.ceil(until - performance.now()))}'`);
        const taken = waiting([request, ...inUse(connection, request)], "session");
        await connection.query(sql.raw(`SELECT ${[...checks, patience, ...taken].join(", ")}`));
      } catch (error) {
        if (!waitIsOver(connection, error)) throw error;
        await session.clear(connection, locks.slice(0, i));
        // It may have been granted at that instant, and what comes after it has not.
        await clear(connection, [request]);
        return { granted: false, reason: "timeout", usable: true, cause: error };
      }
    }
    await show(connection, locks, names);
    return granted;
  },

  async give(connection, locks) {
    // pg_advisory_unlock answers false where it did not hold the lock, and warns where nobody looks.
    const given = [
      `${atPrimary} AS here`,
      ...locks.map((request, i) => `${unlocking(request)} AS given${i}`),
    ];
    const used = locks.flatMap((request) => inUse(connection, request).map(unlocking));
    const [row] = (await connection.query(sql.raw(`SELECT ${[...given, ...used].join(", ")}`))).rows;
    await hide(connection, locks);
    return locks.every((_, i) => isTrue(row?.[`given${i}`]));
  },

  async clear(connection, locks) {
    await clear(
      connection,
      locks.flatMap((request) => [request, ...inUse(connection, request)]),
    );
    await hide(connection, locks);
  },

  verify: verifySessions,

  async ping(connection) {
    await connection.query(sql.raw("SELECT 1 AS one"));
  },
};

/** A timeout or a cancel can arrive although the lock was granted at that instant, and a session lock stays then. */
async function clear(connection: SqlConnection, locks: readonly LockRequest[]): Promise<void> {
  if (locks.length === 0) return;
  const given = [
    atPrimary,
    ...locks.map((request) => `CASE WHEN ${held(request)} THEN ${unlocking(request)} END`),
  ];
  await connection.query(sql.raw(`SELECT ${given.join(", ")}`));
}

async function show(
  connection: SqlConnection,
  locks: readonly LockRequest[],
  names: readonly string[],
): Promise<void> {
  // A worker's lock is named by its table.
  if (names.length === 0 || locks.some(({ key }) => isWorkersLock(key))) return;
  const shown = shownBy.get(connection);
  if (shown) return void shown.names.set(idOf(locks), names);
  const [row] = (
    await connection.query(
      sql.raw(
        `SELECT pg_catalog.current_setting('application_name') AS before, pg_catalog.set_config('application_name', pg_catalog.current_setting('application_name') OPERATOR(pg_catalog.||) '${label(names)}', false)`,
      ),
    )
  ).rows;
  shownBy.set(connection, { before: String(row?.before), names: new Map([[idOf(locks), names]]) });
}

/** Shows the next one's name, if it was that of these. */
async function hide(connection: SqlConnection, locks: readonly LockRequest[]): Promise<void> {
  const shown = shownBy.get(connection);
  if (!shown) return;
  const { before, names } = shown;
  const [first] = names.keys();
  names.delete(idOf(locks));
  if (first !== idOf(locks)) return;
  const [next] = names.values();
  if (!next) shownBy.delete(connection);
  await connection.query(
    sql`SELECT pg_catalog.set_config('application_name', ${before + label(next ?? [])}::pg_catalog.text, false)`,
  );
}
