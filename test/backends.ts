/**
 * THE list of backends: every way to reach every server that the tests know. A new one is one entry here. Nothing
 * in this file needs the test runner, so that worker processes can open a backend by its name and address.
 */
import { replacing } from "./harness/catalog.ts";
import type { DatabaseSync } from "node:sqlite";
import type { DuckDBConnection, DuckDBInstance } from "@duckdb/node-api";
import type { PGlite, Transaction as PgliteTx } from "@electric-sql/pglite";
import type { Transaction as LibsqlTx } from "@libsql/client";
import type Sqlite from "better-sqlite3";
import type { ConformanceSite } from "holdfast/testing";
import type { Client, PoolClient, PoolConfig } from "pg";
import type { TransactionSql } from "postgres";
import { openKnex, openKnexOnMysql, openKnexOnSqlite } from "./backends/knex.ts";
import {
  openDrizzle,
  openDrizzleLibsql,
  openDrizzleMysql,
  openDrizzlePostgres,
  sendDrizzle,
} from "./backends/drizzle.ts";
import { openKysely, openKyselyMysql, openKyselyOnSqlite, openKyselyWithPool } from "./backends/kysely.ts";
import { openPrisma, openPrisma6, openPrismaMysql } from "./backends/prisma.ts";
import { openSequelize, openSequelizeOnMysql } from "./backends/sequelize.ts";
import { openMikroOrm, openMikroOrmOnMysql, openMikroOrmOnSqlite } from "./backends/mikro-orm.ts";
import {
  openTypeorm,
  openTypeorm03,
  openTypeorm03OnMysql,
  openTypeormOnMysql,
  openTypeormOnSqlite,
} from "./backends/typeorm.ts";

// Clients are imported when a backend is opened: all of them take 0.9 s of processor time, and tests start hundreds of
// processes that need one each.

export type Server = "postgres" | "postgresOld" | "pgbouncer" | "mariadb" | "mysql" | "file" | "process";

export interface Backend {
  readonly name: string;
  readonly server: Server;
  /** Whether several processes can share its database. */
  readonly manyProcesses: boolean;
  /** An ORM over a driver that is a backend of its own: campaigns that take minutes run on the driver only. */
  readonly orm: boolean;
  open(url: string): Promise<ConformanceSite>;
}

function backend<Native>(
  name: string,
  server: Server,
  open: (url: string) => Promise<ConformanceSite<Native>>,
  manyProcesses = true,
): Backend {
  return { name, server, manyProcesses, orm: false, open: open };
}

function orm<Native>(
  name: string,
  server: Server,
  open: (url: string) => Promise<ConformanceSite<Native>>,
): Backend {
  return { name, server, manyProcesses: true, orm: true, open: open };
}

