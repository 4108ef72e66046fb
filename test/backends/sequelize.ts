import type { ConformanceSite } from "holdfast/testing";
import type { Options, Transaction } from "sequelize";

export const openSequelize = (url: string) => open(url, { dialectOptions: { application_name: "test" } });

export const openSequelizeOnMysql = (url: string) => open(url);

async function open(url: string, options: Options = {}): Promise<ConformanceSite<Transaction>> {
  const [{ Sequelize }, { fromSequelize }] = await Promise.all([
    import("sequelize"),
    import("holdfast/sequelize"),
  ]);
  const sequelize = new Sequelize(url, { pool: { max: 10 }, logging: false, ...options });
  const manager = sequelize.connectionManager as unknown as {
    getConnection(options: object): Promise<unknown>;
    releaseConnection(connection: unknown): void;
  };
  return {
    database: fromSequelize(sequelize),
    ownTransaction: (body) => sequelize.transaction((t) => body(t)),
    send: (transaction, text) => sequelize.query(text, { transaction }),
    // Not in a transaction, but it looks like one: only the server knows.
    async withIdle(body) {
      const connection = await manager.getConnection({});
      try {
        return await body({ connection } as never);
      } finally {
        manager.releaseConnection(connection);
      }
    },
    close: () => sequelize.close(),
  };
}
