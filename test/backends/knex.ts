import type { ConformanceSite } from "holdfast/testing";
import type { Knex } from "knex";

export const openKnex = (connectionString: string) =>
  open({ client: "pg", connection: { connectionString, application_name: "test" } });

export const openKnexOnMariadb = (url: string) => open({ client: "mysql2", connection: url });

async function open(config: Knex.Config): Promise<ConformanceSite<Knex.Transaction>> {
  const [{ default: makeKnex }, { fromKnex }] = await Promise.all([import("knex"), import("holdfast/knex")]);
  // The server is restarted and backends are killed on purpose.
  const knex = makeKnex({ ...config, pool: { min: 0, max: 10 }, log: { warn: () => {} } });
  return {
    database: fromKnex(knex),
    ownTransaction: (body) => knex.transaction((trx) => body(trx)),
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
