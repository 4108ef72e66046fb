/**
 * All that locks, leases, `once`, … promise, by instances that have chosen a schema, in databases where there is no other: a
 * statement that goes to the default one fails.
 */
import { conformance, execute, prepare, type ConformanceSite, type Ground } from "holdfast/testing";
import { sql } from "holdfast";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { backends } from "./backends.ts";
import { missing, placeFor, type Place } from "./harness/places.ts";

/** One client of each engine, one that writes BEGIN itself, and lock rows. */
const chosen = ["pg", "pg without advisory locks", "Prisma", "mysql2 on MariaDB", "better-sqlite3", "duckdb"];
/** Those that have to do with our own tables, and with keys. */
const suites = ["lock", "join", "session", "inspect", "once", "lease", "fence", "reader-writer", "semaphore"];

const tablesOf = {
  postgres: sql`SELECT nspname AS name FROM pg_namespace WHERE nspname = 'holdfast'`,
  mysql: sql`SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name LIKE 'holdfast%'`,
  sqlite: sql`SELECT name AS name FROM sqlite_schema WHERE name LIKE 'holdfast%'`,
  duckdb: sql`SELECT table_name AS name FROM duckdb_tables() WHERE table_name LIKE 'holdfast%'`,
};

describe.each(backends.filter(({ name }) => chosen.includes(name)))(
  "$name, in a schema of its own",
  (backend) => {
    const why = missing(backend);
    let place: Place;
    let sites: ConformanceSite[] = [];
    let ground: (name: string) => Promise<Ground>;
    const engine = () => (sites[0] as ConformanceSite).database.engine.name as keyof typeof tablesOf;

    beforeAll(async () => {
      if (why !== undefined) return;
      place = await placeFor(backend);
      sites = [await backend.open(place.url), await backend.open(place.url)];
      const [one, two] = sites as [ConformanceSite, ConformanceSite];
      ground = await prepare(one, two, { schema: engine() === "postgres" ? "Büro & app-1" : "app_1" });
    });

    afterAll(async () => {
      for (const site of sites) await site.close();
      await place?.drop();
    });

    for (const { suite, name, run } of conformance().filter((each) => suites.includes(each.suite))) {
      test(`${suite}: ${name}`, async ({ skip }) => {
        skip(why !== undefined, why);
        await run(await ground(suite));
      });
    }

    test("nothing is where it would be without a schema", async ({ skip }) => {
      skip(why !== undefined, why);
      expect(await execute(sites[0] as ConformanceSite, tablesOf[engine()])).toEqual([]);
    });
  },
);

test("the backends are there", () => {
  expect(backends.map(({ name }) => name)).toEqual(expect.arrayContaining(chosen));
});
