/** Patterns on one SQLite file, from several processes that are killed and started again. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast, sql } from "holdfast";
import { describe, expect, inject, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { placeFor } from "./harness/places.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";
import {
  type FilePatternArg,
  type FilePatternResult,
  errands,
  limit,
  openFile,
  patience,
  shop,
  subject,
  uploads,
} from "./workers/file-patterns.ts";
import type { FileQueueArg } from "./workers/file-queue.ts";

const asker = new URL("./workers/file-patterns.ts", import.meta.url);
const jobber = new URL("./workers/file-queue.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const processes = 4;
const kills = long ? 60 : 4;
/** Of each process. */
const attempts = 250;
/** Of jobs. */
const count = long ? 5000 : 400;
const seed = `HOLDFAST_SEED=${inject("seed")}`;

async function onFile<T>(
  backend: string,
  body: (url: string, hf: Holdfast<unknown>) => Promise<T>,
): Promise<T> {
  const place = await placeFor(backendNamed("better-sqlite3"));
  const site = await openFile(backend, place.url);
  const hf: Holdfast<unknown> = holdfast(site.database, patience);
  try {
    await hf.migrate();
    return await body(place.url, hf);
  } finally {
    await hf.close();
    await site.close();
    await place.drop();
  }
}

/** What the processes were told that came to their end. `killed`: so many are killed in the middle, and begin again. */
async function rush(arg: Omit<FilePatternArg, "ids">, killed: number) {
  const next = random(inject("seed"));
  const begin = async (place: number): Promise<Worker<FilePatternResult>> => {
    const ids = Array.from({ length: attempts }, (_, i) => `${place}:${i}`);
    const worker = startWorker<FilePatternResult>(asker, { ...arg, ids } satisfies FilePatternArg);
    await worker.message("ready");
    return worker;
  };
  const crew = await Promise.all(Array.from({ length: processes }, (_, place) => begin(place)));
  try {
    for (const each of crew) each.send("go");
    for (let i = 0; i < killed; i++) {
      const place = Math.floor(next() * processes);
      const victim = crew[place] as Worker<FilePatternResult>;
      // Not at once, and before it has come to its end.
      for (let asked = 1 + next() * 30; asked > 0; asked--) await victim.message("asked").catch(() => {});
      await sleep(next() * 3);
      victim.sigkill();
      await victim.exited;
      (crew[place] = await begin(place)).send("go");
    }
    const results = await Promise.all(crew.map(({ result }) => result));
    return {
      granted: results.flatMap(({ granted }) => granted),
      refused: results.reduce((sum, { refused }) => sum + refused, 0),
      errors: results.flatMap(({ errors }) => errors),
    };
  } finally {
    for (const each of crew) each.sigkill();
    await Promise.all(crew.map(({ exited }) => exited));
  }
}

describe.each(["better-sqlite3", "without WAL", "node:sqlite", "libsql"])("%s", (backend) => {
  test("a limit of 100: each id has one answer, and 100 are granted", { timeout: 240_000 }, () =>
    onFile(backend, async (url, hf) => {
      const { granted, refused, errors } = await rush({ backend, url, what: "quota" }, kills);
      expect(errors, seed).toEqual([]);
      expect({ granted: granted.length, refused }, seed).toEqual({
        granted: limit,
        refused: processes * attempts - limit,
      });
      expect(await uploads(hf).peek(subject), seed).toMatchObject({ used: limit, remaining: 0 });
      const { entries } = await uploads(hf).history(subject, { limit: 1000 });
      expect(entries.map(({ id }) => id).toSorted(), seed).toEqual(granted.toSorted());
      expect(await uploads(hf).reconcile(subject), seed).toMatchObject({ ok: true, findings: [] });
    }),
  );

  test("the last 100 units: sold once each", { timeout: 240_000 }, () =>
    onFile(backend, async (url, hf) => {
      await shop(hf).increase("LAST", limit);
      const { granted, refused, errors } = await rush({ backend, url, what: "stock" }, kills);
      expect(errors, seed).toEqual([]);
      expect({ granted: granted.length, refused }, seed).toEqual({
        granted: limit,
        refused: processes * attempts - limit,
      });
      expect(await shop(hf).level("LAST"), seed).toMatchObject({ onHand: 0, version: limit + 1 });
      const { movements } = await shop(hf).history({ sku: "LAST", limit: 1000 });
      const sold = movements.filter(({ quantity }) => quantity < 0).map(({ externalId }) => externalId);
      expect(sold.toSorted(), seed).toEqual(granted.toSorted());
      expect(await shop(hf).reconcile(), seed).toMatchObject({ ok: true, findings: [] });
    }),
  );
});

// The same without us must show the bug, or it would prove nothing.
describe("by reading and then writing", () => {
  test("more than 100 of a limit of 100", { timeout: 240_000 }, () =>
    onFile("better-sqlite3", async (url, hf) => {
      await uploads(hf).consume(subject, 1);
      const { granted } = await rush({ backend: "better-sqlite3", url, what: "naive quota" }, 0);
      expect(granted.length).toBeGreaterThan(limit);
    }),
  );

  test("more than the last 100 units", { timeout: 240_000 }, () =>
    onFile("better-sqlite3", async (url, hf) => {
      await shop(hf).increase("LAST", limit);
      const { granted } = await rush({ backend: "better-sqlite3", url, what: "naive stock" }, 0);
      expect(granted.length).toBeGreaterThan(limit);
    }),
  );
});

describe.each(["better-sqlite3", "without WAL"])("jobs, %s", (backend) => {
  test.each(["complete", "transactional"] as const)(
    "every effect once, while workers are killed: %s",
    { timeout: 240_000 },
    (how) =>
      onFile(backend, async (url, hf) => {
        const next = random(inject("seed"));
        await hf.transaction((tx) => tx.query(sql`CREATE TABLE effect (job text NOT NULL)`));
        const jobs = Array.from({ length: count }, (_, n) => ({ payload: String(n) }));
        await errands(hf).enqueueMany(jobs);
        const begin = () => startWorker(jobber, { backend, url, how } satisfies FileQueueArg);
        const crew = Array.from({ length: processes }, begin);
        try {
          for (let i = 0; i < kills; i++) {
            const place = Math.floor(next() * processes);
            const victim = crew[place] as Worker;
            // There may be nothing left for it.
            await Promise.race([victim.message("worked").catch(() => {}), sleep(3000)]);
            await sleep(next() * 20);
            victim.sigkill();
            crew[place] = begin();
          }
          await eventually(
            async () => {
              const { waiting, delayed, running } = await errands(hf).counts();
              return waiting + delayed + running === 0;
            },
            { timeout: 120_000, interval: 100 },
          );
        } finally {
          for (const each of crew) each.sigkill();
          await Promise.all(crew.map(({ exited }) => exited));
        }
        expect(await errands(hf).failed(), seed).toEqual([]);
        const rows = await hf.transaction((tx) =>
          tx.query(sql`SELECT count(*) AS effects, count(DISTINCT job) AS jobs FROM effect`),
        );
        expect([Number(rows[0]?.["effects"]), Number(rows[0]?.["jobs"])], seed).toEqual([count, count]);
      }),
  );
});
