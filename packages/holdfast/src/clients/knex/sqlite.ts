/** SQLite through Knex on better-sqlite3, whose pool has one handle unless it is told otherwise. */
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import {
  type LentHandle,
  type Send,
  type SqliteStatements,
  handOver,
  sendOn,
  takeOver,
} from "../sqlite-lent.ts";

type Raw = SqliteStatements & { __knexTxId?: unknown };

interface Pool {
  acquireConnection(): Promise<object>;
  releaseConnection(raw: never): Promise<void>;
}

interface Trx {
  readonly client: Pick<Pool, "acquireConnection">;
  isCompleted?(): boolean;
}

/** Knex's transaction, ended only to begin another one below. `open` runs a body in it, on a connection. */
export async function lendKnex<Native extends Trx>(
  pool: Pool,
  open: (body: (trx: Native) => Promise<void>, raw: object) => Promise<unknown>,
): Promise<LentHandle<Native>> {
  const raw = (await pool.acquireConnection()) as Raw;
  const lending = new Promise<LentHandle<Native>>((resolve, reject) => {
    const running = open(async (trx) => {
      const plain = sendOn(raw);
      await takeOver(plain);
      const send: Send = (text, values) => {
        if (text === "COMMIT" && trx.isCompleted?.()) throw endedItself();
        return plain(text, values);
      };
      await new Promise<void>((done) =>
        resolve({
          native: trx,
          send,
          async giveBack() {
            try {
              if (!trx.isCompleted?.()) await handOver(plain);
              done();
              await running;
            } catch (error) {
              // So that what Knex waits for comes to an end in any case.
              done();
              throw error;
            } finally {
              await letGo(pool, raw);
            }
          },
        }),
      );
    }, raw);
    running.catch(reject);
  });
  return lending.catch(async (error: unknown) => {
    await letGo(pool, raw);
    throw error;
  });
}

async function letGo(pool: Pool, raw: Raw): Promise<void> {
  delete raw.__knexTxId;
  await pool.releaseConnection(raw as never);
}

export function endedItself(): UsageError {
  return new UsageError(
    "The body has ended the transaction by trx.commit() or trx.rollback(). It ends when the body does: return to commit, throw to roll back.",
  );
}

/** Knex hands out the connection of a transaction only by a promise. */
export function sendInKnex(trx: Trx): Send {
  return async (text, values) => {
    if (trx.isCompleted?.()) throw new NotInTransactionError("this transaction of Knex has ended");
    return sendOn((await trx.client.acquireConnection()) as Raw)(text, values);
  };
}
