import type { ConformanceSite } from "holdfast/testing";
import type { DataSourceOptions, EntityManager } from "typeorm";

export const openTypeorm = (url: string) =>
  open({
    type: "postgres",
    url,
    poolSize: 10,
    applicationName: "test",
    // The server is restarted and backends are killed on purpose.
    poolErrorHandler: () => {},
  });

export const openTypeormOnMysql = (url: string) => open({ type: "mariadb", url, poolSize: 10 });

export const openTypeormOnSqlite = async (database: string): Promise<ConformanceSite<EntityManager>> => {
  const site = await open({ type: "better-sqlite3", database, enableWAL: true });
  return {
    ...site,
    ownTransaction: (body) =>
      site.ownTransaction(async (manager) => {
        // TypeORM begins deferred.
        await manager.query("ROLLBACK");
        await manager.query("BEGIN IMMEDIATE");
        return body(manager);
      }),
  };
};

async function open(options: DataSourceOptions): Promise<ConformanceSite<EntityManager>> {
  const [{ DataSource }, { fromTypeorm }] = await Promise.all([
    import("typeorm"),
    import("holdfast/typeorm"),
  ]);
  const dataSource = await new DataSource(options).initialize();
  return {
    database: fromTypeorm(dataSource),
    ownTransaction: (body) => dataSource.transaction(body),
    send: (manager, text) => manager.query(text),
    async withIdle(body) {
      const runner = dataSource.createQueryRunner();
      await runner.connect();
      try {
        return await body(runner.manager);
      } finally {
        await runner.release();
      }
    },
    close: () => dataSource.destroy(),
  };
}
