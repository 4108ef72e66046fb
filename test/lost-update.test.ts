/** Read, add one, write: the update that is lost under every kind of lock that is done wrong. */
import { holdfast, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { describe, expect, inject, test } from "vitest";
import { type Backend, backendNamed, campaigns } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";
import { runWorkers } from "./harness/processes.ts";
import { type IncrementArg, type IncrementResult, type Kind, kinds } from "./workers/increment.ts";

const worker = new URL("./workers/increment.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const processes = 4;
const calls = long ? 2000 : 8;

interface Outcome {
  /** Calls that came back without an error. */
  done: number;
  n: number;
  errors: string[];
}

const byLease: readonly Kind[] = ["lease and fence", "semaphore", "reader-writer lease"];

/** Of the kinds, those that the backend says it has. */
async function run(backend: Backend, some: readonly Kind[]): Promise<Record<string, Outcome>> {
  const place = await placeFor(backend);
  try {
    const site = await backend.open(place.url);
    const hf = holdfast(site.database);
    try {
      await hf.migrate();
      const { tableLocks, leases } = await hf.capabilities();
      const wanted = some.filter((kind) => {
        if (kind === "table lock") return Array.isArray(tableLocks);
        return leases === true || !byLease.includes(kind);
      });
      await execute(
        site,
        sql`CREATE TABLE counter (id integer NOT NULL PRIMARY KEY, n integer NOT NULL, version integer NOT NULL DEFAULT 0)`,
      );
      for (const [i] of wanted.entries())
        await execute(site, sql`INSERT INTO counter (id, n) VALUES (${i + 1}, ${0})`);
      const seed = inject("seed");
      const arg: IncrementArg = {
        backend: backend.name,
        url: place.url,
        kinds: wanted,
        calls,
        callers: 4,
        seed,
      };
      const results = (await runWorkers<IncrementResult[]>(worker, processes, arg)).flat();
      const rows = await hf.transaction((tx) => tx.query(sql`SELECT n FROM counter ORDER BY id`));
      return Object.fromEntries(
        wanted.map((kind, i) => {
          const own = results.filter((each) => each.kind === kind);
          const done = own.reduce((sum, each) => sum + each.done, 0);
          // With `once` every process sends the same ids, and each counts once.
          const counted = kind === "once" ? done / processes : done;
          return [
            kind,
            { done: counted, n: Number(rows[i]?.n), errors: own.flatMap(({ errors }) => errors) },
          ];
        }),
      );
    } finally {
      await site.close();
    }
  } finally {
    await place.drop();
  }
}

/** A file's write lock is the lock of every key: rows of its own would be locked by the same lock. */
const kindsOf = ({ server }: Backend) =>
  server === "file" ? kinds.filter((kind) => kind !== "lock row") : kinds;

describe("4 processes × 4 callers add one to a counter", () => {
  test.for(campaigns)("$name", { timeout: 300_000 }, async (backend, { skip }) => {
    skip(missing(backend) !== undefined, missing(backend));
    // Whoever locks rows and whoever locks keys exclude each other in no database, so each has one of its own.
    const some: readonly Kind[] = kindsOf(backend);
    const outcomes = {
      ...(await run(
        backend,
        some.filter((kind) => kind !== "lock row"),
      )),
      ...(some.includes("lock row") && (await run(backend, ["lock row"]))),
    };
    for (const [kind, { done, n, errors }] of Object.entries(outcomes)) {
      const hint = `${kind}, HOLDFAST_SEED=${inject("seed")}`;
      expect(errors, hint).toEqual([]);
      expect(n, hint).toBe(done);
      expect(done, hint).toBeGreaterThan(0);
    }
  });
});

// The same without a lock must show the bug, or the above would prove nothing.
test("updates are lost without a lock", async () => {
  const { nothing } = await run(backendNamed("pg"), ["nothing"]);
  expect(nothing?.n).toBeLessThan(nothing?.done ?? 0);
});
