import type { ConformanceSite } from "holdfast/testing";
import type { Kysely, Transaction } from "kysely";

/** Over mysql2, of its kind with callbacks. */
export async function openKyselyMysql(uri: string): Promise<ConformanceSite<Transaction<unknown>>> {
  const [{ createPool }, { Kysely, MysqlDialect }, { fromKysely }] = await Promise.all([
    import("mysql2"),
    import("kysely"),
    import("holdfast/kysely"),
  ]);
  const db = new Kysely<unknown>({
    dialect: new MysqlDialect({ pool: createPool({ uri, connectionLimit: 10 }) }),
  });
  return site(db, fromKysely(db));
}

export async function openKysely(connectionString: string): Promise<ConformanceSite<Transaction<unknown>>> {
  const [{ Pool }, { Kysely, PostgresDialect }, { fromKysely }] = await Promise.all([
    import("pg"),
    import("kysely"),
    import("holdfast/kysely"),
  ]);
  const pool = new Pool({ connectionString, max: 10, application_name: "test" });
  pool.on("error", () => {});
  const db = new Kysely<unknown>({ dialect: new PostgresDialect({ pool }) });
  return site(db, fromKysely(db));
}

function site(
  db: Kysely<unknown>,
  database: ConformanceSite<Transaction<unknown>>["database"],
): ConformanceSite<Transaction<unknown>> {
  return {
    database,
    ownTransaction: (body) => db.transaction().execute((trx) => body(trx)),
    // Not in a transaction, but it says that it is: only the server knows.
    withIdle: (body) =>
      db
        .connection()
        .execute((idle) => body({ isTransaction: true, getExecutor: () => idle.getExecutor() } as never)),
    close: () => db.destroy(),
  };
}
