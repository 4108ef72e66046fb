/**
 * THE list of backends: every way to reach every server that the tests know. A new one is one entry here. Nothing
 * in this file needs the test runner, so that worker processes can open a backend by its name and address.
 */
import { PGlite, type Transaction as PgliteTx } from "@electric-sql/pglite";
import { PrismaPg } from "@prisma/adapter-pg";
import Sqlite from "better-sqlite3";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { fromPglite } from "holdfast/pglite";
import { fromPostgres } from "holdfast/postgres";
import { fromPrisma } from "holdfast/prisma";
import type { ConformanceSite } from "holdfast/testing";
import { createPool } from "mysql2/promise";
import { Client, Pool, type PoolClient } from "pg";
import postgres, { type TransactionSql } from "postgres";
import { PrismaClient } from "./generated/prisma/client.ts";

export type Server = "postgres" | "postgresOld" | "pgbouncer" | "mariadb" | "file" | "process";

export interface Backend {
  readonly name: string;
  readonly server: Server;
  /** Whether several processes can share its database. */
  readonly manyProcesses: boolean;
  open(url: string): Promise<ConformanceSite>;
}

function backend<Native>(
  name: string,
  server: Server,
  open: (url: string) => Promise<ConformanceSite<Native>>,
  manyProcesses = true,
): Backend {
  return { name, server, manyProcesses, open: open };
}

async function openPg(connectionString: string): Promise<ConformanceSite<PoolClient>> {
  const pool = new Pool({ connectionString, max: 10, application_name: "test" });
  // The server is restarted and backends are killed on purpose.
  pool.on("error", () => {});
  return {
    database: fromPg(pool),
    async ownTransaction(body) {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        const value = await body(client);
        await client.query("COMMIT");
        return value;
      } catch (error) {
        await client.query("ROLLBACK");
        throw error;
      } finally {
        client.release();
      }
    },
    async withIdle(body) {
      const client = await pool.connect();
      try {
        return await body(client);
      } finally {
        client.release();
      }
    },
    close: () => pool.end(),
  };
}

async function openPostgresJs(url: string, options: object = {}): Promise<ConformanceSite<TransactionSql>> {
  const sql = postgres(url, { max: 10, onnotice: () => {}, ...options });
  return {
    database: fromPostgres(sql) as never,
    ownTransaction: (body) => sql.begin((tx) => body(tx)) as never,
    async withIdle(body) {
      const reserved = await sql.reserve();
      try {
        return await body(reserved as never);
      } finally {
        reserved.release();
      }
    },
    close: () => sql.end({ timeout: 5 }),
  };
}

export const backends: readonly Backend[] = [
  backend("pg", "postgres", openPg),
  backend("pg through PgBouncer", "pgbouncer", openPg),
  backend("pg on an older PostgreSQL", "postgresOld", openPg),

  backend("pg, one Client", "postgres", async (connectionString): Promise<ConformanceSite<Client>> => {
    const client = new Client({ connectionString });
    await client.connect();
    const second = new Client({ connectionString });
    await second.connect();
    return {
      database: fromPg(client),
      async ownTransaction(body) {
        await second.query("BEGIN");
        try {
          return await body(second);
        } finally {
          await second.query("COMMIT");
        }
      },
      withIdle: (body) => body(second),
      close: async () => {
        await Promise.all([client.end(), second.end()]);
      },
    };
  }),

  backend("postgres.js", "postgres", (url) => openPostgresJs(url)),
  // Prepared statements of a session are not there behind a pooler in transaction mode, as its documentation says.
  backend("postgres.js through PgBouncer", "pgbouncer", (url) => openPostgresJs(url, { prepare: false })),

  backend("Prisma", "postgres", async (connectionString): Promise<ConformanceSite> => {
    const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString, max: 10 }) });
    return {
      database: fromPrisma(prisma),
      ownTransaction: (body) => prisma.$transaction((tx) => body(tx), { timeout: 60_000, maxWait: 60_000 }),
      // Without $transaction it looks like a transaction's client, but every statement commits by itself.
      withIdle: (body) => body({ $queryRawUnsafe: prisma.$queryRawUnsafe.bind(prisma) }),
      close: () => prisma.$disconnect(),
    };
  }),

  backend(
    "PGlite",
    "process",
    async (): Promise<ConformanceSite<PgliteTx>> => {
      const db = await sharedPglite();
      return {
        database: fromPglite<PgliteTx>(db),
        ownTransaction: (body) => db.transaction((tx) => body(tx)),
        withIdle: (body) => body({ query: db.query.bind(db), exec: db.exec.bind(db) } as never),
        close: async () => {},
      };
    },
    false,
  ),

  backend("mysql2 on MariaDB", "mariadb", async (uri): Promise<ConformanceSite> => {
    const pool = createPool({ uri, connectionLimit: 10 });
    return {
      database: fromMysql2(pool),
      async ownTransaction(body) {
        const connection = await pool.getConnection();
        try {
          await connection.beginTransaction();
          const value = await body(connection);
          await connection.commit();
          return value;
        } catch (error) {
          await connection.rollback();
          throw error;
        } finally {
          connection.release();
        }
      },
      async withIdle(body) {
        const connection = await pool.getConnection();
        try {
          return await body(connection);
        } finally {
          connection.release();
        }
      },
      close: () => pool.end(),
    };
  }),

  backend("better-sqlite3", "file", async (file): Promise<ConformanceSite<Sqlite.Database>> => {
    const opened: Sqlite.Database[] = [];
    const open = (): Sqlite.Database => {
      const db = new Sqlite(file);
      db.pragma("journal_mode = WAL");
      opened.push(db);
      return db;
    };
    return {
      database: fromBetterSqlite3(open),
      ...sqliteOwn(open()),
      close: async () => opened.forEach((db) => db.close()),
    };
  }),

  backend("better-sqlite3, one Database", "file", async (file): Promise<ConformanceSite<Sqlite.Database>> => {
    const [db, own] = [new Sqlite(file), new Sqlite(file)];
    db.pragma("journal_mode = WAL");
    return {
      database: fromBetterSqlite3(db),
      ...sqliteOwn(own),
      close: async () => {
        db.close();
        own.close();
      },
    };
  }),
];

function sqliteOwn(
  db: Sqlite.Database,
): Pick<ConformanceSite<Sqlite.Database>, "ownTransaction" | "withIdle"> {
  return {
    async ownTransaction(body) {
      db.exec("BEGIN IMMEDIATE");
      try {
        const value = await body(db);
        db.exec("COMMIT");
        return value;
      } catch (error) {
        db.exec("ROLLBACK");
        throw error;
      }
    },
    withIdle: (body) => body(db),
  };
}

/** Both "processes" of a run are this one: PGlite cannot be shared between processes. */
let pglite: Promise<PGlite> | undefined;
function sharedPglite(): Promise<PGlite> {
  pglite ??= PGlite.create();
  return pglite;
}

export function backendNamed(name: string): Backend {
  const found = backends.find((b) => b.name === name);
  if (!found) throw new Error(`There is no backend ${name}`);
  return found;
}
