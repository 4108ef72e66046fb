/** SQLite through Kysely, which has one connection and lets others wait for it. */
import { UnsupportedError } from "../../seam/errors.ts";
import { type KyselyConnection, type KyselyLike, compiled, executorOf, result } from "./connection.ts";
import { type LentHandle, type Send, handOver, takeOver } from "../sqlite-lent.ts";

function sendOn(raw: KyselyConnection): Send {
  const execute = raw.executeQuery.bind(raw);
  return async (text, values) => result(await execute(compiled(text, values)));
}

/** The connection that a transaction of Kysely is bound to. */
async function rawOf(trx: KyselyLike): Promise<KyselyConnection> {
  return executorOf(trx).provideConnection(async (raw) => raw);
}

/** One after the other with the caller's own queries. */
export function sendThrough(trx: KyselyLike): Send {
  const executor = executorOf(trx);
  return (text, values) => executor.provideConnection((raw) => sendOn(raw)(text, values));
}

async function begunOn(raw: KyselyConnection): Promise<Send> {
  const send = sendOn(raw);
  await takeOver(send).catch((error: unknown) => {
    throw new UnsupportedError(
      "This dialect of Kysely for SQLite does not send BEGIN on the connection that it lends",
      error,
    );
  });
  return send;
}

export interface Borrowed {
  readonly send: Send;
  /** From now on `end` does what Kysely's COMMIT or ROLLBACK would do. Returns what ends that. */
  ending(end: (how: "commit" | "rollback") => Promise<unknown>): () => void;
}

/** The connection of a transaction that Kysely has begun and will end, in no transaction. */
export async function borrowKysely(trx: KyselyLike): Promise<Borrowed> {
  const raw = await rawOf(trx);
  return {
    send: await begunOn(raw),
    ending(end) {
      const { executeQuery } = raw;
      raw.executeQuery = async (query, ...rest) => {
        const how = (query as { sql: string }).sql.toLowerCase();
        if (how !== "commit" && how !== "rollback") return executeQuery.call(raw, query, ...rest);
        await end(how);
        return { rows: [] };
      };
      return () => {
        raw.executeQuery = executeQuery;
      };
    },
  };
}

/**
 * Opens a transaction of Kysely, which counts as one for whoever gets it, and ends it only to begin another one below.
 * `open` runs a body in it.
 */
export function lendKysely<Trx extends KyselyLike>(
  open: (body: (trx: Trx) => Promise<void>) => Promise<unknown>,
): Promise<LentHandle<Trx>> {
  return new Promise((resolve, reject) => {
    const running = open(async (trx) => {
      const send = await begunOn(await rawOf(trx));
      await new Promise<void>((done) =>
        resolve({
          native: trx,
          send,
          async giveBack() {
            await handOver(send).finally(done);
            await running;
          },
        }),
      );
    });
    running.catch(reject);
  });
}
