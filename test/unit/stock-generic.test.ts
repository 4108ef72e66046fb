/**
 * Stock by the generic store: on PostgreSQL's own tables, alone and at the same time as its functions, and on an engine that
 * has nothing but a dialect. The cases are those of every engine.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fromPg } from "holdfast/pg";
import { type ConformanceSite, type Ground, conformance, prepare } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, test } from "vitest";
import type { Connection, Database } from "../../packages/holdfast/src/core/database.ts";
import { storeDialect } from "../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { stockStore } from "../../packages/holdfast/src/engines/sql/stock.ts";
import { stockTables } from "../../packages/holdfast/src/engines/sql/stock-tables.ts";
import { createDatabase } from "../harness/databases.ts";
import { bareSqlite, dialect, fromBareSqlite } from "../sketches/bare-sqlite.ts";

const cases = conformance().filter(({ suite }) => suite === "stock");

/** With the generic store in place of the functions. */
function openGeneric(connectionString: string): ConformanceSite {
  return siteOf(connectionString, (database) => ({
    ...database,
    engine: { ...database.engine, stocks: stockStore(storeDialect) as never },
  }));
}

function siteOf(
  connectionString: string,
  change: (database: Database<never, Connection>) => Database<never, Connection> = (database) => database,
): ConformanceSite {
  const pool = new Pool({ connectionString, max: 10 });
  pool.on("error", () => {});
  return {
    database: change(fromPg(pool) as never) as never,
    send: (client, text) => (client as Pool).query(text),
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
    withIdle: async (body) => body(undefined),
    close: () => pool.end(),
  };
}

/** SQLite waits in this thread, where nobody can end a transaction meanwhile: one connection at a time, for all. */
function openSqlite(file: string, line: { last: Promise<void> }): ConformanceSite {
  const database = fromBareSqlite(file, bareSqlite({ stocks: stockStore(dialect) }, stockTables));
  const { engine } = database as unknown as Database;
  const one: Database = {
    ...(database as unknown as Database),
    engine: {
      ...engine,
      probe: async (...args) => ({ ...(await engine.probe(...args)), connections: "one" }),
    },
    traits: { ...database.traits, single: true },
    async connect(purpose) {
      const { promise, resolve } = Promise.withResolvers<void>();
      const before = line.last;
      line.last = promise;
      await before;
      const pinned = await database.connect?.(purpose);
      if (!pinned) throw new Error("it connects");
      const release = (broken?: boolean) => {
        void pinned.release(broken);
        resolve();
      };
      return { ...pinned, release };
    },
  };
  return {
    database: one,
    send: () => undefined,
    ownTransaction: () => Promise.reject(new Error("not sketched")),
    withIdle: () => Promise.reject(new Error("not sketched")),
    close: async () => {},
  };
}

interface Stage {
  readonly sites: readonly [ConformanceSite, ConformanceSite];
  end(): Promise<void>;
}

const stages: Readonly<Record<string, () => Promise<Stage>>> = {
  async "the generic store on PostgreSQL"() {
    const database = await createDatabase("postgres");
    return { sites: [openGeneric(database.url), openGeneric(database.url)], end: database.drop };
  },
  async "the generic store beside the functions"() {
    const database = await createDatabase("postgres");
    return { sites: [siteOf(database.url), openGeneric(database.url)], end: database.drop };
  },
  async "the functions beside the generic store"() {
    const database = await createDatabase("postgres");
    return { sites: [openGeneric(database.url), siteOf(database.url)], end: database.drop };
  },
  async "a dialect of SQLite"() {
    const folder = mkdtempSync(join(tmpdir(), "holdfast-stock-"));
    const line = { last: Promise.resolve() };
    const file = join(folder, "stock.db");
    return {
      sites: [openSqlite(file, line), openSqlite(file, line)],
      end: async () => rmSync(folder, { recursive: true }),
    };
  },
};

describe.each(Object.entries(stages))("%s", (_, open) => {
  let stage: Stage;
  let ground: (name: string) => Promise<Ground>;
  beforeAll(async () => {
    stage = await open();
    ground = await prepare(...stage.sites);
  });
  afterAll(async () => {
    for (const site of stage?.sites ?? []) await site.close();
    await stage?.end();
  });
  for (const { name, run } of cases) test(name, { timeout: 60_000 }, async () => run(await ground("stock")));
});
