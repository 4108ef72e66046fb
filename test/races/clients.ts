/** Every client of one database, as an application would have opened one of them. */
import type { SqlEntityManager } from "@mikro-orm/postgresql";
import { PrismaPg } from "@prisma/adapter-pg";
import { type NodePgDatabase, drizzle } from "drizzle-orm/node-postgres";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import type { Scenario } from "holdfast/testing";
import makeKnex, { type Knex } from "knex";
import { Kysely, MysqlDialect, PostgresDialect } from "kysely";
import { createPool } from "mysql2";
import type { Pool as MysqlPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres, { type Sql } from "postgres";
import { Sequelize } from "sequelize";
import { DataSource, type EntitySchema } from "typeorm";
import { PrismaClient } from "../generated/prisma-races/client.ts";
import { createDatabase } from "../harness/databases.ts";
import type { Engine, Exact, Race } from "./race.ts";

export interface Clients {
  /** On PostgreSQL only, as are the next three. */
  readonly pool: Pool;
  readonly sql: Sql;
  readonly prisma: PrismaClient;
  readonly drizzle: NodePgDatabase;
  /** Its tables are told by `withTables`. */
  readonly kysely: Kysely<unknown>;
  readonly knex: Knex;
  readonly dataSource: DataSource;
  /** The global one: an application forks it for each request. */
  readonly em: SqlEntityManager;
  readonly sequelize: Sequelize;
  /** On MariaDB only. */
  readonly mysql: MysqlPool;
  /** Is asked by `explore` who waits for whom. */
  readonly db: Scenario["db"];
  /** Whoever looks at the database from outside. */
  query(sql: string): Promise<Record<string, unknown>[]>;
  close(): Promise<void>;
}

/** A connection for each of three actors, and more. */
const SIZE = 6;

const entities = (flows: readonly (Race | Exact)[]) => ({
  typeorm: flows.flatMap((flow) => flow.entities?.typeorm ?? []) as EntitySchema[],
  mikroOrm: flows.flatMap((flow) => flow.entities?.mikroOrm ?? []) as never[],
});

/** A database of its own for these flows, and every client that the engine has. */
export function bundle(engine: Engine, flows: readonly (Race | Exact)[]): Promise<Clients> {
  return engine === "postgres" ? onPostgres(flows) : onMariadb(flows);
}

async function onPostgres(flows: readonly (Race | Exact)[]): Promise<Clients> {
  const database = await createDatabase("postgres");
  const { url } = database;
  const known = entities(flows);
  const own = new Pool({ connectionString: url, max: SIZE });
  const pool = new Pool({ connectionString: url, max: SIZE });
  const sql = postgres(url, { max: SIZE, onnotice: () => {} });
  const prisma = new PrismaClient({
    adapter: new PrismaPg({ connectionString: url, max: SIZE }),
    transactionOptions: { maxWait: 60_000, timeout: 60_000 },
  });
  const drizzlePool = new Pool({ connectionString: url, max: SIZE });
  const kysely = new Kysely<unknown>({
    dialect: new PostgresDialect({ pool: new Pool({ connectionString: url, max: SIZE }) }),
  });
  const knex = makeKnex({ client: "pg", connection: url, pool: { min: 0, max: SIZE } });
  const { MikroORM } = await import("@mikro-orm/postgresql");
  const orm = await MikroORM.init({
    clientUrl: url,
    entities: known.mikroOrm,
    pool: { max: SIZE },
    logger: () => {},
  });
  const sequelize = new Sequelize(url, { logging: false, pool: { max: SIZE } });
  const source = new DataSource({ type: "postgres", url, poolSize: SIZE, entities: known.typeorm });
  const dataSource = await source.initialize();
  return {
    pool,
    sql,
    prisma,
    drizzle: drizzle(drizzlePool),
    kysely,
    knex,
    dataSource,
    em: orm.em,
    sequelize,
    mysql: missing("mysql2") as MysqlPool,
    db: fromPg(pool),
    query: async (text) => (await own.query<Record<string, unknown>>(text)).rows,
    async close() {
      await Promise.all([own.end(), pool.end(), sql.end(), prisma.$disconnect(), drizzlePool.end()]);
      await Promise.all([
        kysely.destroy(),
        knex.destroy(),
        orm.close(),
        sequelize.close(),
        dataSource.destroy(),
      ]);
      await database.drop();
    },
  };
}

async function onMariadb(flows: readonly (Race | Exact)[]): Promise<Clients> {
  const database = await createDatabase("mariadb");
  const { url } = database;
  const known = entities(flows);
  const own = createPool({ uri: url, connectionLimit: SIZE });
  const mysql = createPool({ uri: url, connectionLimit: SIZE });
  const kysely = new Kysely<unknown>({
    dialect: new MysqlDialect({ pool: createPool({ uri: url, connectionLimit: SIZE }) }),
  });
  const knex = makeKnex({ client: "mysql2", connection: url, pool: { min: 0, max: SIZE } });
  const { MikroORM } = await import("@mikro-orm/mysql");
  const orm = await MikroORM.init({
    clientUrl: url,
    entities: known.mikroOrm,
    pool: { max: SIZE },
    logger: () => {},
  });
  const sequelize = new Sequelize(url, { logging: false, pool: { max: SIZE } });
  const source = new DataSource({ type: "mariadb", url, poolSize: SIZE, entities: known.typeorm });
  const dataSource = await source.initialize();
  return {
    ...absent,
    kysely,
    knex,
    dataSource,
    // What the managers of both drivers have in common.
    em: orm.em as unknown as SqlEntityManager,
    sequelize,
    mysql: mysql.promise(),
    db: fromMysql2(own.promise()),
    async query(text) {
      const [rows] = await own.promise().query(text);
      return rows as Record<string, unknown>[];
    },
    async close() {
      await Promise.all([kysely.destroy(), knex.destroy(), orm.close(), sequelize.close()]);
      await Promise.all([dataSource.destroy(), own.promise().end(), mysql.promise().end()]);
      await database.drop();
    },
  };
}

/** Clients that are here for PostgreSQL only: whoever asks them for something is told. */
const absent = {
  pool: missing("pg") as Pool,
  sql: missing("postgres.js") as Sql,
  prisma: missing("Prisma") as PrismaClient,
  drizzle: missing("Drizzle") as NodePgDatabase,
};

function missing(name: string): unknown {
  return new Proxy(
    {},
    {
      get() {
        throw new Error(`${name} is here for PostgreSQL only`);
      },
    },
  );
}
