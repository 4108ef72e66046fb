/**
 * Compiled, never run: the real packages still fit the structural types that stand for them, and what bodies get
 * as `tx.client` is the package's own type. A release that drifts away fails here.
 */
import { DatabaseSync } from "node:sqlite";
import { type DuckDBConnection, DuckDBInstance } from "@duckdb/node-api";
import { PGlite, type Transaction as PgliteTransaction } from "@electric-sql/pglite";
import { type Transaction as LibsqlTransaction, createClient } from "@libsql/client";
import { PrismaPg } from "@prisma/adapter-pg";
import Sqlite from "better-sqlite3";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromDuckdb } from "holdfast/duckdb";
import { fromLibsql } from "holdfast/libsql";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { fromPglite } from "holdfast/pglite";
import { fromPostgres } from "holdfast/postgres";
import { fromPrisma } from "holdfast/prisma";
import { type PoolConnection as MariadbPoolConnection, createPool } from "mariadb";
import mysqlCallback from "mysql2";
import mysql, { type PoolConnection } from "mysql2/promise";
import { Client, Pool, type PoolClient } from "pg";
import postgres, { type TransactionSql } from "postgres";
import { type Prisma, PrismaClient } from "../generated/prisma/client.ts";

type IsAny<T> = 0 extends 1 & T ? true : false;
/** Each fits the other, and `any`, which would fit everything, is not one of them. */
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}

export async function pgPool(): Promise<void> {
  const pool = new Pool();
  const hf = holdfast(fromPg(pool));
  same<NativeOf<typeof hf>, PoolClient>();
  await hf.transaction(async (tx) => {
    const client: PoolClient = tx.client;
    const { rows } = await tx.client.query<{ n: number }>("SELECT 1 AS n", []);
    const n: number | undefined = rows[0]?.n;
    // @ts-expect-error rows are typed
    const text: string | undefined = rows[0]?.n;
    // @ts-expect-error a PoolClient has no such method
    tx.client.querry("SELECT 1");
    return [client, n, text];
  });
  const client = await pool.connect();
  await client.query("BEGIN");
  await hf.join(client).tryLock(key("upload"));
  // @ts-expect-error a Pool is no transaction
  hf.join(pool);
  // @ts-expect-error nor is another package's
  hf.join(new PGlite());
}

export async function pgClient(): Promise<void> {
  const hf = holdfast(fromPg(new Client()));
  same<NativeOf<typeof hf>, Client>();
  hf.join(new Client());
  // @ts-expect-error a Pool is no Client
  hf.join(new Pool());
}

export async function postgresJs(): Promise<void> {
  const sql = postgres("postgres://localhost/test");
  const hf = holdfast(fromPostgres(sql));
  same<NativeOf<typeof hf>, TransactionSql>();
  await hf.transaction(async (tx) => {
    const [row] = await tx.client<{ n: number }[]>`SELECT ${1} AS n FROM ${tx.client("upload")}`;
    const n: number | undefined = row?.n;
    // @ts-expect-error rows are typed
    const text: string | undefined = row?.n;
    return [n, text];
  });
  // @ts-expect-error the pool is no transaction
  hf.join(sql);
  await sql.begin((own) => hf.join(own).tryLock(key("upload")));
}

export async function pglite(): Promise<void> {
  const db = new PGlite();
  const hf = holdfast(fromPglite(db));
  same<NativeOf<typeof hf>, PgliteTransaction>();
  await hf.transaction(async (tx) => {
    const { rows } = await tx.client.query<{ n: number }>("SELECT 1 AS n");
    const n: number | undefined = rows[0]?.n;
    await tx.client.sql`SELECT ${1}`;
    return n;
  });
  await db.transaction((own) => hf.join(own).tryLock(key("upload")));
}

export async function prisma(): Promise<void> {
  const client = new PrismaClient({ adapter: new PrismaPg({ connectionString: "" }) });
  const hf = holdfast(fromPrisma(client));
  await hf.transaction(async (tx) => {
    const upload = await tx.client.upload.create({ data: { userId: "a", bytes: 1 } });
    const bytes: number = upload.bytes;
    const own: Prisma.TransactionClient = tx.client;
    // @ts-expect-error models are typed
    await tx.client.upload.create({ data: { userId: 1, bytes: 1 } });
    // @ts-expect-error and so are their names
    await tx.client.uploads.findMany();
    // @ts-expect-error a transaction does not disconnect
    await tx.client.$disconnect();
    return [bytes, own];
  });
  await client.$transaction((own) => hf.join(own).tryLock(key("upload")));
}

