/** SQLite through Kysely, which has one connection and lets others wait for it. */
import { UnsupportedError } from "../core/errors.ts";
import { type KyselyConnection, type KyselyLike, compiled, executorOf, result } from "./kysely.ts";
import { type Lent, type Send, handOver, takeOver } from "./sqlite-lent.ts";

function sendOn(raw: KyselyConnection): Send {
  return async (text, values) => result(await raw.executeQuery(compiled(text, values)));
}

/** The connection that a transaction of Kysely is bound to. */
export async function sendIn(trx: KyselyLike): Promise<Send> {
  return sendOn(await executorOf(trx).provideConnection(async (raw) => raw));
}

/** One after the other with the caller's own queries. */
export function sendThrough(trx: KyselyLike): Send {
  const executor = executorOf(trx);
  return (text, values) => executor.provideConnection((raw) => sendOn(raw)(text, values));
}

/**
 * Opens a transaction of Kysely, which counts as one for whoever gets it, and ends it only to begin another one below.
 * `open` runs a body in it.
 */
export function lendKysely<Trx extends KyselyLike>(
  open: (body: (trx: Trx) => Promise<void>) => Promise<unknown>,
): Promise<Lent<Trx>> {
  return new Promise((resolve, reject) => {
    const running = open(async (trx) => {
      const send = await sendIn(trx);
      await takeOver(send).catch((error: unknown) => {
        throw new UnsupportedError(
          "fromKysely: this dialect for SQLite does not send BEGIN on the connection that it lends",
          error,
        );
      });
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
