import { shown } from "../seam/shown.ts";
import type { Connection } from "../seam/database.ts";
import { require } from "../seam/capabilities.ts";
import type { Wait } from "../seam/database.ts";
import { emit } from "../events/events.ts";
import {
  LockNotAvailableError,
  OnceError,
  ShardMapError,
  UnsupportedError,
  UsageError,
} from "../seam/errors.ts";
import type { KeyPart } from "../seam/key.ts";
import { checkMoment } from "../input/values.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { type KeptAnswer, fingerprint, idKey, idLock, idText, json } from "../seam/replay.ts";
import type { RetryOptions } from "../transaction/retry.ts";
import { type Transaction, contextOf, scopeFor, scopeOf } from "../transaction/scope.ts";
import { known, mapRead } from "../batch/calls.ts";
import { presenting } from "../transaction/present.ts";
import { instanceFor, isUnsettled, othersThan } from "../shards/shards.ts";
import { withConnection } from "../transaction/one-shot.ts";
import type { Transactor } from "../transaction/transaction.ts";
import * as protection from "../seam/protections.ts";

export interface OnceResult<T> {
  readonly status: "done";
  readonly value: T;
  /** The body did not run: the value is the one that it returned the first time. */
  readonly replayed: boolean;
}

export interface OnceOptions<Native = unknown> {
  /** What the id stands for, as JSON. The same id with another payload is refused (`HF_ONCE_CONFLICT`). */
  readonly payload?: unknown;
  /**
   * How long to wait while another call with this id is at it: milliseconds, "nowait" to throw
   * `LockNotAvailableError`, "skip" to get `{ status: "in progress" }`. Default: the instance's `wait` (5 s).
   */
  readonly wait?: Wait | "skip";
  /** For how many milliseconds the result is kept and replayed, by the database's clock. Default 7 days. */
  readonly keepFor?: number;
  /**
   * When the message was made. If that is longer ago than `keepFor` and there is no record of it, the call throws
   * (`HF_ONCE_TOO_OLD`): there may have been one.
   */
  readonly issuedAt?: Date | undefined;
  /** Takes part in this transaction: effects and record are kept if it is committed. */
  readonly tx?: Transaction<Native> | Native | undefined;
  /** Inside a transaction's body: in a transaction of its own, kept also if that is rolled back. */
  readonly separate?: boolean;
  /** As in `hf.transaction`. Not with `tx`. */
  readonly deadline?: number;
  readonly signal?: AbortSignal | undefined;
  /** As in `hf.transaction`. Not with `tx`. */
  readonly retry?: RetryOptions | false;
}

const names = new Set([
  "payload",
  "wait",
  "keepFor",
  "issuedAt",
  "tx",
  "separate",
  "deadline",
  "signal",
  "retry",
]);

const day = 86_400_000;
const least = 1000;
const most = 3650 * day;

/**
 * Runs the body once for an id, in a transaction that also keeps its result: `once(hf, ["stripe", event.id], body)`.
 * Duplicates, at the same time or later, get that result instead. If the body throws, nothing is kept, and the next
 * call runs it again. The result must be JSON.
 */