export async function prismaExtended(): Promise<void> {
  const client = new PrismaClient({ adapter: new PrismaPg({ connectionString: "" }) }).$extends({
    model: { upload: { biggest: async () => 1 } },
  });
  const hf = holdfast(fromPrisma(client));
  await hf.transaction(async (tx) => {
    const biggest: number = await tx.client.upload.biggest();
    return biggest;
  });
}

export async function mysql2(): Promise<void> {
  const promised = holdfast(fromMysql2(mysql.createPool("mysql://localhost/test")));
  same<NativeOf<typeof promised>, PoolConnection>();
  await promised.transaction(async (tx) => {
    const [rows] = await tx.client.query<mysql.RowDataPacket[]>("SELECT 1 AS n");
    return rows[0]?.["n"];
  });
  const called = holdfast(fromMysql2(mysqlCallback.createPool("mysql://localhost/test")));
  same<NativeOf<typeof called>, PoolConnection>();
  // @ts-expect-error the pool is no transaction
  promised.join(mysql.createPool(""));
}

export async function mariadb(): Promise<void> {
  const pool = createPool("mariadb://localhost/test");
  const hf = holdfast(fromMariadb(pool));
  same<NativeOf<typeof hf>, MariadbPoolConnection>();
  await hf.transaction(async (tx) => {
    const rows = await tx.client.query<{ n: number }[]>("SELECT 1 AS n");
    return rows[0]?.n;
  });
  const connection = await pool.getConnection();
  await connection.beginTransaction();
  await hf.join(connection).tryLock(key("upload"));
  // @ts-expect-error the pool is no transaction
  hf.join(pool);
}

export async function betterSqlite3(): Promise<void> {
  const db = new Sqlite(":memory:");
  const one = holdfast(fromBetterSqlite3(db));
  same<NativeOf<typeof one>, Sqlite.Database>();
  const many = holdfast(fromBetterSqlite3(() => new Sqlite("a.db"), { handles: 2 }));
  same<NativeOf<typeof many>, Sqlite.Database>();
  await many.transaction(async (tx) => tx.client.prepare("SELECT 1").get());
  one.join(db);
  // @ts-expect-error options are typed
  fromBetterSqlite3(db, { handels: 2 });
}

export async function nodeSqlite(): Promise<void> {
  const db = new DatabaseSync(":memory:");
  const one = holdfast(fromNodeSqlite(db));
  same<NativeOf<typeof one>, DatabaseSync>();
  const many = holdfast(fromNodeSqlite(() => new DatabaseSync("a.db"), { handles: 2 }));
  same<NativeOf<typeof many>, DatabaseSync>();
  await many.transaction(async (tx) => tx.client.prepare("SELECT 1").get());
  one.join(db);
  // @ts-expect-error options are typed
  fromNodeSqlite(db, { handels: 2 });
}

export async function libsql(): Promise<void> {
  const client = createClient({ url: "file:a.db" });
  const hf = holdfast(fromLibsql(client, { connections: 2 }));
  same<NativeOf<typeof hf>, LibsqlTransaction>();
  await hf.transaction(async (tx) => (await tx.client.execute("SELECT 1 AS n")).rows[0]?.n);
  hf.join(await client.transaction("write"));
  // @ts-expect-error the client itself is no transaction
  hf.join(client);
}

export async function duckdb(): Promise<void> {
  const instance = await DuckDBInstance.create();
  const hf = holdfast(fromDuckdb(instance, { connections: 2 }));
  same<NativeOf<typeof hf>, DuckDBConnection>();
  await hf.transaction(async (tx) => (await tx.client.runAndReadAll("SELECT 1")).getRows());
  hf.join(await instance.connect());
  // @ts-expect-error a connection is no instance
  fromDuckdb(await instance.connect());
}

export function notClients(): void {
  // @ts-expect-error nothing is no client
  fromPg();
  // @ts-expect-error an object is no client
  fromPg({});
  // @ts-expect-error a URL is no client
  fromPg("postgres://localhost/test");
  // @ts-expect-error another package's client
  fromPg(postgres(""));
  // @ts-expect-error another package's client
  fromPostgres(new Pool());
  // @ts-expect-error another package's client
  fromPrisma(new Pool());
  // @ts-expect-error another package's client
  fromMysql2(new Pool());
  // @ts-expect-error another package's client
  fromMariadb(new Pool());
  // @ts-expect-error another package's client
  fromBetterSqlite3(new Pool());
  // @ts-expect-error another package's client
  fromPglite(new Pool());
  // @ts-expect-error a client is no database: it needs its adapter
  holdfast(new Pool());
  // @ts-expect-error an object is no database
  holdfast({});
}
