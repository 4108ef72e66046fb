import { hash } from "node:crypto";
import type { Begun, Grant, Open, Result, SqlConnection } from "../../core/database.ts";
import { ReplicaError, SerializationError, TransactionAbortedError, UsageError } from "../../core/errors.ts";
import type { LockRequest } from "../../core/key.ts";
import { sql } from "../../core/sql.ts";
import { namesOf } from "./dialect.ts";
import { takingRows } from "./lock-rows.ts";
import { explain, isolationNow, run, standby, taking, waitIsOver } from "./locks.ts";
import { identityOf, xid, xidOn } from "./outcome.ts";
import { isTrue, lastRow } from "./probe.ts";
import { session } from "./session.ts";
import { deadline, label, labelled, setLocal } from "./settings.ts";
import * as protection from "../../core/protections.ts";

const isolationSql = {
  "read uncommitted": "READ UNCOMMITTED",
  "read committed": "READ COMMITTED",
  "repeatable read": "REPEATABLE READ",
  serializable: "SERIALIZABLE",
} as const;

type Row = Result["rows"][number];

export async function begin(connection: SqlConnection, open: Open): Promise<Grant & { begun?: Begun }> {
  const { begun, isolation, readOnly, wait, capabilities } = open;
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
  let row: Row | undefined;
  try {
    const rows = byRows ? [takingRows(locks, wait, open.names, namesOf(connection))] : [];
    const start = begun ? [] : [beginText(open)];
    const usual = byRows ? undefined : usualOpening(open);
    if (byRows) {
      const results = await run(connection, [...start, opening(open, []), ...rows]);
      row = results[start.length]?.rows[0];
    } else {
      row =
        (usual && (await openPrepared(connection, open, start, usual))) ??
        lastRow(await run(connection, [...start, usual?.text() ?? opening(open, locks)]));
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
  if (readOnly ? isTrue(row?.standby) && open.locks.length > 0 : row?.xid === null) throw new ReplicaError();
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
  if (!byRows && locks.length > 0 && wait === "nowait" && !isTrue(row?.free))
    return { granted: false, reason: "busy", usable: false };
  const identity = readOnly ? undefined : await identityOf(connection, row?.xid, capabilities);
  return { granted: true, begun: { identity, sessionLocks: before } };
}

function beginText({ isolation, readOnly }: Open): string {
  return `BEGIN ISOLATION LEVEL ${isolationSql[isolation]}${readOnly ? " READ ONLY" : ""}`;
}

function opening(open: Open, locks: readonly LockRequest[]): string {
  const { begun, readOnly, wait, names } = open;
  const columns = [
    ...labelled(names, "current_setting('application_name')"),
    ...deadline(open),
    isolationNow,
    ...(begun && readOnly ? [setLocal("transaction_read_only", "'on'")] : []),
    ...taking(locks, wait, begun),
    readOnly ? standby : xidOn(open.capabilities),
  ];
  return `SELECT ${columns.join(", ")}`;
}

/**
 * The most common transactions: without a lock, or with one key, taken exclusively. As a prepared statement of the
 * session where that can be had, since parsing and planning the text is most of what it costs (server CPU: 140 µs as
 * text, 86 µs prepared). In one column: a client that decodes seven spends another 20 µs.
 */
class Prepared {
  readonly name: string;
  readonly definition: string;
  readonly #text: string;
  readonly #on = new WeakSet<object>();

  constructor(types: string, steps: readonly string[]) {
    this.#text = `SELECT concat(${steps.join(", ")}) AS done, ${isolationNow}, ${xid}`;
    // Named for its text: another version's statement, left behind on a pooled session, must not be mistaken for it.
    this.name = `holdfast_${hash("sha256", this.#text, "hex").slice(0, 12)}`;
    this.definition = `PREPARE ${this.name}(${types}) AS ${this.#text}`;
  }

  isOn(session: object): boolean {
    return this.#on.has(session);
  }

  markOn(session: object): void {
    this.#on.add(session);
  }

  /** With the values in it. */
  inline(values: readonly string[]): string {
    return this.#text.replaceAll(/\$(\d)/g, (_, n: string) => values[Number(n) - 1] ?? "NULL");
  }
}

const timeout = (value: string) =>
  protection.serverDeadline ? setLocal("transaction_timeout", value) : value;

const bare = new Prepared("text", [timeout("$1")]);

const oneKey = new Prepared("bigint, text, text, text", [
  setLocal("application_name", "current_setting('application_name') || $4"),
  timeout("$3"),
  setLocal("holdfast.patience", "current_setting('lock_timeout')"),
  setLocal("lock_timeout", "$2"),
  protection.lockBeforeRead ? "pg_advisory_xact_lock($1)" : "$1",
  setLocal("lock_timeout", "current_setting('holdfast.patience')"),
]);

interface Usual {
  readonly prepared: Prepared;
  readonly values: readonly string[];
  text(): string;
}

/** Servers behind a pooler that moves clients between sessions: there it is there for some and not for others. */
const unprepared = new WeakSet<Open["capabilities"]>();

async function openPrepared(
  connection: SqlConnection,
  open: Open,
  start: readonly string[],
  { prepared, values }: Usual,
): Promise<Row | undefined> {
  const { script, session: identity } = connection;
  if (!script || !identity || unprepared.has(open.capabilities)) return undefined;
  // In a transaction that somebody else began there is no second try, so it must be known that the session is our own.
  if (open.begun && !open.capabilities.details?.["direct"]) return undefined;
  const prepare = prepared.isOn(identity) ? [] : [prepared.definition];
  try {
    const results = await script(
      [...start, ...prepare, `EXECUTE ${prepared.name}(${values.join(", ")})`].join("; "),
    );
    prepared.markOn(identity);
    return lastRow(results);
  } catch (error) {
    const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
    // 26000: it is not there, 42P05: it is there already. Either way this is not the session that it was.
    if (code !== "26000" && code !== "42P05") {
      // What is prepared outlives the transaction that failed.
      prepared.markOn(identity);
      throw error;
    }
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

function usualOpening(open: Open): Usual | undefined {
  const { locks, wait, readOnly, lockFirst, names, deadlineMs, capabilities } = open;
  const { details } = capabilities;
  if (readOnly || lockFirst || !details?.transactionTimeout || details.timeouts) return undefined;
  const [request, ...others] = locks;
  if (!request) return usual(bare, [`'${deadlineMs}'`]);
  if (others.length > 0 || request.mode === "shared" || wait === "nowait") return undefined;
  const { form } = request.key;
  const id = form.kind === "name" ? form.hash : form.kind === "bigint" ? form.value : undefined;
  if (id === undefined) return undefined;
  return usual(oneKey, [`${id}::bigint`, `'${wait}'`, `'${deadlineMs}'`, `'${label(names)}'`]);
}

function usual(prepared: Prepared, values: readonly string[]): Usual {
  return { prepared, values, text: () => prepared.inline(values) };
}

export async function end(
  connection: SqlConnection,
  how: "commit" | "rollback",
  { sessionLocks = [] }: Begun,
): Promise<boolean> {
  const { command } = await connection.query(sql.raw(how === "commit" ? "COMMIT" : "ROLLBACK"));
  const given =
    sessionLocks.length === 0 || (await session.give(connection, sessionLocks).catch(() => false));
  if (protection.abortedCommitSeen && how === "commit" && command === "ROLLBACK")
    throw new TransactionAbortedError();
  return given;
}

/** An aborted transaction answers COMMIT with a ROLLBACK, and most clients that send it do not look. */
export async function settle(connection: SqlConnection): Promise<void> {
  if (connection.doubtful && !connection.doubtful()) return;
  await connection.query(sql.raw("SELECT 1 AS one"));
}
