/**
 * A note for the transaction that is about to be ended: that it was meant, and is not to be run again. What the server tells its client
 * is the same as after a restart. The note is a lock, which needs no table, and which `engines/<family>/killed.ts` of the library looks for.
 */
import { type Server, type Session, safePath } from "../server.ts";

/** Ids of transactions ("hfkx"), and of sessions ("hfkp"). */
const transactions = 0x68666b78;
const sessions = 0x68666b70;

/**
 * Of a transaction, with all of its savepoints, since locks of sessions stay behind on a pooler's connections. An id has 32 bits in
 * pg_locks, and a lock's number is signed.
 */
const onPostgres = `SELECT pg_try_advisory_xact_lock_shared(${sessions}, $1::int),
  (SELECT count(pg_try_advisory_xact_lock_shared(${transactions}, ((transactionid::text::bigint + 2147483648) % 4294967296 - 2147483648)::int))
    FROM pg_locks WHERE pid = $1::int AND locktype = 'transactionid' AND granted)`;

/** It lasts until it is disposed of. */
export async function leaveNote(server: Server, id: string): Promise<Session> {
  const session = await server.session();
  try {
    if (server.kind === "postgres") {
      await session.query(`BEGIN READ ONLY; ${safePath}`);
      await session.query(onPostgres, [Number(id)]);
    } else await session.query("SELECT GET_LOCK(?, 0)", [`holdfast:killed:${id}`]);
    return session;
  } catch (error) {
    await session[Symbol.asyncDispose]();
    throw error;
  }
}
