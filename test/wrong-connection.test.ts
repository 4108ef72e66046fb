/** A statement through the outer client inside of a transaction, with the drivers; those of ORMs are in test/orms. */
import { PGlite } from "@electric-sql/pglite";
import { PoolExhaustedError, WrongConnectionError, holdfast } from "holdfast";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { fromPglite } from "holdfast/pglite";
import { createPool as createMariadbPool } from "mariadb";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import { expect, test, vi } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";

interface Client {
  query(text: string): Promise<unknown>;
}

/** The outer client, what is made of it, and how to end. */
interface Scene {
  readonly outer: Client;
  readonly database: Parameters<typeof holdfast>[0];
  end(): Promise<void>;
}

const scenes: Readonly<Record<string, (max: number) => Promise<Scene>>> = {
  async pg(max) {
    const database = await createDatabase("postgres");
    const pool = new Pool({ connectionString: database.url, max });
    const end = async () => {
      await pool.end();
      await database.drop();
    };
    return { outer: pool, database: fromPg(pool), end };
  },
  async mysql2(max) {
    const database = await createDatabase("mariadb");
    const pool = createPool({ uri: database.url, connectionLimit: max });
    const end = async () => {
      await pool.end();
      await database.drop();
    };
    return { outer: pool, database: fromMysql2(pool), end };
  },
  async mariadb(max) {
    const database = await createDatabase("mariadb");
    const { hostname: host, port, username: user, password, pathname } = new URL(database.url);
    const pool = createMariadbPool({
      host,
      port: Number(port),
      user,
      password,
      database: pathname.slice(1),
      connectionLimit: max,
    });
    const end = async () => {
      await pool.end();
      await database.drop();
    };
    return { outer: pool, database: fromMariadb(pool), end };
  },
};
const needs = { pg: "postgres", mysql2: "mariadb", mariadb: "mariadb" } as const;

test.for(["pg", "mysql2", "mariadb"] as const)("%s: is reported with both places", async (name, { skip }) => {
  skip(unavailable(needs[name]) !== undefined, unavailable(needs[name]));
  const { outer, database, end } = await (scenes[name] as (max: number) => Promise<Scene>)(4);
  const hf = holdfast(database, { wrongConnection: "throw" });
  try {
    const wrong = hf.transaction(async () => {
      await outer.query("SELECT 1");
    });
    await expect(wrong).rejects.toThrow(WrongConnectionError);
    const { message } = (await wrong.catch((error: unknown) => error)) as Error;
    expect(message.match(/wrong-connection\.test\.ts:\d+:\d+/g)).toHaveLength(2);
    await hf.transaction(async (tx) => {
      await (tx.client as Client).query("SELECT 1");
      await hf.outside(() => outer.query("SELECT 1"));
      await hf.transaction({ separate: true }, async (other) => (other.client as Client).query("SELECT 1"));
    });
    // Outside of a transaction it is what everybody does.
    await outer.query("SELECT 1");
  } finally {
    await hf.close();
    await end();
  }
});

test("in production too, where the place of a transaction is looked for on the stack", async ({ skip }) => {
  skip(unavailable("postgres") !== undefined, unavailable("postgres"));
  vi.stubEnv("NODE_ENV", "production");
  const { outer, database, end } = await (scenes["pg"] as (max: number) => Promise<Scene>)(4);
  const places = async (body: () => Promise<unknown>) => {
    const wrong: unknown = await hf.transaction(body).catch((error: unknown) => error);
    expect(wrong).toBeInstanceOf(WrongConnectionError);
    return (wrong as Error).message.match(/wrong-connection\.test\.ts:\d+/g)?.length;
  };
  const awaited = async () => {
    await new Promise((resolve) => setImmediate(resolve));
    await outer.query("SELECT 1");
  };
  // No stack leads from here to the transaction.
  const detached = () =>
    new Promise((resolve, reject) => {
      setImmediate(() => {
        try {
          outer.query("SELECT 1").then(resolve, reject);
        } catch (error) {
          reject(error);
        }
      });
    });
  let hf = holdfast(database, { wrongConnection: "throw" });
  try {
    expect(await places(awaited)).toBe(2);
    await hf.close();
    hf = holdfast(database, { wrongConnection: "throw" });
    expect(await places(detached)).toBe(1);
    // From the first mistake on the place is noted.
    expect(await places(detached)).toBe(2);
  } finally {
    vi.unstubAllEnvs();
    await hf.close();
    await end();
  }
});

test.for(["pg", "mysql2"] as const)(
  "%s: one that would wait for ever fails at once",
  async (name, { skip }) => {
    skip(unavailable(needs[name]) !== undefined, unavailable(needs[name]));
    const { outer, database, end } = await (scenes[name] as (max: number) => Promise<Scene>)(1);
    const hf = holdfast(database, { wrongConnection: "off" });
    try {
      const stuck = hf.transaction(async () => {
        await outer.query("SELECT 1");
      });
      await expect(stuck).rejects.toThrow(PoolExhaustedError);
      await outer.query("SELECT 1");
    } finally {
      await hf.close();
      await end();
    }
  },
);

test("PGlite: one that would wait for ever fails at once", async () => {
  const client = await PGlite.create();
  const hf = holdfast(fromPglite(client), { wrongConnection: "off" });
  await expect(hf.transaction(() => client.query("SELECT 1"))).rejects.toThrow(PoolExhaustedError);
  await hf.close();
  await client.close();
});
