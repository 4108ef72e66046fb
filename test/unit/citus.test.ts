/** What `holdfast/citus` is on a server without Citus: schemas side by side. On Citus itself it was run by hand. */
import { UsageError, holdfast, key, sharded } from "holdfast";
import { fromCitus, placeNames, places } from "holdfast/citus";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import Sqlite from "better-sqlite3";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { citus } from "../../packages/holdfast/src/engines/postgres/citus.ts";
import { unsupported } from "../../packages/holdfast/src/seam/capabilities.ts";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";

let place: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  place = await createDatabase("postgres");
  pool = new Pool({ connectionString: place.url, max: 10 });
});

afterAll(async () => {
  await pool.end();
  await place.drop();
});

describe("places", () => {
  test("are schemas, each the home of some, and exact from two processes' worth of instances", async () => {
    // 192 calls share ten connections.
    const open = () => sharded(places(fromPg(pool), 3, { schema: "spread" }), undefined, { wait: 60_000 });
    await using one = open();
    await using two = open();
    for (const each of one.all()) await each.migrate();
    const limits = [one, two].map((shards) => quota(shards, { name: "uploads", limit: 5 }));
    const shops = [one, two].map((shards) => stock(shards, { name: "shop" }));
    const users = Array.from({ length: 12 }, (_, i) => `user-${i}`);
    for (const sku of users) await shops[0]?.apply([{ sku, quantity: 5 }]);
    const calls = users.flatMap((user) =>
      Array.from({ length: 8 }, async (_, i) => {
        const [granted, sold] = await Promise.all([
          limits[i % 2]?.tryConsume(user, 1),
          shops[i % 2]?.apply([{ sku: user, quantity: -1 }]).then(
            () => 1,
            () => 0,
          ),
        ]);
        return { user, granted: granted?.granted ? 1 : 0, sold: sold ?? 0 };
      }),
    );
    const came = await Promise.all(calls);
    for (const user of users) {
      const own = came.filter((each) => each.user === user);
      expect([
        own.reduce((sum, { granted }) => sum + granted, 0),
        own.reduce((sum, { sold }) => sum + sold, 0),
      ]).toEqual([5, 5]);
    }
    const counts = await Promise.all(
      placeNames(3, "spread").map(async (schema) => {
        const { rows } = await pool.query<{ subject: string }>(`SELECT subject FROM ${schema}.quota_bucket`);
        return rows.map(({ subject }) => subject);
      }),
    );
    expect(counts.flat().toSorted()).toEqual(users.toSorted());
    expect(counts.filter((some) => some.length > 0).length).toBeGreaterThan(1);
  });

  test("are renumbered only while all processes are stopped, as no statement compares the map", async () => {
    const open = (count: number) => sharded(places(fromPg(pool), count, { schema: "counted" }));
    await using old = open(2);
    await using next = open(3);
    for (const each of next.all()) await each.migrate();
    const used = quota(old, { name: "uploads", limit: 2 });
    for (const user of ["0", "1", "2", "3"]) await used.consume(user, 2);
    await expect(next.renumber()).rejects.toThrow(/Stop all processes.*renumber\(\{ stopped: true \}\)/);
    await used.peek("0");
    await next.renumber({ stopped: true });
    await next.settle();
    const left = quota(next, { name: "uploads", limit: 2 });
    for (const user of ["0", "1", "2", "3"]) expect((await left.tryConsume(user)).granted).toBe(false);
  });

  test("refuse what is no number of them, and what is no PostgreSQL", () => {
    const database = fromPg(pool);
    for (const count of [0, -1, 1.5, Number.NaN, 100_000])
      expect(() => places(database, count)).toThrow(UsageError);
    const file = new Sqlite(":memory:");
    expect(() => fromCitus(fromBetterSqlite3(file) as never)).toThrow(/fromCitus\(fromPg\(pool\)\)/);
    file.close();
    expect(() => fromCitus(undefined as never)).toThrow(UsageError);
  });
});

test("without a route, a key goes by its second part, or by its only one", async () => {
  await using shards = sharded(places(fromPg(pool), 3, { schema: "spread" }));
  const at = (...parts: [string, ...string[]]) => shards.all().indexOf(shards.on(key(...parts)));
  for (const who of ["a", "b", "c", "d"]) {
    expect(at("credits", who)).toBe(at("uploads", who));
    expect(at("credits", who, "today")).toBe(at("credits", who));
    expect(at(who)).toBe(at("any", who));
  }
  expect(new Set(["a", "b", "c", "d", "e", "f"].map((who) => at("credits", who))).size).toBe(3);
});

test("leases are refused, and say what to do", async () => {
  await using hf = holdfast(fromCitus(fromPg(pool)), { schema: "alone" });
  await hf.migrate();
  await expect(hf.lease(key("a"))).rejects.toThrow(/not fromCitus/);
});

/** As a worker node of Citus is. */
function withoutLocks() {
  const why = unsupported("not on this node");
  const named = citus.named?.bind(citus);
  const without = (engine: typeof citus): typeof citus => ({
    ...engine,
    async probe(...args) {
      return { ...(await engine.probe(...args)), transactionLocks: why, queues: why, audit: why };
    },
  });
  return {
    ...fromCitus(fromPg(pool)),
    engine: {
      ...citus,
      named(schema: string) {
        const chosen = named?.(schema);
        return chosen && { ...chosen, engine: without(chosen.engine) };
      },
    },
  };
}

test("who cannot lock does not write down how locks are kept, and patterns that are not allowed are refused", async () => {
  const { queue } = await import("holdfast/queue");
  const { audited } = await import("holdfast/audit");
  await using first = holdfast(withoutLocks(), { schema: "silent" });
  await first.migrate();
  await expect(quota(first, { name: "q", limit: 1 }).consume("a", 1)).resolves.toMatchObject({ used: 1 });
  const agreed = async () =>
    (await pool.query<{ name: string; value: string }>("SELECT name, value FROM silent.agreed")).rows.filter(
      ({ name }) => name === "strategy",
    );
  expect(await agreed()).toEqual([]);
  await expect(queue(first, "jobs").enqueue({})).rejects.toThrow(/not on this node/);
  await expect(audited(first, { action: "a", target: "t", actor: "me" }, async () => 1)).rejects.toThrow(
    /not on this node/,
  );
  await using second = holdfast(fromCitus(fromPg(pool)), { schema: "silent" });
  await second.lock(key("a"), async () => {});
  expect(await agreed()).toEqual([{ name: "strategy", value: "transaction advisory" }]);
  await using third = holdfast(withoutLocks(), { schema: "silent" });
  await expect(third.lock(key("a"), async () => {})).rejects.toThrow(/not on this node/);
});
