import type { SqlEntityManager } from "@mikro-orm/postgresql";
import type { ConformanceSite } from "holdfast/testing";

const options = {
  pool: { max: 10 },
  entities: [],
  discovery: { warnWhenNoEntities: false },
  // The server is restarted and backends are killed on purpose.
  logger: () => {},
};

export async function openMikroOrm(clientUrl: string): Promise<ConformanceSite<SqlEntityManager>> {
  const { MikroORM } = await import("@mikro-orm/postgresql");
  const orm = await MikroORM.init({ ...options, clientUrl, driverOptions: { application_name: "test" } });
  return site(orm);
}

export async function openMikroOrmOnMysql(clientUrl: string): Promise<ConformanceSite<SqlEntityManager>> {
  const { MikroORM } = await import("@mikro-orm/mysql");
  return site(await MikroORM.init({ ...options, clientUrl }));
}

export async function openMikroOrmOnSqlite(dbName: string): Promise<ConformanceSite<SqlEntityManager>> {
  const { MikroORM } = await import("@mikro-orm/sqlite");
  const orm = await MikroORM.init({ ...options, dbName });
  await orm.em.getConnection().execute("PRAGMA journal_mode = WAL");
  const one = await site(orm);
  return {
    ...one,
    ownTransaction: (body) =>
      one.ownTransaction(async (em) => {
        // MikroORM begins deferred.
        await em.execute("ROLLBACK");
        await em.execute("BEGIN IMMEDIATE");
        return body(em);
      }),
  };
}

interface Orm {
  em: unknown;
  close(): Promise<void>;
}

async function site(orm: Orm): Promise<ConformanceSite<SqlEntityManager>> {
  const { fromMikroOrm } = await import("holdfast/mikro-orm");
  // What the managers of both drivers have in common.
  const em = orm.em as SqlEntityManager;
  return {
    database: fromMikroOrm({ em }),
    ownTransaction: (body) => em.fork().transactional((own) => body(own)),
    send: (own, text) => own.execute(text),
    // Not in a transaction, but it says that it is: only the server knows.
    withIdle: (body) =>
      em
        .getConnection()
        .getClient()
        .connection()
        .execute((idle) => {
          const fork = em.fork();
          fork.setTransactionContext(idle);
          return body(fork);
        }),
    close: () => orm.close(),
  };
}
