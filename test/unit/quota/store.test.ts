/** The suite of quotas on the generic store: on PostgreSQL in place of its functions, and on an engine that has nothing else. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Database } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type ConformanceSite, type Ground, conformance, prepare } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, test } from "vitest";
import { storeDialect } from "../../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { quotaTables } from "../../../packages/holdfast/src/engines/sql/quota/tables.ts";
import { quotaStore } from "../../../packages/holdfast/src/engines/sql/quota/index.ts";
import { createDatabase, unavailable } from "../../harness/databases.ts";
import { bareSqlite, dialect, fromBareSqlite } from "../../sketches/bare-sqlite.ts";

const cases = conformance().filter(({ suite }) => suite === "quota");
const unused = () => Promise.reject(new Error("not part of this suite"));

function siteOf(database: Database, close: () => Promise<void>): ConformanceSite {
  return { database, close, ownTransaction: unused, withIdle: unused, send: unused };
}

interface Place {
  site(): ConformanceSite;
  drop(): Promise<unknown>;
}

async function postgres(optimistic: boolean): Promise<Place> {
  const made = await createDatabase("postgres");
  const site = () => {
    const pool = new Pool({ connectionString: made.url, max: 4 });
    const database = fromPg(pool);
    const engine = { ...database.engine, quotas: quotaStore({ ...storeDialect, optimistic }) };
    return siteOf({ ...database, engine }, () => pool.end());
  };
  return { site, drop: () => made.drop() };
}

async function sqlite(): Promise<Place> {
  const folder = await mkdtemp(join(tmpdir(), "holdfast-quota-"));
  const engine = bareSqlite({ quotas: quotaStore(dialect) }, quotaTables);
  const site = () => siteOf(fromBareSqlite(join(folder, "file.db"), engine), async () => {});
  return { site, drop: () => rm(folder, { recursive: true }) };
}

describe.each([
  ["PostgreSQL, versions compared first", unavailable("postgres"), () => postgres(true)],
  ["PostgreSQL, under locks", unavailable("postgres"), () => postgres(false)],
  ["an engine with a dialect alone", undefined, sqlite],
] as const)("%s", (_, why, open) => {
  let place: Place;
  let sites: readonly ConformanceSite[] = [];
  let ground: (name: string) => Promise<Ground>;

  beforeAll(async () => {
    if (why !== undefined) return;
    place = await open();
    sites = [place.site(), place.site()];
    ground = await prepare(sites[0] as ConformanceSite, sites[1] as ConformanceSite);
  });
  afterAll(async () => {
    for (const site of sites) await site.close();
    await place?.drop();
  });

  test.for(cases)("$name", async ({ run }, { skip }) => {
    skip(why !== undefined, why);
    await run(await ground("quota"));
  });
});