export function once<Native, T>(
  hf: Transactor<Native>,
  id: string | readonly KeyPart[],
  body: (tx: Transaction<Native>) => Promise<T>,
  options?: OnceOptions<Native> & { wait?: Wait },
): Promise<OnceResult<T>>;
export function once<Native, T>(
  hf: Transactor<Native>,
  id: string | readonly KeyPart[],
  body: (tx: Transaction<Native>) => Promise<T>,
  options: OnceOptions<Native> & { wait: "skip" },
): Promise<OnceResult<T> | { readonly status: "in progress" }>;
export async function once<Native, T>(
  where: Transactor<Native>,
  id: string | readonly KeyPart[],
  body: (tx: Transaction<Native>) => Promise<T>,
  options: OnceOptions<Native> = {},
): Promise<OnceResult<T> | { readonly status: "in progress" }> {
  const parts = partsOf(id);
  const hf = instanceFor(where, () => idKey(parts));
  const context = contextOf(hf, "once");
  const lock = idLock(parts);
  const [label = ""] = context.names([{ key: idKey(parts), mode: "exclusive" }]);
  const { keepMs, print } = check(options);
  if (typeof body !== "function")
    throw new UsageError("once(hf, id, body): the body must be an async function");
  const { issuedAt, tx, separate, wait, signal, deadline, retry } = options;
  const record = idText(idKey(parts));
  const within = scopeFor(context, options, `once ${label}`);
  const { replay, name } = context.database.engine;
  if (!replay) throw new UnsupportedError(`once: nothing is kept of calls on ${name}`);

  const replayed = (kept: KeptAnswer): OnceResult<T> => {
    checkPayload(label, kept, print);
    emit("holdfast:once:replayed", () => ({ id: label }));
    return { status: "done", value: revived(kept.result) as T, replayed: true };
  };

  // What another map of several databases had elsewhere. Nobody can add to that any more.
  if (!within) {
    if (context.guard) await mapRead(context, `once ${label}`);
    for (const other of othersThan(hf)) {
      const there = contextOf(other, "once");
      const { kept } = await presenting(there.database, [`once ${label}`], () =>
        withConnection(there, (connection) => replay.find(connection, record)),
      );
      if (kept) return replayed(kept);
    }
  }

  const perform = async (inner: Transaction<Native>): Promise<OnceResult<T>> => {
    const scope = scopeOf(inner, "once");
    // A statement of its own, after the lock: it sees what the last holder committed.
    const { kept, now } = await scope.work(
      async ({ connection, capabilities }) => {
        require(capabilities.once, "once");
        if (within && context.guard) await known(context, connection);
        return replay.find(connection, record);
      },
      undefined,
      [`once ${label}`],
    );
    if (kept) return replayed(kept);
    // No other connection is waited for while the transaction holds one.
    if (within && isUnsettled(hf))
      throw ShardMapError.unsettled(
        `once ${label}`,
        "its record",
        "Call it outside of transactions, where it looks on all shards",
      );
    if (issuedAt) checkAge(label, now.getTime() - issuedAt.getTime(), keepMs);
    const value = await body(inner);
    const result = value === undefined ? "" : json(value, "result");
    const entry = { id: record, fingerprint: print, result, keepMs, issuedAt };
    const keep = ({ connection }: { readonly connection: Connection }) => replay.keep(connection, entry);
    if (!(await scope.work(keep, undefined, [`once ${label}`])))
      throw new UsageError(
        `once ${label}: it was recorded while its own body ran. Does the body call once with the same id?`,
      );
    // A savepoint may still be undone, without the transaction.
    if (scope.root === scope)
      scope.proveBy(async (connection) => (await replay.find(connection, record)).kept !== undefined);
    // Not the body's own object: the first caller gets what a duplicate would.
    return { status: "done", value: revived(result) as T, replayed: false };
  };

  let thrown: unknown;
  const run = async (inner: Transaction<Native>) => {
    try {
      return await perform(inner);
    } catch (error) {
      thrown = error;
      throw error;
    }
  };
  // Whatever the instance's default is: under a snapshot that is older than the lock a record could be missed.
  const common = {
    ...(protection.onceLocked && { lock }),
    isolation: "read committed",
    ...(wait !== undefined && { wait: wait === "skip" ? "nowait" : wait }),
    ...(signal && { signal }),
  } as const;
  try {
    // A savepoint: a body that fails, and whose error is swallowed, must leave no effects without a record.
    if (tx && within)
      return await (within as Transaction<unknown> as Transaction<Native>).transaction(common, run);
    return await hf.transaction(
      {
        ...common,
        ...(separate && { separate }),
        ...(deadline !== undefined && { deadline }),
        ...(retry !== undefined && { retry }),
      },
      run,
    );
  } catch (error) {
    // Not if the body itself met a lock that was taken.
    if (wait === "skip" && error !== thrown && error instanceof LockNotAvailableError)
      return { status: "in progress" };
    throw error;
  }
}

function partsOf(id: unknown): readonly KeyPart[] {
  const parts = typeof id === "string" ? [id] : id;
  if (!Array.isArray(parts) || parts.length === 0)
    throw new UsageError(
      `once: an id is text, or a list of parts such as ["stripe", event.id], not ${Array.isArray(id) ? "an empty list" : shown(id)}`,
      "HF_BAD_KEY",
    );
  return parts as readonly KeyPart[];
}

function check<Native>(options: OnceOptions<Native>): { keepMs: number; print: string } {
  checkNames("once", options, names);
  checkSignal(options.signal);
  const { keepFor = 7 * day, issuedAt, tx, deadline, retry } = options;
  if (typeof keepFor !== "number" || !(keepFor >= least && keepFor <= most))
    throw new UsageError(
      `once: keepFor must be a number of milliseconds from ${least} to ${most}, not ${shown(keepFor)}`,
    );
  if (issuedAt !== undefined) checkMoment("once", "issuedAt", issuedAt);
  if (tx && (deadline !== undefined || retry !== undefined))
    throw new UsageError("once: deadline and retry are those of the transaction that `tx` belongs to");
  if ("payload" in options && options.payload === undefined)
    throw new UsageError("once: `payload` is undefined: leave it out to compare none");
  return {
    keepMs: Math.ceil(keepFor),
    print: "payload" in options ? fingerprint(options.payload) : "",
  };
}

function checkPayload(label: string, kept: KeptAnswer, print: string): void {
  if (kept.fingerprint === print) return;
  const before =
    kept.fingerprint === "" ? "without a payload" : print === "" ? "with a payload" : "with another payload";
  const [then, now] = [
    `it was used ${before} at ${kept.at.toISOString()}`,
    print === "" ? ", and has none now" : "",
  ];
  throw new OnceError(
    "HF_ONCE_CONFLICT",
    label,
    `${then}${now}. One id stands for one message: give another message another id, and a duplicate the same payload.`,
  );
}

function checkAge(label: string, ageMs: number, keepMs: number): void {
  if (ageMs < keepMs) return;
  throw new OnceError(
    "HF_ONCE_TOO_OLD",
    label,
    `it was made ${span(ageMs)} ago, records are kept for ${span(keepMs)}, and there is none: whether it was handled cannot be ` +
      `known any more. Look for its effects, and keep records for longer (\`keepFor\`) if messages may come this late.`,
  );
}

function span(ms: number): string {
  return ms < day ? `${Math.round(ms / 1000)} s` : `${(ms / day).toFixed(1)} days`;
}

function revived(result: string): unknown {
  return result === "" ? undefined : JSON.parse(result);
}
