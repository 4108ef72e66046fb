/**
 * Locks as rows of a table, one per key. Whoever holds a lock has changed its row and not committed yet. Nobody can
 * wait for that: an UPDATE of the same row fails at once, and takes its transaction with it. It fails too if the row was
 * changed after the transaction's snapshot: so a lock that is granted proves that the snapshot is not older than it.
 */
import type { Begun, LockGrant, LockCall, Open } from "../../seam/database.ts";
import {
  NotInTransactionError,
  SerializationError,
  TransactionAbortedError,
  UnsupportedError,
} from "../../seam/errors.ts";
import { type LockRequest, canonical } from "../../seam/key.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { sleep } from "../../waiting/wait.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { classify, explaining, isConflict } from "./errors.ts";

export const lockTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("lock")} (id varchar NOT NULL, turn bigint NOT NULL)`,
];

const granted = { granted: true } as const satisfies LockGrant;

/** Sessions whose transaction cannot be committed any more, since a part of it was to be undone; and its number. */
const doomed = new WeakMap<object, string>();

export const noSavepoints =
  "DuckDB has no savepoints: if a nested transaction fails, the whole of it is undone and cannot go on";

/** Transactions that were begun here, by their session: who has begun one otherwise has to say so (`joined`). */
const began = new WeakMap<object, { readonly readOnly: boolean; readonly run: object }>();

/** Locks, and their names, that were asked for after the snapshot and were newer than it: by the run whose next attempt takes them first. */
const cameTooLate = new WeakMap<object, ReadonlyMap<LockRequest, string>>();

export const beganHere = ({ session }: DuckdbConnection) => began.get(session);

const text = {
  begin: sql.raw("BEGIN TRANSACTION"),
  readOnly: sql.raw("BEGIN TRANSACTION READ ONLY"),
  commit: sql.raw("COMMIT"),
  rollback: sql.raw("ROLLBACK"),
};

const idsOf = (locks: readonly LockRequest[]) => locks.map(({ key }) => key.id);

/** Resolves to those whose row this transaction does not see. */
async function turn(connection: DuckdbConnection, locks: readonly LockRequest[]): Promise<string[]> {
  const { rows } = await connection.query(
    sql`UPDATE ${own("lock")} SET turn = turn + 1 WHERE id IN (${sql.join(idsOf(locks))}) RETURNING id`,
  );
  const found = new Set(rows.map(({ id }) => String(id)));
  return idsOf(locks).filter((id) => !found.has(id));
}

/** A row that is inserted is seen by nobody before it is committed: it must be there before it is locked. */
async function ensure(connection: DuckdbConnection, locks: readonly LockRequest[]): Promise<void> {
  const inProcess = await connection.inProcess;
  const missing = () => idsOf(locks).filter((id) => !inProcess.knows(id));
  if (missing().length === 0) return;
  await inProcess.oneAtATime.run(() =>
    connection.aside(async (other) => {
      for (const id of missing()) {
        await explaining(
          other.query(
            sql`INSERT INTO ${own("lock")} SELECT ${id}, 0 WHERE NOT EXISTS (SELECT 1 FROM ${own("lock")} WHERE id = ${id})`,
          ),
        );
        inProcess.learn(id);
      }
    }),
  );
}

/** A random pause between tries, for those whom no queue can tell that a caller's own transaction has ended. */
const pause = () => sleep(1 + Math.random() * 9);

/** Begins where the rows can be had, again and again until the wait is over. Resolves to whether they were. */
async function untilFree(until: number, attempt: () => Promise<void>): Promise<unknown> {
  for (;;) {
    try {
      await attempt();
      return undefined;
    } catch (error) {
      if (!isConflict(error)) throw error;
      if (performance.now() >= until) return error;
    }
    await pause();
  }
}

/** How many rows each key has, and what they add up to. */
async function rowsOf(
  connection: DuckdbConnection,
  ids: readonly string[],
): Promise<Map<string, { rows: number; turns: number }>> {
  const { rows } = await connection.query(
    sql`SELECT id, count(*) AS n, sum(turn) AS turns FROM ${own("lock")} WHERE id IN (${sql.join(ids)}) GROUP BY id`,
  );
  return new Map(
    rows.map(({ id, n, turns }) => [String(id), { rows: Number(n), turns: Number(turns) }] as const),
  );
}

/** Takes the rows as a transaction's first statement, which makes its snapshot. */
async function first(connection: DuckdbConnection, locks: readonly LockRequest[]): Promise<void> {
  const unseen = await turn(connection, locks);
  if (unseen.length > 0) throw await older(connection, unseen);
}

async function older(connection: DuckdbConnection, ids: readonly string[]): Promise<SerializationError> {
  const inProcess = await connection.inProcess;
  // Rows may have been deleted by hand: the next attempt makes them anew.
  for (const id of ids) inProcess.forget(id);
  return SerializationError.after(1, new Error("the transaction's snapshot is older than the lock"));
}

/**
 * Takes the rows in the middle of a transaction. A key whose row is newer than the snapshot can still be had if nobody
 * has held it yet: a second row, committed with the rest, then says that somebody has. (Of a caller's own transaction
 * others could not see it, so it must begin again.) Hence rows are counted too: one more than the snapshot shows has
 * been held since.
 */
async function later(
  connection: DuckdbConnection,
  locks: readonly LockRequest[],
  joined: boolean,
): Promise<void> {
  const ids = idsOf(locks);
  if (ids.length === 0) return;
  const [seen, now] = [await rowsOf(connection, ids), await connection.aside((other) => rowsOf(other, ids))];
  const unseen = ids.filter((id) => !seen.has(id));
  const stale = ids.some((id) =>
    seen.has(id) ? seen.get(id)?.rows !== now.get(id)?.rows : joined || now.get(id)?.turns !== 0,
  );
  if (stale) throw await older(connection, ids);
  // Fails if they were changed after the snapshot.
  await turn(connection, locks);
  for (const id of unseen) await connection.query(sql`INSERT INTO ${own("lock")} VALUES (${id}, 1)`);
}

export async function begin(
  connection: DuckdbConnection,
  open: Pick<Open, "locks" | "names" | "wait" | "readOnly" | "signal" | "run">,
): Promise<LockGrant & { begun?: Begun }> {
  const { readOnly, run = {} } = open;
  const named = new Map([...(readOnly ? [] : (cameTooLate.get(run) ?? [])), ...namedLocks(open)]);
  const locks = named.size === 0 ? [] : canonical([...named.keys()]);
  const names = locks.map((request) => named.get(request) ?? "");
  const inProcess = await connection.inProcess;
  try {
    const grant = await inProcess.cancellable(connection.session, open.signal, (signal) =>
      beginWith(connection, { ...open, locks, names, signal }),
    );
    if (grant.granted) began.set(connection.session, { readOnly, run });
    return grant;
  } catch (error) {
    inProcess.leave(connection.session);
    throw error;
  }
}

const namedLocks = ({ locks, names }: Pick<Open, "locks" | "names">): ReadonlyMap<LockRequest, string> =>
  new Map(locks.map((request, i) => [request, names[i] ?? ""]));

async function beginWith(
  connection: DuckdbConnection,
  { locks, names, wait, readOnly, signal }: Pick<Open, "locks" | "names" | "wait" | "readOnly" | "signal">,
): Promise<LockGrant & { begun?: Begun }> {
  const { session } = connection;
  const inProcess = await connection.inProcess;
  doomed.delete(session);
  if (locks.length === 0) {
    await connection.query(readOnly ? text.readOnly : text.begin);
    return { granted: true, begun: {} };
  }
  const until = performance.now() + (wait === "nowait" ? 0 : wait);
  const turns = await inProcess.take(session, locks, names, wait, signal);
  if (!turns.granted) return { ...turns, usable: false };
  await ensure(connection, locks);
  const busy = await untilFree(until, async () => {
    signal?.throwIfAborted();
    // Who only reads cannot change the rows: it is enough that nobody has, after it has its turn and before its snapshot.
    if (readOnly) await turn(connection, locks);
    await connection.query(readOnly ? text.readOnly : text.begin);
    if (readOnly) return;
    try {
      await first(connection, locks);
    } catch (error) {
      await connection.query(text.rollback).catch(() => {});
      throw error;
    }
  });
  if (!busy) return { granted: true, begun: {} };
  inProcess.leave(session);
  return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: false, cause: busy };
}

export async function end(connection: DuckdbConnection, how: "commit" | "rollback"): Promise<boolean> {
  const { session } = connection;
  const inProcess = await connection.inProcess;
  try {
    if (how === "rollback") await undo(connection);
    else {
      // COMMIT of a transaction that has failed says that all is well, and keeps nothing.
      const failed = doomed.has(session)
        ? wholeUndone()
        : await connection.query(sql.raw("SELECT 1 AS alive")).then(
            () => undefined,
            (error: unknown) => new TransactionAbortedError(error),
          );
      if (failed) {
        await undo(connection);
        throw failed;
      }
      await connection.query(text.commit);
    }
    return true;
  } finally {
    doomed.delete(session);
    began.delete(session);
    inProcess.leave(session);
  }
}

async function undo(connection: DuckdbConnection): Promise<void> {
  await connection.query(text.rollback).catch((error: unknown) => {
    if (classify(error as Error) !== "not-in-transaction") throw error;
  });
}

/**
 * There are no savepoints. A nested body is part of the whole; if it fails, the whole can no longer be committed, since
 * its part of it cannot be undone alone.
 */
export async function savepoint(
  connection: DuckdbConnection,
  _name: string,
  action: "set" | "release" | "rollback",
): Promise<void> {
  await assertUsable(connection);
  if (action !== "rollback") return;
  const number = await numberOf(connection);
  // Outside of a transaction every statement has another number, and nothing is left that could be undone.
  if (number === (await numberOf(connection))) doomed.set(connection.session, number);
}

function wholeUndone(): UnsupportedError {
  return new UnsupportedError(`A nested transaction of this one has failed: ${noSavepoints}`);
}

export async function assertUsable(connection: DuckdbConnection): Promise<void> {
  const number = doomed.get(connection.session);
  if (number === undefined) return;
  // A transaction that has failed answers nothing. Another number: the caller has ended it, and has begun another.
  if ((await numberOf(connection).catch(() => number)) === number) throw wholeUndone();
  doomed.delete(connection.session);
}

/** What callers' own transactions hold, by the number of the transaction. */
const joinedLocks = new WeakMap<object, { readonly transaction: string; readonly ids: Set<string> }>();

async function numberOf(connection: DuckdbConnection): Promise<string> {
  const [row] = (await connection.query(sql.raw("SELECT txid_current() AS id"))).rows;
  return String(row?.id);
}

/** Resolves to the transaction's number. */
export async function insist(connection: DuckdbConnection): Promise<string> {
  // A transaction keeps its number; without one every statement has its own.
  const first = await numberOf(connection);
  if (first === (await numberOf(connection))) return first;
  throw new NotInTransactionError(
    "this connection is in no transaction, so a lock would be gone at once. BEGIN first, or use hf.transaction(…).",
  );
}

/** Whether somebody has changed the rows, tried elsewhere: a transaction that meets such a row is lost. */
async function tried(connection: DuckdbConnection, locks: readonly LockRequest[]): Promise<void> {
  if (locks.length === 0) return;
  await connection.aside(async (other) => {
    await other.query(text.begin);
    try {
      await turn(other, locks);
    } finally {
      await other.query(text.rollback);
    }
  });
}

/** Those of the keys that this very transaction of the caller's has not locked before. */
async function notHeld(
  connection: DuckdbConnection,
  locks: readonly LockRequest[],
): Promise<readonly LockRequest[]> {
  const held = joinedLocks.get(connection.session);
  const isOurs = ({ key }: LockRequest) => held?.ids.has(key.id) ?? false;
  if (!held || !locks.some(isOurs)) return locks;
  const free = await tried(connection, locks.filter(isOurs)).then(
    () => true,
    (error: unknown) => {
      if (isConflict(error)) return false;
      throw error;
    },
  );
  // Not asked unless it may be so: the question makes the transaction's snapshot, which must come after any wait.
  if (free || (await insist(connection)) !== held.transaction) return locks;
  return locks.filter((request) => !isOurs(request));
}

export async function lock(
  connection: DuckdbConnection,
  call: Omit<LockCall, "capabilities">,
): Promise<LockGrant> {
  await assertUsable(connection);
  const { session } = connection;
  const inProcess = await connection.inProcess;
  return inProcess
    .cancellable(session, call.signal, (signal) => lockWith(connection, { ...call, signal }))
    .catch((error: unknown) => {
      const run = began.get(session)?.run;
      if (run && (isConflict(error) || error instanceof SerializationError))
        cameTooLate.set(run, new Map([...(cameTooLate.get(run) ?? []), ...namedLocks(call)]));
      throw error;
    });
}

async function lockWith(
  connection: DuckdbConnection,
  { locks, names, wait, joined, signal }: Omit<LockCall, "capabilities">,
): Promise<LockGrant> {
  const { session } = connection;
  const inProcess = await connection.inProcess;
  const until = performance.now() + (wait === "nowait" ? 0 : wait);
  const turns = await inProcess.take(session, locks, names, wait, signal);
  if (!turns.granted) return turns;
  const taken = turns.taken ?? [];
  try {
    await ensure(connection, locks);
    const fresh = locks.filter(({ key }) => taken.includes(key.id));
    const wanted = joined ? await notHeld(connection, fresh) : fresh;
    const busy = await untilFree(until, async () => {
      signal?.throwIfAborted();
      await tried(connection, wanted);
    });
    if (busy) {
      inProcess.give(session, taken);
      return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: true, cause: busy };
    }
    const transaction = joined ? await insist(connection) : "";
    await later(connection, wanted, joined);
    if (!joined) return granted;
    // The end of a caller's own transaction is not told to us: from here on its rows alone keep others out.
    inProcess.give(session, taken);
    const held = joinedLocks.get(session);
    const ids = held?.transaction === transaction ? held.ids : new Set<string>();
    for (const id of idsOf(locks)) ids.add(id);
    joinedLocks.set(session, { transaction, ids });
    return granted;
  } catch (error) {
    inProcess.give(session, taken);
    throw error;
  }
}
