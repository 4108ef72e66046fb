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

export function openKysely(url: string): Promise<ConformanceSite<Transaction<unknown>>> {
  return openOnPg(url, false);
}

/** With the pool that Kysely does not give away. */
export function openKyselyWithPool(url: string): Promise<ConformanceSite<Transaction<unknown>>> {
  return openOnPg(url, true);
}

async function openOnPg(
  connectionString: string,
  known: boolean,
): Promise<ConformanceSite<Transaction<unknown>>> {
  const [{ Pool }, { Kysely, PostgresDialect }, { fromKysely }] = await Promise.all([
    import("pg"),
    import("kysely"),
    import("holdfast/kysely"),
  ]);
  const pool = new Pool({ connectionString, max: 10, application_name: "test" });
  pool.on("error", () => {});
  // Neither Kysely nor pg listens to a connection that is in use: its loss would end the process. With the pool we do.
  if (!known) pool.on("connect", (client) => client.on("error", () => {}));
  const db = new Kysely<unknown>({ dialect: new PostgresDialect({ pool }) });
  return site(db, known ? fromKysely(db, { pool }) : fromKysely(db));
}

/** As Kysely has one connection for everybody, transactions without Holdfast are those of another instance. */
export async function openKyselyOnSqlite(file: string): Promise<ConformanceSite<Transaction<unknown>>> {
  const [{ default: Database }, { Kysely, SqliteDialect, sql }, { fromKysely }] = await Promise.all([
    import("better-sqlite3"),
    import("kysely"),
    import("holdfast/kysely"),
  ]);
  const open = () => {
    const database = new Database(file);
    database.pragma("journal_mode = WAL");
    return new Kysely<unknown>({ dialect: new SqliteDialect({ database }) });
  };
  const [db, own] = [open(), open()];
  const { withIdle } = site(own, fromKysely(own));
  return {
    database: fromKysely(db),
    send,
    withIdle,
    ownTransaction: (body) =>
      own.transaction().execute(async (trx) => {
        // Kysely begins deferred.
        await sql`ROLLBACK`.execute(trx);
        await sql`BEGIN IMMEDIATE`.execute(trx);
        return body(trx);
      }),
    close: async () => {
      await db.destroy();
      await own.destroy();
    },
  };
}

async function send(trx: Transaction<unknown>, text: string): Promise<unknown> {
  const { CompiledQuery } = await import("kysely");
  return trx.executeQuery(CompiledQuery.raw(text));
}

function site(
  db: Kysely<unknown>,
  database: ConformanceSite<Transaction<unknown>>["database"],
): ConformanceSite<Transaction<unknown>> {
  return {
    database,
    send,
    ownTransaction: (body) => db.transaction().execute((trx) => body(trx)),
    // Not in a transaction, but it says that it is: only the server knows.
    withIdle: (body) =>
      db
        .connection()
        .execute((idle) => body({ isTransaction: true, getExecutor: () => idle.getExecutor() } as never)),
    close: () => db.destroy(),
  };
}
