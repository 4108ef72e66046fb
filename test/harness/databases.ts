import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import mysql from "mysql2/promise";
import { Client } from "pg";
import { inject } from "vitest";
import { type ServerName, TEMPLATE } from "./servers.ts";

export interface TestDatabase {
  name: string;
  url: string;
  drop(): Promise<void>;
}

/** Why there is no such server in this run, or undefined if there is one. */
export function unavailable(server: ServerName): string | undefined {
  const state = inject(server);
  return "unavailable" in state ? `${server} is not available: ${state.unavailable}` : undefined;
}

/** The address of a server's maintenance database. */
export function serverUrl(server: ServerName): string {
  const state = inject(server);
  if ("unavailable" in state) throw new Error(`${server} is not available: ${state.unavailable}`);
  return state.url;
}

/** A new, empty database. Through PgBouncer it is one of the PostgreSQL behind it. */
export async function createDatabase(server: ServerName): Promise<TestDatabase> {
  const name = `test_${randomBytes(8).toString("hex")}`;
  const url = new URL(serverUrl(server));
  url.pathname = `/${name}`;
  if (server === "mariadb" || server === "mysql") {
    await askMysql(server, `CREATE DATABASE ${name}`);
    return { name, url: url.href, drop: () => askMysql(server, `DROP DATABASE IF EXISTS ${name}`) };
  }
  const admin = serverUrl(server === "pgbouncer" ? "postgres" : server);
  await askPostgres(admin, `CREATE DATABASE ${name} TEMPLATE ${TEMPLATE}`);
  return {
    name,
    url: url.href,
    drop: () => dropPostgres(admin, name),
  };
}

/** Sessions that are ending get the time to: a client that is closing takes the server's farewell for an error. */
async function dropPostgres(connectionString: string, name: string): Promise<void> {
  const client = new Client({ connectionString });
  await client.connect();
  try {
    for (let i = 0; i < 40; i++) {
      const { rows } = await client.query(
        "SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = $1",
        [name],
      );
      if (rows[0].n === 0) break;
      await sleep(50);
    }
    await client.query(`DROP DATABASE IF EXISTS ${name} WITH (FORCE)`);
  } finally {
    await client.end();
  }
}

async function askPostgres(connectionString: string, sql: string): Promise<void> {
  const client = new Client({ connectionString });
  await client.connect();
  try {
    await client.query(sql);
  } finally {
    await client.end();
  }
}

async function askMysql(server: "mariadb" | "mysql", sql: string): Promise<void> {
  const connection = await mysql.createConnection(serverUrl(server));
  try {
    await connection.query(sql);
  } finally {
    await connection.end();
  }
}
