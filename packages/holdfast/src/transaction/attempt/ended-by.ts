/** Who ended a transaction, or a statement of it: somebody on purpose, or a limit that the server has. */
import type { Begun, Connection, DriverError, Failure } from "../../seam/database.ts";
import { DeadlineExceededError, KilledError } from "../../seam/errors.ts";
import { chain } from "../../seam/failure.ts";
import { withConnection } from "../one-shot.ts";
import type { Run } from "../plan.ts";

/** Long enough for a question or two. A server that does not answer has not been told to end anybody. */
const askMs = 2000;

/** What a server ends, and what it says of it. */
const ends: ReadonlySet<Failure> = new Set<Failure>(["lost", "deadline", "canceled"]);

/** A run that was ended, and what is known of that. */
interface Ended<Native, C extends Connection> extends Run<Native, C> {
  readonly body: object | undefined;
  /** What the server had of it. */
  readonly opened: { readonly connection: C; readonly begun: Begun | undefined } | undefined;
  /** Whether somebody ended it on purpose counts. */
  readonly mayBeKilled: boolean;
  /** What was found out of that already. */
  readonly killed: Promise<boolean | undefined> | undefined;
}

/** What the server says, on another connection. Undefined also if it is not there, or the pool has no connection: the next run will tell. */
async function asked<Native, C extends Connection, T>(
  { context, deadline }: Run<Native, C>,
  question: (connection: C) => Promise<T>,
): Promise<T | undefined> {
  const signal = AbortSignal.any([deadline.signal, AbortSignal.timeout(askMs)]);
  try {
    return await withConnection(context, question, askMs, { signal });
  } catch {
    return undefined;
  }
}

/**
 * Whether somebody ended its session on purpose. Asked as soon as its connection is lost: the note stays for seconds only, and the body
 * may be at something else for longer.
 */
export function askIfKilled<Native, C extends Connection>(
  run: Ended<Native, C>,
): Promise<boolean | undefined> {
  const { context, opened } = run;
  const gone = opened && { ...opened, capabilities: context.known() };
  return asked(run, async (connection) =>
    gone ? context.database.engine.wasKilled?.(connection, gone) : false,
  );
}

/**
 * Resolves to the error to end with. The one that the server gives, if any, is the same as after a restart or a failover, when it is right to
 * run the transaction again: so `holdfast kill` leaves a note while it watches, and this looks for it; and a limit that has struck once
 * would strike again.
 */
export async function endedBy<Native, C extends Connection>(
  run: Ended<Native, C>,
  error: unknown,
  failure: Failure,
): Promise<KilledError | DeadlineExceededError | undefined> {
  const { context, plan, deadline, opened, body } = run;
  if (!ends.has(failure) || !opened || deadline.signal.aborted || deadline.over) return undefined;
  const { database } = context;
  const { engine } = database;
  // A session that was quiet for too long in its pool is none that would be so again. What a body's own statement says is the body's.
  const limited = failure === "deadline" || failure === (body ? "lost" : "canceled");
  const { lost } = opened.connection;
  const errors = [...chain(error), ...chain(lost.reason)].map(
    (each): DriverError => database.unwrap?.(each) ?? each,
  );
  if (failure === "lost" && run.mayBeKilled) {
    const killed = (await run.killed) ?? (await askIfKilled(run));
    if (killed) return new KilledError(context.names(plan.locks), error);
    // Nobody is there who could tell of a limit.
    if (killed === undefined) return undefined;
  }
  if (!limited || !engine.limit) return undefined;
  const quietMs = failure === "lost" ? opened.connection.quietMs?.() : undefined;
  const limit = await asked(run, async (connection) => engine.limit?.(connection, { errors, quietMs }));
  return limit && DeadlineExceededError.ofServer(limit, deadline.ms, error);
}
