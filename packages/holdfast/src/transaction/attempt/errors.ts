/** What a run failed with: what it means, and what the caller is told of it. */
import type { Connection, Failure } from "../../seam/database.ts";
import {
  AccessDeniedError,
  ConnectionLostError,
  DeadlineExceededError,
  FileBusyError,
  HoldfastError,
  LockTimeoutError,
  PoolExhaustedError,
  SerializationError,
  WrongConnectionError,
  some,
} from "../../seam/errors.ts";
import { chain, classify, explained, waited } from "../../seam/failure.ts";
import type { LockRequest } from "../../seam/key.ts";
import { asWritten } from "../../seam/replay.ts";
import { isOpaque } from "../../seam/thrown.ts";
import { Refused, refusal } from "../../waiting/refused.ts";
import { askedQuickly } from "../holders.ts";
import { isAtCommit } from "../lock-support.ts";
import { notConnected } from "../one-shot.ts";
import type { Run } from "../plan.ts";
import { orNoTransactions, present } from "../present.ts";
import { findRights } from "../rights.ts";
import { failureWithin } from "../scope/meanings.ts";
import type { RunningBody } from "./running-body.ts";

/** A run that has come to an end. */
export interface Ran<Native, C extends Connection> extends Run<Native, C> {
  /** Undefined: it has not come to run. */
  readonly body: RunningBody<Native, C> | undefined;
  /** Undefined: it has not had a connection. */
  readonly opened: object | undefined;
}

/** Of what a body threw, these are told in words of ours. */
const told: ReadonlySet<Failure> = new Set<Failure>([
  "deadlock",
  "serialization",
  "unavailable",
  "lost",
  "deadline",
  "aborted",
  "map-changed",
]);

/** And these of what COMMIT says: it is about the database, not about what the body wrote. */
const toldOfCommit: ReadonlySet<Failure> = new Set<Failure>([
  ...told,
  "canceled",
  "full",
  "storage",
  "read-only",
  "denied",
]);

/** As the caller wrote it. */
const written = ({ key, mode }: LockRequest): LockRequest => ({ key: asWritten(key), mode });

/** Whether a server has answered so: by the standard, each of its errors has a state of five characters. */
function isServers(error: unknown): boolean {
  return [...chain(error)].some((each) => {
    const { sqlState, code } = each as { sqlState?: unknown; code?: unknown };
    return /^(?=.*\d)[0-9A-Z]{5}$/.test(String(sqlState ?? code));
  });
}

/** Else it would be said of a lock that was to be taken. */
const ofCommit = (failure: Failure): readonly string[] =>
  failure === "read-only" ? ["The transaction"] : [];

function misuse(error: unknown): HoldfastError | undefined {
  for (const each of chain(error))
    if (each instanceof WrongConnectionError || each instanceof PoolExhaustedError) return each;
  return undefined;
}

/** What it means for the transaction, if it is something that passes. */
export function failureOf<Native, C extends Connection>(
  { context, body }: Ran<Native, C>,
  error: unknown,
): Failure | undefined {
  if (isOpaque(error)) return undefined;
  if (error instanceof Refused) return error.reason === "busy" ? undefined : "lock-timeout";
  if (error instanceof SerializationError) return "serialization";
  const { database } = context;
  // An ORM wraps what is thrown in its callbacks.
  const own = [...chain(error)].find((each) => each instanceof HoldfastError);
  if (own instanceof LockTimeoutError || own instanceof FileBusyError) return "lock-timeout";
  const within = own && failureWithin(body?.scope, own);
  if (own && !within && !(own instanceof ConnectionLostError)) return undefined;
  const lost = body?.connection.lost;
  // A body talks to others too: that one of them hung up says nothing of our connection.
  const sockets = body?.thrown !== error || lost?.aborted === true;
  // A body that heeds its signal throws the reason, whose cause may be no more than that a socket was closed.
  const failure =
    own instanceof ConnectionLostError && lost?.aborted
      ? "lost"
      : (within ?? classify(database, error, sockets));
  // The client tells of the end only. What the server said before it is told to whoever watches the connection.
  if (failure === "lost" && lost?.aborted && classify(database, lost.reason) === "deadline")
    return "deadline";
  // What was not to wait is not to wait now.
  if (failure === "lock-timeout" && waited(database, error, context.known()?.flavour) !== true)
    return undefined;
  return failure;
}

/** In a box: what a body threw may be anything, and a promise of a promise is resolved to what that is resolved to. */
export async function presented<Native, C extends Connection>(
  run: Ran<Native, C>,
  error: unknown,
): Promise<{ readonly error: unknown }> {
  if (isOpaque(error)) return { error };
  const { deadline, context } = run;
  // What a body threw is the caller's own.
  if (!run.body) await findRights(context.database, error, (question) => askedQuickly(context, question));
  const shown =
    error instanceof Refused
      ? await refused(run, error)
      : named(run, run.body ? error : await orNoTransactions(context, error));
  // The server keeps the deadline too, and ends the session: after a pause of the whole process it comes first.
  return shown instanceof ConnectionLostError && deadline.over
    ? { error: new DeadlineExceededError(deadline.ms, shown) }
    : { error: shown };
}

async function refused<Native, C extends Connection>(
  { context, plan }: Ran<Native, C>,
  error: Refused,
): Promise<HoldfastError> {
  const holders = await context.holders(plan.locks);
  return refusal(error, { keys: context.names(plan.locks), holders });
}

function named<Native, C extends Connection>(run: Ran<Native, C>, error: unknown): unknown {
  const { context, plan, deadline, attempt, body } = run;
  if (error instanceof AccessDeniedError) return error.about(some(context.names(plan.locks)) || undefined);
  if (error instanceof HoldfastError || error === deadline.signal.reason) return error;
  // An ORM wraps what its driver throws, and so what the guard throws in its place.
  const guard = misuse(error);
  if (guard) return guard;
  const { database } = context;
  const failure = failureOf(run, error);
  // What the body threw is the caller's own, and so is a rule of theirs that COMMIT finds broken.
  const thrown = body !== undefined && body.thrown === error;
  const dealtWith = failure !== undefined && (thrown ? told : toldOfCommit).has(failure);
  if (!dealtWith && body) return thrown ? error : explained(database, error);
  return present(
    database,
    run.opened && isServers(error) ? error : notConnected(database, error),
    {
      names: dealtWith && body ? ofCommit(failure) : context.names(plan.locks.map(written)),
      attempts: attempt,
      waitedMs: failure === "deadline" ? deadline.ms : deadline.ms - deadline.leftMs,
      atCommit: isAtCommit(context),
    },
    failure,
  );
}
