/** Reading and deciding, again and again, until nobody else has written meanwhile. */
import { shown } from "../../seam/shown.ts";
import type { Connection } from "../../seam/database.ts";
import { HoldfastError, SerializationError, StaleVersionError, UsageError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import { emit } from "../../events/events.ts";
import { checkNames, checkSignal } from "../../input/options.ts";
import { isOpaque } from "../../seam/thrown.ts";
import { retrying, wasRolledBack } from "../../transaction/retry.ts";
import { type InstanceContext, scopeFor } from "../../transaction/scope.ts";
import { type VersionTurn, turnsOf } from "./turns.ts";
import { waitMsOf } from "./place.ts";
import type { UpdateOptions } from "./types.ts";

/** Waits of a few milliseconds, longer with every attempt: those who collided must not collide again in step. */
const firstPauseMs = 2;
const longestPauseMs = 100;

const updateNames = new Set(["attempts", "signal", "tx", "separate"]);

/** The same for the same key; two ways to write one key may have two. */
export function nameOf(id: unknown): string {
  return JSON.stringify(id, (_, value: unknown) => (typeof value === "bigint" ? String(value) : value));
}

export function checkAttempts(value: unknown): number {
  if (Number.isSafeInteger(value) && (value as number) >= 1) return value as number;
  throw new UsageError(`attempts must be a whole number of at least 1, not ${shown(value)}`);
}

/** An update of rows. */
interface Update {
  /** Of the table, for people. */
  readonly table: string;
  /** Of the rows to stand in line for. */
  readonly ids: readonly unknown[];
  readonly options: UpdateOptions;
  /** How often at the most, unless the options say so. */
  readonly attempts: number;
}

/**
 * Runs `attempt` until it does not throw `StaleVersionError`, or has been run often enough. Callers of this process that
 * have met at a row stand in line for it: from then on only other processes can spoil an attempt.
 */
export async function untilFresh<T>(
  context: InstanceContext<unknown, Connection>,
  { table, ids, options, attempts }: Update,
  attempt: (attempt: number) => Promise<T>,
): Promise<T> {
  checkNames("update", options, updateNames);
  checkSignal(options.signal);
  const most = options.attempts === undefined ? attempts : checkAttempts(options.attempts);
  const stale = (count: number) => emit("holdfast:version:stale", () => ({ table, attempt: count }));
  const lines = linesOf(context, table, ids, options);
  const met = lines?.some((line) => turnsOf(context).has(line)) ?? false;
  let turn: VersionTurn | undefined;
  const run = async (count: number) => {
    if (lines && !turn && (met || count > 1)) turn = await turnAt(context, lines, options.signal);
    return turn ? turn.run(() => attempt(count)) : attempt(count);
  };
  try {
    return await retrying(({ attempt: count }) => run(count), {
      why: (error) => meaning(context, error, options),
      on: new Set(["stale", "conflict"]),
      attempts: most,
      // Who is about to stand in line waits there.
      pauseMs: (count) =>
        lines && !turn ? 0 : Math.random() * Math.min(longestPauseMs, firstPauseMs * 2 ** count),
      signal: options.signal,
      again: ({ attempt: count }) => stale(count),
      async failed(error, { why, attempts: count }) {
        if (why !== undefined) stale(count);
        if (why === "conflict") throw SerializationError.after(count, error);
      },
    });
  } finally {
    turn?.leave();
  }
}

/** "stale", and "gone": the row has another version. "conflict": undone for the sake of others, which means the same. */
function meaning(
  context: InstanceContext<unknown, Connection>,
  error: unknown,
  options: UpdateOptions,
): "stale" | "gone" | "conflict" | undefined {
  if (isOpaque(error)) return undefined;
  if (error instanceof StaleVersionError) return error.found === undefined ? "gone" : "stale";
  return conflicts(context, error, options) ? "conflict" : undefined;
}

/** Whether the server has undone a write that was a transaction of its own. Others are run again as a whole. */
function conflicts(
  context: InstanceContext<unknown, Connection>,
  error: unknown,
  options: UpdateOptions,
): boolean {
  const failure = error instanceof HoldfastError ? undefined : classify(context.database, error);
  if (failure === undefined || !wasRolledBack.includes(failure)) return false;
  return scopeFor(context, options, "versioned") === undefined;
}

/**
 * The names of the rows' lines. Undefined where nobody is to stand in one: in a transaction, which holds what somebody in
 * line may wait for, and in somebody's turn.
 */
function linesOf(
  context: InstanceContext<unknown, Connection>,
  table: string,
  ids: readonly unknown[],
  options: UpdateOptions,
): readonly string[] | undefined {
  if (ids.length === 0 || turnsOf(context).inside || scopeFor(context, options, "versioned"))
    return undefined;
  // In one order, so that two callers with several rows do not wait for each other.
  return ids.map((id) => `${table} ${nameOf(id)}`).toSorted();
}

/** Whoever has waited for as long as for a lock goes on without: what it writes is compared in any case. */
async function turnAt(
  context: InstanceContext<unknown, Connection>,
  lines: readonly string[],
  signal: AbortSignal | undefined,
): Promise<VersionTurn | undefined> {
  const turns = turnsOf(context);
  const until = performance.now() + waitMsOf(context);
  const taken: VersionTurn[] = [];
  const leave = () => {
    for (const turn of taken) turn.leave();
  };
  try {
    for (const line of lines) {
      const turn = await turns.take(line, Math.max(1, until - performance.now()), signal);
      if (!turn) break;
      taken.push(turn);
    }
  } catch (error) {
    leave();
    throw error;
  }
  const [first] = taken;
  if (first && taken.length === lines.length) return { run: (work) => first.run(work), leave };
  leave();
  return undefined;
}
