import { randomBytes } from "node:crypto";
import type { SqlConnection } from "../../../seam/database.ts";
import { UnsupportedError } from "../../../seam/errors.ts";
import { Silence, within } from "../../../waiting/interrupt.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import { isTrue } from "../probe.ts";

/** How long B may be without an answer, while A is in its transaction. */
const aloneMs = 2000;

/** No such function, not built in, not for this user: nothing can be said. */
const unknown: ReadonlySet<unknown> = new Set(["42883", "0A000", "42501"]);

/**
 * What a lock of a transaction is for, tried out: while A has one, B must not get it (nodes of a cluster may have one each), and
 * what B has committed meanwhile must be seen by A's next statement (READ COMMITTED may be a snapshot by another name, and says
 * so of itself all the same). No table is needed: a snapshot tells whether it knows of B's transaction. Five questions.
 */
export async function verifyLocks(a: SqlConnection, b: SqlConnection): Promise<void> {
  const key = sql.raw(String(randomBytes(8).readBigInt64BE()));
  const ask = async (on: SqlConnection, statement: Statement) => (await on.query(statement)).rows[0];
  let asked: ReturnType<typeof ask> | undefined;
  await a.query(sql.raw("BEGIN ISOLATION LEVEL READ COMMITTED"));
  try {
    // The key is random: nobody has it.
    await ask(
      a,
      sql`SELECT pg_catalog.pg_advisory_xact_lock_shared(${key})::pg_catalog.text AS taken, pg_catalog.pg_current_snapshot()::pg_catalog.text AS before`,
    );
    asked = ask(
      b,
      sql`SELECT pg_catalog.pg_try_advisory_xact_lock(${key}) AS taken, pg_catalog.pg_current_xact_id()::pg_catalog.text AS xid`,
    );
    const other = await within(aloneMs, asked).catch((error: unknown) => {
      if (!(error instanceof Silence)) throw error;
      return undefined;
    });
    // A pooler has no other session to lend: nothing can be seen with one.
    if (!other) return;
    if (isTrue(other.taken))
      throw new UnsupportedError(
        "two sessions had the same advisory lock at once: this server, or what stands between, does not keep them apart (nodes of a " +
          'cluster, a proxy). Connect to one server for all that locks, or use strategy: "lock row" if rows are locked there: `holdfast certify` tells',
      );
    const xid = sql.raw(`'${String(other.xid).replaceAll(/\D/g, "")}'::pg_catalog.xid8`);
    const after = await ask(
      a,
      sql`SELECT pg_catalog.pg_visible_in_snapshot(${xid}, pg_catalog.pg_current_snapshot()) AS seen`,
    );
    if (!isTrue(after?.seen))
      throw new UnsupportedError(
        "a READ COMMITTED transaction did not see what another one had committed before its statement: what is read under a lock " +
          "would be older than the lock. Set the server so that READ COMMITTED is that (YugabyteDB: yb_enable_read_committed_isolation), or connect to it directly",
      );
  } catch (error) {
    const { code } = (a.unwrap?.(error) ?? error) as { code?: unknown };
    if (!unknown.has(code)) throw error;
  } finally {
    await a.query(sql.raw("ROLLBACK"));
    await asked?.catch(() => {});
  }
}