async function openPg(
  connectionString: string,
  config: PoolConfig = {},
): Promise<ConformanceSite<PoolClient>> {
  const [{ Pool }, { fromPg }] = await Promise.all([import("pg"), import("holdfast/pg")]);
  const pool = new Pool({ connectionString, max: 10, application_name: "test", ...config });
  // The server is restarted and backends are killed on purpose.
  pool.on("error", () => {});
  return {
    database: fromPg(pool),
    send: (client, text) => client.query(text),
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

/** What there would be on Citus, but for its nodes: a schema of one of them, and stores of plain statements. */
async function openForCitus(url: string): Promise<ConformanceSite<PoolClient>> {
  const [site, { fromCitus }] = await Promise.all([openPg(url), import("holdfast/citus")]);
  return { ...site, database: fromCitus(site.database as never) };
}

async function openPostgresJs(url: string, options: object = {}): Promise<ConformanceSite<TransactionSql>> {
  const [{ default: postgres }, { fromPostgres }] = await Promise.all([
    import("postgres"),
    import("holdfast/postgres"),
  ]);
  const sql = postgres(url, { max: 10, onnotice: () => {}, ...options });
  return {
    database: fromPostgres(sql) as never,
    // postgres.js sends when it is asked for the answer.
    send: async (tx, text) => tx.unsafe(text),
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

/** A server whose advisory locks lock nothing, as on some that speak the same protocol: for sessions that ask for it. */
async function openWithoutAdvisoryLocks(url: string): Promise<ConformanceSite<PoolClient>> {
  const pg = await import("pg");
  const admin = new pg.Client({ connectionString: url });
  await admin.connect();
  try {
    await admin.query("BEGIN; SELECT pg_advisory_xact_lock(1)");
    for (const scope of ["", "_xact"])
      for (const mode of ["", "_shared"])
        for (const types of ["bigint", "integer, integer"]) {
          const name = (prefix: string) => `pg_${prefix}advisory${scope}_lock${mode}`;
          await admin.query(
            `${replacing(name(""), types, "void", "shadow.locks", "")}; ${replacing(name("try_"), types, "boolean", "shadow.locks", "true")}`,
          );
        }
    await admin.query("COMMIT");
  } finally {
    await admin.end();
  }
  return openPg(url, { options: "-c shadow.locks=yes" });
}

async function openMysql2(uri: string): Promise<ConformanceSite> {
  const [{ createPool }, { fromMysql2 }] = await Promise.all([
    import("mysql2/promise"),
    import("holdfast/mysql2"),
  ]);
  const pool = createPool({ uri, connectionLimit: 10 });
  return { database: fromMysql2(pool), ...mysqlOwn(() => pool.getConnection()), close: () => pool.end() };
}

async function openMariadb(url: string): Promise<ConformanceSite> {
  const { hostname, port, username, password, pathname } = new URL(url);
  const [{ createPool }, { fromMariadb }] = await Promise.all([
    import("mariadb"),
    import("holdfast/mariadb"),
  ]);
  const pool = createPool({
    host: hostname,
    port: Number(port),
    user: username,
    password,
    database: pathname.slice(1),
    connectionLimit: 10,
    // Without TLS, MySQL's server has a key of its own for passwords.
    allowPublicKeyRetrieval: true,
  });
  return {
    database: fromMariadb(pool),
    ...mysqlOwn(() => pool.getConnection()),
    close: () => pool.end(),
  };
}

interface OwnConnection {
  query(text: string): Promise<unknown>;
  beginTransaction(): Promise<void>;
  commit(): Promise<void>;
  rollback(): Promise<void>;
  release(): unknown;
}

function mysqlOwn(
  connect: () => Promise<OwnConnection>,
): Pick<ConformanceSite, "ownTransaction" | "withIdle" | "send"> {
  return {
    send: (native, text) => (native as OwnConnection).query(text),
    async ownTransaction(body) {
      const connection = await connect();
      try {
        await connection.beginTransaction();
        const value = await body(connection);
        await connection.commit();
        return value;
      } catch (error) {
        await connection.rollback();
        throw error;
      } finally {
        await connection.release();
      }
    },
    async withIdle(body) {
      const connection = await connect();
      try {
        return await body(connection);
      } finally {
        await connection.release();
      }
    },
  };
}

export const backends: readonly Backend[] = [
  backend("pg", "postgres", (url) => openPg(url)),
  backend("pg through PgBouncer", "pgbouncer", (url) => openPg(url)),
  backend("pg on an older PostgreSQL", "postgresOld", (url) => openPg(url)),
  backend("pg without advisory locks", "postgres", openWithoutAdvisoryLocks),
  backend("pg for Citus", "postgres", openForCitus),

  backend("pg, one Client", "postgres", async (connectionString): Promise<ConformanceSite<Client>> => {
    const [pg, { fromPg }] = await Promise.all([import("pg"), import("holdfast/pg")]);
    const client = new pg.Client({ connectionString });
    await client.connect();
    const second = new pg.Client({ connectionString });
    await second.connect();
    return {
      database: fromPg(client),
      send: (native, text) => native.query(text),
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

  backend("Prisma", "postgres", openPrisma),
  orm("Prisma through PgBouncer", "pgbouncer", openPrisma),
  orm("Prisma 6", "postgres", openPrisma6),
  orm("Prisma on MariaDB", "mariadb", openPrismaMysql),
  orm("Prisma on MySQL", "mysql", openPrismaMysql),

  orm("Drizzle", "postgres", openDrizzle),
  orm("Drizzle through PgBouncer", "pgbouncer", openDrizzle),
  orm("Drizzle on MariaDB", "mariadb", openDrizzleMysql),
  orm("Drizzle on MySQL", "mysql", openDrizzleMysql),
  orm("Drizzle on postgres.js", "postgres", openDrizzlePostgres),
  orm("Drizzle on postgres.js through PgBouncer", "pgbouncer", (url) =>
    openDrizzlePostgres(url, { prepare: false }),
  ),
  orm("Drizzle on SQLite", "file", openDrizzleLibsql),
  backend(
    "Drizzle on PGlite",
    "process",
    async (): Promise<ConformanceSite> => {
      const [client, { drizzle }, { fromDrizzle }] = await Promise.all([
        sharedPglite("drizzle"),
        import("drizzle-orm/pglite"),
        import("holdfast/drizzle"),
      ]);
      const db = drizzle(client);
      return {
        database: fromDrizzle(db),
        send: sendDrizzle,
        ownTransaction: (body) => db.transaction((tx) => body(tx)),
        withIdle: (body) =>
          body({
            session: { client: { query: client.query.bind(client), exec: client.exec.bind(client) } },
            rollback() {},
            transaction() {},
          }),
        close: async () => {},
      };
    },
    false,
  ),

  orm("Kysely", "postgres", openKysely),
  orm("Kysely through PgBouncer", "pgbouncer", openKysely),
  orm("Kysely with its pool", "postgres", openKyselyWithPool),
  orm("Kysely with its pool through PgBouncer", "pgbouncer", openKyselyWithPool),
  orm("Kysely on MariaDB", "mariadb", openKyselyMysql),
  orm("Kysely on MySQL", "mysql", openKyselyMysql),
  orm("Kysely on SQLite", "file", openKyselyOnSqlite),
  orm("TypeORM", "postgres", openTypeorm),
  orm("TypeORM through PgBouncer", "pgbouncer", openTypeorm),
  orm("TypeORM 0.3", "postgres", openTypeorm03),
  orm("TypeORM 0.3 on MariaDB", "mariadb", openTypeorm03OnMysql),
  orm("TypeORM on MariaDB", "mariadb", openTypeormOnMysql),
  orm("TypeORM on MySQL", "mysql", openTypeormOnMysql),
  orm("TypeORM on SQLite", "file", openTypeormOnSqlite),
  orm("MikroORM", "postgres", openMikroOrm),
  orm("MikroORM through PgBouncer", "pgbouncer", openMikroOrm),
  orm("MikroORM on MariaDB", "mariadb", openMikroOrmOnMysql),
  orm("MikroORM on MySQL", "mysql", openMikroOrmOnMysql),
  orm("MikroORM on SQLite", "file", openMikroOrmOnSqlite),
  orm("Knex", "postgres", openKnex),
  orm("Knex through PgBouncer", "pgbouncer", openKnex),
  orm("Knex on MariaDB", "mariadb", openKnexOnMysql),
  orm("Knex on MySQL", "mysql", openKnexOnMysql),
  orm("Knex on SQLite", "file", openKnexOnSqlite),
  orm("Sequelize", "postgres", openSequelize),
  orm("Sequelize through PgBouncer", "pgbouncer", openSequelize),
  orm("Sequelize on MariaDB", "mariadb", openSequelizeOnMysql),
  orm("Sequelize on MySQL", "mysql", openSequelizeOnMysql),

  backend(
    "PGlite",
    "process",
    async (): Promise<ConformanceSite<PgliteTx>> => {
      const [db, { fromPglite }] = await Promise.all([sharedPglite("own"), import("holdfast/pglite")]);
      return {
        database: fromPglite<PgliteTx>(db),
        send: (tx, text) => tx.exec(text),
        ownTransaction: (body) => db.transaction((tx) => body(tx)),
        withIdle: (body) => body({ query: db.query.bind(db), exec: db.exec.bind(db) } as never),
        close: async () => {},
      };
    },
    false,
  ),

  backend("mysql2 on MariaDB", "mariadb", openMysql2),
  backend("mysql2 on MySQL", "mysql", openMysql2),
  backend("mariadb on MariaDB", "mariadb", openMariadb),
  backend("mariadb on MySQL", "mysql", openMariadb),

  backend("better-sqlite3", "file", async (file): Promise<ConformanceSite<Sqlite.Database>> => {
    const [{ default: Database }, { fromBetterSqlite3 }] = await betterSqlite3();
    const opened: Sqlite.Database[] = [];
    const open = (): Sqlite.Database => {
      const db = new Database(file);
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
    const [{ default: Database }, { fromBetterSqlite3 }] = await betterSqlite3();
    const [db, own] = [new Database(file), new Database(file)];
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

  backend("node:sqlite", "file", async (file): Promise<ConformanceSite<DatabaseSync>> => {
    const [sqlite, { fromNodeSqlite }] = await nodeSqlite();
    const opened: DatabaseSync[] = [];
    const open = (): DatabaseSync => {
      const db = new sqlite.DatabaseSync(file);
      db.exec("PRAGMA journal_mode = WAL");
      opened.push(db);
      return db;
    };
    return {
      database: fromNodeSqlite(open),
      ...sqliteOwn(open()),
      close: async () => opened.filter(({ isOpen }) => isOpen).forEach((db) => db.close()),
    };
  }),

  backend("node:sqlite, one DatabaseSync", "file", async (file): Promise<ConformanceSite<DatabaseSync>> => {
    const [sqlite, { fromNodeSqlite }] = await nodeSqlite();
    const [db, own] = [new sqlite.DatabaseSync(file), new sqlite.DatabaseSync(file)];
    db.exec("PRAGMA journal_mode = WAL");
    return {
      database: fromNodeSqlite(db),
      ...sqliteOwn(own),
      close: async () => {
        db.close();
        own.close();
      },
    };
  }),

  backend("libsql", "file", (file) => openLibsql(file)),
  backend("libsql, one connection", "file", (file) => openLibsql(file, 1)),

  backend(
    "duckdb",
    "process",
    async (): Promise<ConformanceSite<DuckDBConnection>> => {
      const [instance, { fromDuckdb }] = await Promise.all([sharedDuckdb(), import("holdfast/duckdb")]);
      const own = await instance.connect();
      return {
        database: fromDuckdb(instance),
        send: (native, text) => native.run(text),
        async ownTransaction(body) {
          await own.run("BEGIN TRANSACTION");
          try {
            const value = await body(own);
            await own.run("COMMIT");
            return value;
          } catch (error) {
            await own.run("ROLLBACK");
            throw error;
          }
        },
        withIdle: (body) => body(own),
        close: async () => own.closeSync(),
      };
    },
    false,
  ),
];

const betterSqlite3 = () => Promise.all([import("better-sqlite3"), import("holdfast/better-sqlite3")]);
const nodeSqlite = () => Promise.all([import("node:sqlite"), import("holdfast/node-sqlite")]);

async function openLibsql(file: string, connections = 4): Promise<ConformanceSite<LibsqlTx>> {
  const [{ createClient }, { fromLibsql }] = await Promise.all([
    import("@libsql/client"),
    import("holdfast/libsql"),
  ]);
  const client = createClient({ url: `file:${file}` });
  await client.execute("PRAGMA journal_mode = WAL");
  return {
    database: fromLibsql(client, { connections }),
    send: (tx, text) => tx.execute(text),
    async ownTransaction(body) {
      const tx = await client.transaction("write");
      try {
        const value = await body(tx);
        await tx.commit();
        return value;
      } finally {
        tx.close();
      }
    },
    // One that has ended is the only thing that looks like a transaction and is none.
    async withIdle(body) {
      const tx = await client.transaction("write");
      await tx.rollback();
      return body(tx);
    },
    close: async () => client.close(),
  };
}

function sqliteOwn<Handle extends { exec(text: string): unknown }>(
  db: Handle,
): Pick<ConformanceSite<Handle>, "ownTransaction" | "withIdle" | "send"> {
  return {
    send: (native, text) => native.exec(text),
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

/** One process at a time can have its file open. */
let duckdb: Promise<DuckDBInstance> | undefined;
function sharedDuckdb(): Promise<DuckDBInstance> {
  duckdb ??= import("@duckdb/node-api").then(({ DuckDBInstance: instances }) => instances.create(":memory:"));
  return duckdb;
}

/** Both "processes" of a run are this one: PGlite cannot be shared between processes. */
const pglites = new Map<string, Promise<PGlite>>();
function sharedPglite(name: string): Promise<PGlite> {
  let pglite = pglites.get(name);
  if (!pglite)
    pglites.set(name, (pglite = import("@electric-sql/pglite").then((module) => module.PGlite.create())));
  return pglite;
}

const drivers = backends.filter(
  ({ manyProcesses, name, orm }) => manyProcesses && !orm && !name.includes(", one"),
);
/** Another server or client for the same statements, of which conformance tells what differs. */
const alike = new Set([
  "pg on an older PostgreSQL",
  "pg for Citus",
  "postgres.js through PgBouncer",
  "mysql2 on MariaDB",
  "mariadb on MySQL",
  "node:sqlite",
]);

/**
 * Those on which campaigns run that start many processes and take minutes: each way in which locks are taken, once. With
 * HOLDFAST_LONG (`npm run test:long`) every driver on every server.
 */
export const campaigns: readonly Backend[] =
  process.env["HOLDFAST_LONG"] === "1" ? drivers : drivers.filter(({ name }) => !alike.has(name));

const plain = new Set(["pg", "mysql2 on MySQL", "mariadb on MariaDB", "better-sqlite3"]);
/** One for each server, for campaigns whose locks `lost-update.test.ts` tries on all of the above. */
export const plainCampaigns: readonly Backend[] =
  process.env["HOLDFAST_LONG"] === "1" ? drivers : drivers.filter(({ name }) => plain.has(name));

export function backendNamed(name: string): Backend {
  const found = backends.find((b) => b.name === name);
  if (!found) throw new Error(`There is no backend ${name}`);
  return found;
}
