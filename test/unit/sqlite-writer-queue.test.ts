/** Those of one process that want to write to a file stand in line; those of other processes get their chance. */
import { mkdtemp, rm, symlink, writeFile } from "node:fs/promises";
import { getEventListeners } from "node:events";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { holdfast, key, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { describe, expect, inject, test } from "vitest";
import { WriterQueue, writerQueueOf } from "../../packages/holdfast/src/engines/sqlite/writer-queue.ts";
import { type Backend, backends } from "../backends.ts";
import { placeFor } from "../harness/places.ts";
import { startWorker } from "../harness/processes.ts";
import type { IncrementArg, IncrementResult } from "../workers/increment.ts";

describe("the line", () => {
  test("first come, first served; a one-shot statement waits for one transaction at the most", async () => {
    const line = new WriterQueue();
    const log: string[] = [];
    const first = {};
    expect(line.enter(first)).toBe(true);
    const standing = (["t1", "t2", "t3", "e1", "e2"] as const).map(async (name) => {
      const owner = { name };
      const left = await line.stand(owner, name.startsWith("e") ? "one-shot" : "transaction", 10_000);
      expect(left).toBeGreaterThan(0);
      log.push(name);
      line.leave(owner);
    });
    expect(line.enter({})).toBe(false);
    line.leave(first);
    // Not again: it is somebody else's turn.
    line.leave(first);
    await Promise.all(standing);
    expect(log).toEqual(["e1", "t1", "e2", "t2", "t3"]);
    expect(line.enter(first)).toBe(true);
  });

  test("patience ends by itself, the shortest first, and leaves the others where they are", async () => {
    const line = new WriterQueue();
    const [holder, patient] = [{}, {}];
    line.enter(holder);
    const log: string[] = [];
    const waits = [
      line.stand(patient, "transaction", 60_000).then((left) => log.push(left > 0 ? "patient" : "no")),
      line.stand({}, "transaction", 60).then((left) => log.push(`60: ${left}`)),
      line.stand({}, "one-shot", 20).then((left) => log.push(`20: ${left}`)),
    ];
    await Promise.all(waits.slice(1));
    expect(log).toEqual(["20: 0", "60: 0"]);
    line.leave(holder);
    await waits[0];
    expect(log.at(-1)).toBe("patient");
    line.leave(patient);
  });

  test("an abort ends a wait, and leaves no listener behind", async () => {
    const line = new WriterQueue();
    const [holder, next] = [{}, {}];
    line.enter(holder);
    const { signal } = new AbortController();
    const stop = new AbortController();
    const reason = new Error("no longer wanted");
    await expect(line.stand({}, "one-shot", 1000, AbortSignal.abort(reason))).rejects.toBe(reason);
    const gone = line.stand({}, "transaction", 60_000, stop.signal);
    const stays = line.stand(next, "transaction", 60_000, signal);
    stop.abort(reason);
    await expect(gone).rejects.toBe(reason);
    line.leave(holder);
    expect(await stays).toBeGreaterThan(0);
    for (const each of [signal, stop.signal]) expect(getEventListeners(each, "abort")).toEqual([]);
  });

  test("after long turns the file is nobody's for a moment, although others of the process wait", async () => {
    const line = new WriterQueue();
    const holder = {};
    line.enter(holder);
    await sleep(120);
    const next = {};
    let granted = false;
    const waiting = line.stand(next, "transaction", 60_000).then(() => (granted = true));
    line.leave(holder);
    await Promise.resolve();
    expect([granted, line.enter({})]).toEqual([false, false]);
    await waiting;
    line.leave(next);
  });

  test("is one per file, by whatever path", async () => {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-line-"));
    const [file, link] = [join(folder, "a.db"), join(folder, "b.db")];
    await writeFile(file, "");
    await symlink(file, link);
    expect(writerQueueOf(link)).toBe(writerQueueOf(file));
    expect(writerQueueOf(join(folder, "missing"))).not.toBe(writerQueueOf(file));
    await rm(folder, { recursive: true, force: true });
  });
});

const files = backends.filter(({ server, orm }) => server === "file" && !orm);

describe.each(files)("$name", (backend: Backend) => {
  test("writers of one process come one after the other, in the order of their calls", async () => {
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database, { wait: 30_000 });
    try {
      await hf.capabilities();
      const log: number[] = [];
      let inside = 0;
      await Promise.all(
        Array.from({ length: 12 }, (_, i) =>
          hf.transaction({ lock: key("turn", i) }, async () => {
            expect(++inside).toBe(1);
            log.push(i);
            if (i % 3 === 0) await sleep(3);
            inside--;
          }),
        ),
      );
      expect(log).toEqual(Array.from({ length: 12 }, (_, i) => i));
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  });
});

const worker = new URL("../workers/increment.ts", import.meta.url);

test.for(files.filter(({ name }) => !name.includes(", one")))(
  "a process that always writes does not keep another one out: $name",
  async (backend) => {
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database, { wait: 30_000 });
    try {
      await hf.migrate();
      await execute(site, sql`CREATE TABLE counter (id integer NOT NULL PRIMARY KEY, n integer NOT NULL)`);
      await execute(site, sql`INSERT INTO counter VALUES (1, 0), (2, 0)`);
      let over = false;
      const busy = Promise.all(
        Array.from({ length: 4 }, async () => {
          while (!over)
            await hf.transaction({ lock: key("mine") }, async (tx) => {
              await tx.query(sql`UPDATE counter SET n = n + 1 WHERE id = 2`);
              await sleep(5);
            });
        }),
      );
      const arg: IncrementArg = {
        backend: backend.name,
        url: place.url,
        kinds: ["advisory lock"],
        calls: 30,
        callers: 2,
        seed: inject("seed"),
      };
      const { result } = startWorker<IncrementResult[]>(worker, arg);
      const [theirs] = await result.finally(() => (over = true));
      await busy;
      const rows = await hf.transaction((tx) => tx.query(sql`SELECT n FROM counter ORDER BY id`));
      expect(theirs?.errors).toEqual([]);
      expect(Number(rows[0]?.n)).toBe(theirs?.done);
      expect(Number(rows[1]?.n)).toBeGreaterThan(4);
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  },
);
