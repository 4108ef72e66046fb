import { emit } from "../../events/events.ts";
import type { Connection, SessionLocks } from "../../seam/database.ts";
import { LockLostError, message } from "../../seam/errors.ts";
import type { LockRequest } from "../../seam/key.ts";
import type { Instance } from "../../transaction/instance.ts";
import { present } from "../../transaction/present.ts";
import type { Member } from "./member.ts";

/** A lock of a session: held until it is released, its connection dies, or the process ends. */
export interface Held extends AsyncDisposable {
  readonly keys: readonly string[];
  /** Aborts when the lock can no longer be relied on. Pass it to whatever the lock protects. */
  readonly signal: AbortSignal;
  /** Gives the lock back. Throws `LockLostError` if the server says that it was no longer held. */
  release(): Promise<void>;
}

/** Locks that a connection holds, for whoever asked for them. `hold`: in events. */
export function heldBy<Native, C extends Connection>(
  member: Member<Native, C>,
  { database, names }: Pick<Instance<Native, C>, "database" | "names">,
  locks: SessionLocks<C>,
  requests: readonly LockRequest[],
  hold: number,
): Held {
  const since = performance.now();
  const tellLost = (error: unknown) =>
    emit("holdfast:session:lost", () => ({
      hold,
      locks: keys,
      heldMs: performance.now() - since,
      error,
    }));
  const keys = names(requests);
  const controller = new AbortController();
  let over = false;
  const forget = member.onLost((cause) => {
    if (over || controller.signal.aborted) return;
    controller.abort(new LockLostError(keys, `its connection is gone (${message(cause)})`, cause));
    tellLost(cause);
  });
  const release = async () => {
    if (over) return;
    over = true;
    forget();
    controller.signal.throwIfAborted();
    const given = await member
      .ask((connection) => locks.give(connection, requests))
      .catch(async (error: unknown) => {
        tellLost(error);
        await member.lose(error);
        throw present(database, error, { names: keys });
      });
    // A session that has lost one lock behind our back may have lost all: those who share it must know.
    if (given) member.forget(requests);
    else await member.lose(new Error("its session had lost another lock"));
    if (!given) {
      const lost = new LockLostError(keys, "the server says that this session did not hold it any more");
      tellLost(lost);
      throw lost;
    }
    emit("holdfast:session:released", () => ({ hold, locks: keys, heldMs: performance.now() - since }));
  };
  return {
    keys,
    signal: controller.signal,
    release,
    async [Symbol.asyncDispose]() {
      // Whoever listens to `signal` knows already; a second error here would hide the block's own.
      await release().catch((error: unknown) => {
        if (!(error instanceof LockLostError)) throw error;
      });
    },
  };
}
