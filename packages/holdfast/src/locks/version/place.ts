/** Where statements about versions run: in a transaction, or by themselves. */
import type { Connection } from "../../seam/database.ts";
import { CommitUnknownError, HoldfastError } from "../../seam/errors.ts";
import { classify, mayBeKept } from "../../seam/failure.ts";
import { OneShotEnded, withConnection } from "../../transaction/one-shot.ts";
import { present } from "../../transaction/present.ts";
import { wasRolledBack } from "../../transaction/retry.ts";
import { type InstanceContext, type Work, scopeFor } from "../../transaction/scope.ts";
import type { UpdateOptions } from "./types.ts";

/** Besides the wait for a lock. */
const oneShotMs = 10_000;

/** `alone`: each statement is a transaction of its own; else all of them are inside of one. */
export type Place = Pick<Work<Connection>, "connection" | "capabilities"> & {
  readonly alone: boolean;
  readonly signal?: AbortSignal | undefined;
  /** A write was sent. */
  wrote?: string;
};

/** Others may have the row locked for as long as any lock is waited for. */
export function waitMsOf({ wait }: Pick<InstanceContext<unknown, Connection>, "wait">): number {
  return wait === "nowait" ? 1 : wait;
}

/**
 * In the transaction that was given, or that the calling code is in; else by itself, on any connection. `name`: of the table, for
 * people.
 */
export async function inPlace<T>(
  context: InstanceContext<unknown, Connection>,
  name: string,
  options: Pick<UpdateOptions, "tx" | "separate" | "signal">,
  run: (place: Place) => Promise<T>,
): Promise<T> {
  const { signal } = options;
  const scope = scopeFor(context, options, "versioned");
  if (scope) return scope.work((work) => run({ ...work, alone: false }), signal);
  return context.started.during("versioned", () =>
    context.wrongConnection.beside(() => apart(context, name, run, signal)),
  );
}

async function apart<T>(
  context: InstanceContext<unknown, Connection>,
  name: string,
  run: (place: Place) => Promise<T>,
  signal: AbortSignal | undefined,
): Promise<T> {
  const { database } = context;
  let place: Place | undefined;
  const started = performance.now();
  try {
    return await withConnection(
      context,
      async (connection) => {
        const capabilities = await context.capabilities(connection);
        const here: Place = (place = { connection, capabilities, alone: true, signal });
        return run(here);
      },
      waitMsOf(context) + oneShotMs,
      // What is kept is told to be, also to who does not want it any more.
      { signal },
    );
  } catch (error) {
    if (signal?.aborted && (error instanceof OneShotEnded || !place?.wrote)) throw signal.reason;
    // Nobody answered for too long, the client's own COMMIT was lost, or another node's answer to it.
    if (place?.wrote && mayBeKept(database, error, place.capabilities))
      throw new CommitUnknownError(place.wrote, error);
    const failure = error instanceof HoldfastError ? undefined : classify(database, error);
    // What others have undone is known by that.
    if (failure !== undefined && wasRolledBack.includes(failure)) throw error;
    const waitedMs = performance.now() - started;
    throw present(database, error, { names: [name], waitedMs, theirs: true });
  }
}
