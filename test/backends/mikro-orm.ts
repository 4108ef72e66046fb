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
  return site(orm as Orm);
}

export async function openMikroOrmOnMariadb(clientUrl: string): Promise<ConformanceSite<SqlEntityManager>> {
  const { MikroORM } = await import("@mikro-orm/mysql");
  return site((await MikroORM.init({ ...options, clientUrl })) as unknown as Orm);
}

/** What the drivers' own types have in common. */
interface Orm {
  em: SqlEntityManager;
  close(): Promise<void>;
}

async function site(orm: Orm): Promise<ConformanceSite<SqlEntityManager>> {
  const { fromMikroOrm } = await import("holdfast/mikro-orm");
  return {
    database: fromMikroOrm(orm),
    ownTransaction: (body) => orm.em.fork().transactional((em) => body(em)),
    // Not in a transaction, but it says that it is: only the server knows.
    withIdle: (body) =>
      orm.em
        .getConnection()
        .getClient()
        .connection()
        .execute((idle) => {
          const em = orm.em.fork();
          em.setTransactionContext(idle);
          return body(em);
        }),
    close: () => orm.close(),
  };
}
