/** What the clients of this engine have in common: statements that KILL QUERY ends, and what the protocol tells. */
import { ours } from "../../context/ours.ts";
import { unlessAborted } from "../../waiting/turns.ts";

/** Ends a statement from another connection. Gives up when what it is to end has ended by itself. */
export type Kill = (text: string, ended: AbortSignal) => Promise<void>;

interface Lent {
  query(text: string): Promise<unknown>;
  release(): unknown;
}

export function killer(pool: { getConnection(): Promise<Lent> }): Kill {
  return async (text, ended) => {
    const asking = ours(() => pool.getConnection());
    const other = await unlessAborted(asking, ended, (late) => void late.release());
    try {
      if (!ended.aborted) await other.query(text);
    } finally {
      await other.release();
    }
  };
}

/** `threadId`: of the session, undefined while it has none. */
export function killable<T>(
  run: (text: string, values: unknown[], theirs?: boolean) => Promise<T>,
  threadId: () => unknown,
  kill: Kill,
): { send(text: string, values: unknown[], theirs?: boolean): Promise<T>; cancel(): Promise<void> } {
  let killed: Promise<void> | undefined;
  /** What runs. Its end is signalled only to a cancel that asks: each abort makes an error, for 25 µs. */
  let running: { ended?: AbortController } | undefined;
  return {
    async send(text, values, theirs) {
      if (killed) {
        // A KILL QUERY that comes too late hits the next statement: let it be one that matters to nobody.
        await killed;
        killed = undefined;
        await run("DO 0", []).catch(() => {});
      }
      const own: typeof running = (running = {});
      try {
        return await run(text, values, theirs);
      } finally {
        own.ended?.abort();
        if (running === own) running = undefined;
      }
    },
    async cancel() {
      const id = threadId();
      if (typeof id !== "number" && typeof id !== "bigint") return;
      // A pool that has no other connection to give would make us wait for what waits for us. What runs may also be
      // a statement of the caller's own, whose end we do not see.
      const ended = running ? (running.ended ??= new AbortController()).signal : AbortSignal.timeout(1000);
      const killing = kill(`KILL QUERY ${id}`, ended).catch(() => {});
      // Two may be under way: an abort, and the end of a wait.
      killed = killed ? Promise.all([killed, killing]).then(() => {}) : killing;
      await killed;
    },
  };
}

/** SERVER_STATUS_IN_TRANS and SERVER_STATUS_AUTOCOMMIT of the protocol's status flags. */
const inTransaction = 1;
const autocommit = 2;

/** Without autocommit the next statement is in a transaction, whether one has begun or not. */
export function isInTransaction(status: number): boolean {
  return (status & inTransaction) !== 0 || (status & autocommit) === 0;
}
