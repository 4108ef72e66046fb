/**
 * Stock by the generic store: on PostgreSQL's own tables, alone and at the same time as its functions, and on an engine that
 * has nothing but a dialect. The cases are those of every engine.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type ConformanceSite, type Ground, conformance, prepare } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import type { Connection, Database } from "../../packages/holdfast/src/seam/database.ts";
import { storeDialect } from "../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { stockStore } from "../../packages/holdfast/src/engines/sql/stock/index.ts";
import { stockTables } from "../../packages/holdfast/src/engines/sql/stock/tables.ts";
import { createDatabase } from "../harness/databases.ts";
import { random } from "../harness/random.ts";
import { checkStock } from "../harness/stock-check.ts";
import { bareSqlite, dialect, fromBareSqlite } from "../sketches/bare-sqlite.ts";
import { type Answer, locations, plan, shopOf, skus } from "../workers/stock-random.ts";

const cases = conformance().filter(({ suite }) => suite === "stock");

/** With the generic store in place of the functions. */
function openGeneric(connectionString: string): ConformanceSite {
  return siteOf(connectionString, (database) => ({
    ...database,
    engine: { ...database.engine, stock: stockStore(storeDialect) },
  }));
}

function siteOf(
  connectionString: string,
  change: (database: Database<never, Connection>) => Database<never, Connection> = (database) => database,
): ConformanceSite {
  const pool = new Pool({ connectionString, max: 10 });
  pool.on("error", () => {});
  return {
    database: change(fromPg(pool) as never),
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
  const database = fromBareSqlite(file, bareSqlite({ stock: stockStore(dialect) }, stockTables));
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
  for (const { name, run } of cases)
    test(`stock: ${name}`, { timeout: 60_000 }, async () => run(await ground("stock")));
});

/** The instance by the functions and by the generic store, in turns; some calls in transactions of their own. */
async function crew(url: string, seed: number, instances: number): Promise<Answer[]> {
  const sites = Array.from({ length: instances }, (_, i) => (i % 2 ? openGeneric(url) : siteOf(url)));
  try {
    const answers = await Promise.all(
      sites.map(async ({ database }, index) => {
        const hf = holdfast(database, { wait: 60_000, hazards: "off" });
        const shop = shopOf(hf);
        const next = random(seed + index);
        const steps = plan({ seed, index, calls: 60 });
        const found: (Answer | undefined)[] = [];
        const caller = async () => {
          for (let step = steps.shift(); step; step = steps.shift()) {
            const now = step;
            found.push(next() < 0.2 ? await hf.transaction(() => now(shop)) : await now(shop));
          }
        };
        await Promise.all(Array.from({ length: 5 }, caller));
        await hf.close();
        return found;
      }),
    );
    return answers.flat().filter((answer) => answer !== undefined);
  } finally {
    for (const site of sites) await site.close();
  }
}

describe("functions and generic store at once, on the same tables", () => {
  const seeds = process.env["HOLDFAST_LONG"] === "1" ? 50 : 2;
  test.for(Array.from({ length: seeds }, (_, i) => i))("seed + %i", { timeout: 300_000 }, async (i) => {
    const seed = inject("seed") + i;
    const database = await createDatabase("postgres");
    const pool = new Pool({ connectionString: database.url, max: 3 });
    try {
      const hf = holdfast(fromPg(pool));
      await hf.migrate();
      await shopOf(hf).apply(
        skus.flatMap((sku) => locations.map((location) => ({ sku, location, quantity: 15 }))),
      );
      const answers = await crew(database.url, seed, 4);
      expect(answers.length).toBeGreaterThan(30);
      await checkStock("pg", { database: fromPg(pool) }, answers, `HOLDFAST_SEED=${seed}`);
    } finally {
      await pool.end();
      await database.drop();
    }
  });
});
