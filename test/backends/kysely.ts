import type { ConformanceSite } from "holdfast/testing";
import type { Transaction } from "kysely";

export async function openKysely(connectionString: string): Promise<ConformanceSite<Transaction<unknown>>> {
  const [{ Pool }, { Kysely, PostgresDialect }, { fromKysely }] = await Promise.all([
    import("pg"),
    import("kysely"),
    import("holdfast/kysely"),
  ]);
  const pool = new Pool({ connectionString, max: 10, application_name: "test" });
  pool.on("error", () => {});
  const db = new Kysely<unknown>({ dialect: new PostgresDialect({ pool }) });
  return {
    database: fromKysely(db),
    ownTransaction: (body) => db.transaction().execute((trx) => body(trx)),
    // Not in a transaction, but it says that it is: only the server knows.
    withIdle: (body) =>
      db
        .connection()
        .execute((idle) => body({ isTransaction: true, getExecutor: () => idle.getExecutor() } as never)),
    close: () => db.destroy(),
  };
}
