import type { Begun, LockGrant, Open, Result, SqlConnection, Step } from "../../../seam/database.ts";
import {
  ReplicaError,
  SerializationError,
  TransactionAbortedError,
  UsageError,
} from "../../../seam/errors.ts";
import type { LockRequest } from "../../../seam/key.ts";
import { sql } from "../../../seam/sql.ts";
import { namesOf } from "../dialect.ts";
import { takingRows } from "../locks/lock-rows.ts";
import { checked, explain, run, waitIsOver } from "../locks/index.ts";
import { type Usual, beginStep, beginText, opening, usualOpening } from "./opening.ts";
import { identityOf } from "./outcome.ts";
import { isTrue, lastRow, nodesDecide } from "../probe.ts";
import { session } from "../locks/session.ts";
import * as protection from "../../../seam/protections.ts";

export type OpeningRow = Result["rows"][number];

export async function begin(connection: SqlConnection, open: Open): Promise<LockGrant & { begun?: Begun }> {
  const { begun, wait, capabilities } = open;
  const byRows = open.locks.length > 0 && capabilities.transactionLocks === "lock row";
  const [before, locks] = open.lockFirst ? [open.locks, []] : [[], open.locks];
  if (before.length > 0) {
    const grant = await session.take(connection, {
      locks: before,
      wait,
      names: [],
      joined: false,
      capabilities,
    });
    if (!grant.granted) return grant;
  }
  let row: OpeningRow | undefined;
  try {
    const rows = byRows ? [takingRows(locks, wait, open.names, namesOf(connection))] : [];
    const start = begun ? [] : [beginText(open)];
    const checks = checked(connection);
    const usual = byRows ? undefined : usualOpening(open, checks);
    if (byRows) {
      const results = await run(connection, [...start, opening(open, [], checks), ...rows]);
      row = results[start.length]?.rows[0];
    } else {
      row =
        (usual && (await openPrepared(connection, open, start, usual))) ??
        lastRow(await run(connection, [...start, usual?.text() ?? opening(open, locks, checks)]));
    }
  } catch (error) {
    if (locks.length === 0 || !waitIsOver(connection, error))
      throw byRows ? explain(connection, error) : error;
    return {
      granted: false,
      reason: byRows && wait === "nowait" ? "busy" : "timeout",
      usable: false,
      cause: error,
    };
  }
  verify(row, open);
  if (!byRows && locks.length > 0 && wait === "nowait" && !isTrue(row?.free))
    return { granted: false, reason: "busy", usable: false };
  return { granted: true, begun: await begunOf(connection, row, open, before) };
}

/** Throws if what was opened is not what was asked for. */
export function verify(row: OpeningRow | undefined, { begun, isolation, readOnly, locks }: Open): void {
  if (readOnly ? isTrue(row?.standby) && locks.length > 0 : row?.xid === null) throw new ReplicaError();
  // Without a row the server has gone away, which is told elsewhere.
  if (protection.isolationVerified && (begun || row) && row?.isolation !== isolation) {
    throw new UsageError(
      begun
        ? `The client opened the transaction as ${String(row?.isolation)}, not as ${isolation}`
        : `The transaction was begun as ${isolation}, and the server says that it is ${String(row?.isolation)}: what stands between ` +
            `has changed that, or the server does not have this level. \`holdfast certify\` tells which it has`,
      "HF_ISOLATION",
    );
  }
}

export async function begunOf(
  connection: SqlConnection,
  row: OpeningRow | undefined,
  { readOnly, capabilities }: Open,
  sessionLocks: readonly LockRequest[] = [],
): Promise<Begun> {
  return {
    identity: readOnly ? undefined : await identityOf(connection, row?.xid, capabilities),
    sessionLocks,
    number: typeof row?.xid === "string" ? row.xid.split("/")[0] : undefined,
    spread: capabilities.commitOutcome === nodesDecide,
  };
}

/** Servers behind a pooler that moves clients between sessions: there it is there for some and not for others. */
const unprepared = new WeakSet<Open["capabilities"]>();

/** In one message, as steps if the session is known to be our own; undefined: it is to be opened without. */
async function openPrepared(
  connection: SqlConnection,
  open: Open,
  start: readonly string[],
  usual: Usual,
): Promise<OpeningRow | undefined> {
  const { script, sequence, session: identity } = connection;
  const direct = open.capabilities.details?.["direct"] === true;
  if (!script || !identity || unprepared.has(open.capabilities)) return undefined;
  // In a transaction that somebody else began there is no second try, so it must be known that the session is our own.
  if (open.begun && !direct) return undefined;
  try {
    if (!sequence || !direct) return await openByScript(script, identity, start, usual);
    const steps: Step[] = open.begun ? [usual.step()] : [beginStep(open), usual.step()];
    return (await sequence(steps).at(-1))?.rows[0];
  } catch (error) {
    if (!isNotKept(connection, error)) throw error;
    unprepared.add(open.capabilities);
    if (open.begun)
      throw new SerializationError(
        "A statement that was prepared on this session is gone (DISCARD ALL, or a pooler). It is not used again: run the transaction once more.",
        error,
      );
    await connection.query(sql.raw("ROLLBACK"));
    return undefined;
  }
}

async function openByScript(
  script: NonNullable<SqlConnection["script"]>,
  identity: object,
  start: readonly string[],
  { prepared, execute }: Usual,
): Promise<OpeningRow | undefined> {
  const prepare = prepared.isOn(identity) ? [] : [prepared.definition];
  try {
    return lastRow(await script([...start, ...prepare, execute()].join("; ")));
  } finally {
    // What is prepared outlives the transaction, also one that failed.
    prepared.markOn(identity);
  }
}

/**
 * 26000: it is not there, 42P05: it is there already: this is not the session that it was. 0A000: its result has other columns
 * now. In none of these cases has it run.
 */
const notKept = new Set<unknown>(["26000", "42P05", "0A000"]);

export function isNotKept({ unwrap }: SqlConnection, error: unknown): boolean {
  return notKept.has(((unwrap?.(error) ?? error) as { code?: unknown }).code);
}

export async function end(
  connection: SqlConnection,
  how: "commit" | "rollback",
  { sessionLocks = [] }: Begun,
): Promise<boolean> {
  const early = how === "commit" && isEnded(connection);
  const { command } = early ? {} : await connection.query(sql.raw(how === "commit" ? "COMMIT" : "ROLLBACK"));
  const given =
    sessionLocks.length === 0 || (await session.give(connection, sessionLocks).catch(() => false));
  if (early) throw TransactionAbortedError.early();
  if (protection.abortedCommitSeen && how === "commit" && command === "ROLLBACK")
    throw new TransactionAbortedError();
  return given;
}

/** As far as the client knows. The server answers a second COMMIT with nothing but a warning. */
export function isEnded(connection: SqlConnection): boolean {
  return connection.isInTransaction?.() === false && connection.doubtful?.() === false;
}

/** An aborted transaction answers COMMIT with a ROLLBACK, and most clients that send it do not look. */
export async function settle(connection: SqlConnection): Promise<void> {
  if (connection.doubtful && !connection.doubtful()) return;
  await connection.query(sql.raw("SELECT 1 AS one"));
}
