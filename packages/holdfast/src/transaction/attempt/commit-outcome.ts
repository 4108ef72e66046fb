import type { Begun, Connection, Failure } from "../../seam/database.ts";
import { CommitUnknownError, ConnectionLostError } from "../../seam/errors.ts";
import { emit } from "../../events/events.ts";
import { undone } from "../../seam/failure.ts";
import * as protection from "../../seam/protections.ts";
import { sleep } from "../../waiting/wait.ts";
import { withConnection } from "../one-shot.ts";
import type { Run } from "../plan.ts";
import type { Scope } from "../scope.ts";

/** Whether an error that came in place of an answer to COMMIT leaves open what became of it. */
export function leavesOpen(failure: Failure | undefined, begun: Begun | undefined): boolean {
  return failure === "lost" || failure === "deadline" || (begun?.spread === true && !undone.has(failure));
}

/** How long it is asked for. */
const resolveMs = 15_000;

/**
 * COMMIT was sent and its answer lost. Returns if the server says that it was kept. It is asked by the identity of the transaction, if it has one.
 */
export async function lookUpCommit<Native, C extends Connection>(
  { context, plan, attempt }: Run<Native, C>,
  { identity, spread }: Begun,
  scope: Scope<Native, C> | undefined,
  error: unknown,
): Promise<void> {
  const { engine } = context.database;
  // A transaction without identity has written nothing that could be lost.
  if (identity === undefined && plan.readOnly) return;
  if (!engine.outcome || identity === undefined) {
    const detail =
      context.known()?.commitOutcome === "with a lock"
        ? "here only a transaction with `lock` leaves a record of it to ask"
        : spread
          ? "no node knows what the others have committed"
          : "this engine keeps no record of it to ask";
    throw new CommitUnknownError(detail, error, spread);
  }
  if (!protection.commitLookedUp) throw new ConnectionLostError(attempt, error);
  const until = performance.now() + resolveMs;
  let last: unknown = error;
  let detail = "the server could not tell what became of it";
  for (let i = 0; performance.now() < until; i++) {
    try {
      const ask = engine.outcome.bind(engine);
      // On a connection that has nothing to do with the lost one.
      const outcome = await withConnection(context, async (connection) => {
        const outcome = await ask(connection, identity);
        const kept = outcome === "ended" ? await scope?.wasKept(connection) : undefined;
        return kept === undefined ? outcome : kept ? "committed" : "aborted";
      });
      if (outcome !== "in progress")
        emit("holdfast:commit:resolved", () => ({ outcome: outcome === "ended" ? "unknown" : outcome }));
      if (outcome === "committed") return;
      if (outcome === "aborted") throw new ConnectionLostError(attempt, error);
      if (outcome === "ended")
        detail = "the server has recovered from a crash since, or another has taken its place";
      if (outcome === "ended" || outcome === "unknown") break;
    } catch (askError) {
      if (askError instanceof ConnectionLostError) throw askError;
      last = askError;
    }
    await sleep(Math.min(500, 20 * 2 ** i));
  }
  throw new CommitUnknownError(detail, last);
}
