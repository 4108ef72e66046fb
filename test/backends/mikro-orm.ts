import type { SqlEntityManager } from "@mikro-orm/postgresql";
import type { ConformanceSite } from "holdfast/testing";

export async function openMikroOrm(clientUrl: string): Promise<ConformanceSite<SqlEntityManager>> {
  const [{ MikroORM }, { fromMikroOrm }] = await Promise.all([
    import("@mikro-orm/postgresql"),
    import("holdfast/mikro-orm"),
  ]);
  const orm = await MikroORM.init({
    clientUrl,
    pool: { max: 10 },
    driverOptions: { application_name: "test" },
    entities: [],
    discovery: { warnWhenNoEntities: false },
    // The server is restarted and backends are killed on purpose.
    logger: () => {},
  });
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
