/** SQLite through MikroORM, which is built on Kysely and has one connection for everybody in the process. */
import type { ClientTransaction, DriverError, Pinned, Purpose } from "../../seam/database.ts";
import { UsageError, message } from "../../seam/errors.ts";
import { OneConnection } from "../../waiting/one-connection.ts";
import { graceMs } from "../../waiting/interrupt.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { type SqliteConnection, sqlite } from "../../engines/sqlite/index.ts";
import type { KyselyLike } from "../kysely/connection.ts";
import { borrowKysely, lendKysely } from "../kysely/sqlite.ts";
import { connectLent, lentConnection, undone } from "../sqlite-lent.ts";

interface Trx extends KyselyLike {
  readonly isCommitted: boolean;
  readonly isRolledBack: boolean;
}

interface Manager {
  fork(options?: { disableContextResolution: boolean }): Manager;
  getDriver(): object;
  getTransactionContext(): Trx | undefined;
  transactional<T>(body: (em: Manager) => Promise<T>, options: object): Promise<T>;
}

interface Client extends KyselyLike {
  transaction(): { execute(body: (trx: KyselyLike) => Promise<void>): Promise<unknown> };
}

type Unwrap = (error: unknown) => DriverError | undefined;

/** Inside of another MikroORM's transaction, with the same `contextName`, the context would be that one's. */
export function forkOf<M extends Pick<Manager, "getDriver"> & { fork(options?: object): M }>(root: M): M {
  const fork = root.fork();
  return fork.getDriver() === root.getDriver() ? fork : root.fork({ disableContextResolution: true });
}

/** `owner`: what has the connection, also after it has been connected anew. */
export function pinMikroOrm(
  owner: object,
  client: KyselyLike,
  unwrap: Unwrap,
  purpose: Purpose,
): Promise<Pinned<unknown, SqliteConnection>> {
  const open = (body: (trx: KyselyLike) => Promise<void>) => (client as Client).transaction().execute(body);
  return connectLent(owner, () => lendKysely(open), unwrap, purpose);
}

/**
 * In a transaction of MikroORM's own, so that its events and contexts are what they are without Holdfast. BEGIN is the
 * engine's, sent in place of the one that MikroORM has sent, and so are COMMIT and ROLLBACK.
 */
export async function transactionOfMikroOrm<T>(
  owner: object,
  root: Manager,
  unwrap: Unwrap,
  options: ClientTransaction,
  body: (connection: SqliteConnection, em: unknown) => Promise<T>,
): Promise<T> {
  const { signal } = options;
  const leave = await OneConnection.of(owner).enter(options);
  let begin!: () => void;
  const begun = new Promise<void>((resolve) => (begin = resolve));
  let giveUp!: (error: unknown) => void;
  const givenUp = new Promise<never>((_, reject) => (giveUp = reject));
  givenUp.catch(() => {});
  let timer: NodeJS.Timeout | undefined;
  let trx: Trx | undefined;
  let over: (() => void) | undefined;
  let connection: SqliteConnection | undefined;
  // A fork for each attempt: what another one has read or changed must not be found in the identity map.
  const running = forkOf(root).transactional(async (em) => {
    begin();
    signal?.throwIfAborted();
    trx = em.getTransactionContext();
    if (!trx)
      throw new UsageError("fromMikroOrm: transactions are disabled in the configuration of MikroORM");
    const { send, ending } = await borrowKysely(trx);
    const own = (connection = await lentConnection(owner, send, unwrap));
    const end = async (how: "commit" | "rollback") => {
      if (how === "commit") return sqlite.end(own, how, {});
      await sqlite.end(own, how, {}).catch(() => {});
      // Until an iterator that the body has left open has ended.
      if (own.inTransaction) await new Promise<void>((done) => void undone(send, done));
    };
    try {
      const value = await body(own, em);
      if (trx.isCommitted || trx.isRolledBack)
        throw new UsageError(
          "The body has ended the transaction by itself; Holdfast commits when the body returns",
        );
      return value;
    } catch (error) {
      timer = setTimeout(() => giveUp(error), graceMs);
      throw error;
    } finally {
      over = ending(end);
    }
  }, {});
  const ended = running.finally(() => {
    clearTimeout(timer);
    over?.();
    if (connection) connection.writerQueue?.leave(connection);
    leave();
  });
  ended.catch(() => {});
  try {
    // What comes too late is rolled back at once.
    await unlessAborted(Promise.race([begun, ended]), signal, () => {});
    return await Promise.race([ended, givenUp]);
  } catch (error) {
    if (trx?.isCommitted)
      // Not to be retried, whatever it is.
      throw new UsageError(
        `Committed, but a subscriber failed after that: ${message(error)}`,
        "HF_USAGE",
        error,
      );
    throw error;
  }
}
