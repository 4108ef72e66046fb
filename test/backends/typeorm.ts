import type { ConformanceSite } from "holdfast/testing";
import type { TypeormDataSource } from "holdfast/typeorm";
import type { DataSourceOptions, EntityManager } from "typeorm";

const onPostgres = (url: string) => ({
  type: "postgres" as const,
  url,
  poolSize: 10,
  applicationName: "test",
  // The server is restarted and backends are killed on purpose.
  poolErrorHandler: () => {},
});

export const openTypeorm = (url: string) => open(onPostgres(url));

export const openTypeormOnMysql = (url: string) => open({ type: "mariadb", url, poolSize: 10 });

export const openTypeorm03 = async (url: string) => siteOf((await older()).typeorm03(onPostgres(url)));

export const openTypeorm03OnMysql = async (url: string) =>
  siteOf((await older()).typeorm03({ type: "mariadb", url, poolSize: 10 }));

const older = () => import("../../older/clients.ts");

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
  const { DataSource } = await import("typeorm");
  return siteOf(new DataSource(options));
}

interface Source<Manager> extends TypeormDataSource {
  readonly manager: Manager & object;
  initialize(): Promise<unknown>;
  transaction<T>(body: (manager: Manager) => Promise<T>): Promise<T>;
  createQueryRunner(): { manager: Manager; connect(): Promise<unknown>; release(): Promise<void> };
  destroy(): Promise<void>;
}

async function siteOf<Manager extends { query(text: string): Promise<unknown> }>(
  dataSource: Source<Manager>,
): Promise<ConformanceSite<Manager>> {
  const { fromTypeorm } = await import("holdfast/typeorm");
  await dataSource.initialize();
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
