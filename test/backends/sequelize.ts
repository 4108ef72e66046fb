import type { ConformanceSite } from "holdfast/testing";
import type { Transaction } from "sequelize";

export async function openSequelize(url: string): Promise<ConformanceSite<Transaction>> {
  const [{ Sequelize }, { fromSequelize }] = await Promise.all([
    import("sequelize"),
    import("holdfast/sequelize"),
  ]);
  const sequelize = new Sequelize(url, {
    pool: { max: 10 },
    logging: false,
    dialectOptions: { application_name: "test" },
  });
  const manager = sequelize.connectionManager as unknown as {
    getConnection(options: object): Promise<unknown>;
    releaseConnection(connection: unknown): void;
  };
  return {
    database: fromSequelize(sequelize),
    ownTransaction: (body) => sequelize.transaction((t) => body(t)),
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
