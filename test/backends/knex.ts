import type { ConformanceSite } from "holdfast/testing";
import type { Knex } from "knex";

export const openKnex = (connectionString: string) =>
  open({ client: "pg", connection: { connectionString, application_name: "test" } });

export const openKnexOnMysql = (url: string) => open({ client: "mysql2", connection: url });

/** As Knex has one connection for everybody, transactions without Holdfast are those of another instance. */
export async function openKnexOnSqlite(filename: string): Promise<ConformanceSite<Knex.Transaction>> {
  const config = { client: "better-sqlite3", connection: { filename }, useNullAsDefault: true };
  const [site, own] = [await open(config, one), await open(config, one)];
  await own.withIdle((idle) => idle.client.acquireConnection().then(wal));
  return {
    database: site.database,
    send: site.send,
    withIdle: own.withIdle,
    ownTransaction: (body) =>
      own.ownTransaction(async (trx) => {
        // Knex begins deferred.
        await trx.raw("ROLLBACK");
        await trx.raw("BEGIN IMMEDIATE");
        return body(trx);
      }),
    async close() {
      await site.close();
      await own.close();
    },
  };
}

const one = { min: 1, max: 1 };
const wal = (raw: { pragma(text: string): unknown }) => raw.pragma("journal_mode = WAL");

async function open(
  config: Knex.Config,
  pool = { min: 0, max: 10 },
): Promise<ConformanceSite<Knex.Transaction>> {
  const [{ default: makeKnex }, { fromKnex }] = await Promise.all([import("knex"), import("holdfast/knex")]);
  // The server is restarted and backends are killed on purpose.
  const knex = makeKnex({ ...config, pool, log: { warn: () => {} } });
  return {
    database: fromKnex(knex),
    ownTransaction: (body) => knex.transaction((trx) => body(trx)),
    // Knex sends when it is asked for the answer.
    send: async (trx, text) => trx.raw(text),
    // Not in a transaction, but it says that it is: only the server knows.
    async withIdle(body) {
      const raw: unknown = await knex.client.acquireConnection();
      try {
        return await body({
          isTransaction: true,
          client: { acquireConnection: async () => raw },
        } as never);
      } finally {
        await knex.client.releaseConnection(raw);
      }
    },
    close: () => knex.destroy(),
  };
}
