/** One leader at a time: by hand, when it ends, when it is killed, and when it is frozen. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { type Events, type Holdfast, type Leadership, fenced, holdfast, key, leader, sql } from "holdfast";
import { type ConformanceSite, execute } from "holdfast/testing";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { type Place, missing, placeFor } from "./harness/places.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { CandidateArg, Wrote } from "./workers/leader-candidate.ts";

const file = new URL("./workers/leader-candidate.ts", import.meta.url);

/** So long that whoever leads soon was handed it over. */
const hour = 3_600_000;

/** Ends when it is told to, and not before. */
function obedient(led: Leadership[]) {
  return async (leadership: Leadership) => {
    led.push(leadership);
    const { signal } = leadership;
    await new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve(), { once: true }));
  };
}

describe.each(["pg", "mysql2 on MariaDB", "better-sqlite3"])("%s", (backendName) => {
  const backend = backendNamed(backendName);
  const reason = missing(backend);
  let place: Place;
  let site: ConformanceSite;
  let hf: Holdfast<unknown>;
  let made = 0;
  let name: string;
  const workers: Worker[] = [];

  beforeAll(async () => {
    if (reason !== undefined) return;
    place = await placeFor(backend);
    site = await backend.open(place.url);
    hf = holdfast(site.database);
    await hf.migrate();
    await execute(site, sql`CREATE TABLE effect (who varchar(20), fence bigint)`);
  });

  afterAll(async () => {
    if (reason !== undefined) return;
    await hf.close();
    await site.close();
    await place.drop();
  });

  beforeEach(async ({ skip }) => {
    skip(reason !== undefined, reason);
    name = `indexer ${++made}`;
    await execute(site, sql`DELETE FROM effect`);
  });

  afterEach(async () => {
    for (const worker of workers) worker.sigkill();
    await Promise.all(workers.splice(0).map(({ exited }) => exited));
  });

  function candidate(ttl: number, naive = false): Worker {
    const worker = startWorker(file, {
      backend: backend.name,
      url: place.url,
      name,
      ttl,
      naive,
    } satisfies CandidateArg);
    workers.push(worker);
    return worker;
  }

  test("one at a time; stopped, the next leads at once", async () => {
    const led: Leadership[] = [];
    const events: [string, string, number][] = [];
    const listeners = (["holdfast:leader:gained", "holdfast:leader:lost"] as const).map((channel) => {
      const listen = (event: unknown) => {
        const { leader: of, fence } = event as Events[typeof channel];
        events.push([channel, of, fence]);
      };
      subscribe(channel, listen);
      return () => unsubscribe(channel, listen);
    });
    const crew = [1, 2, 3].map(() => leader(hf, name, obedient(led), { ttl: hour }));
    for (let i = 0; i < 3; i++) {
      await eventually(() => led.length === i + 1);
      const leading = crew.filter((each) => each.leading);
      expect(leading.length).toBe(1);
      await leading[0]?.stop();
      expect([leading[0]?.leading, led[i]?.signal.aborted]).toEqual([false, true]);
    }
    await Promise.all(crew.map((each) => each.ended));
    for (const stop of listeners) stop();
    const fences = led.map(({ fence }) => fence);
    expect(fences.every((fence, i) => i === 0 || fence > (fences[i - 1] as number))).toBe(true);
    expect(events).toEqual(
      fences.flatMap((fence) => [
        ["holdfast:leader:gained", `leader:${name}`, fence],
        ["holdfast:leader:lost", `leader:${name}`, fence],
      ]),
    );
    expect(await hf.leases(key("leader", name))).toEqual([]);
  });

  test("processes: stopped, the next one leads at once", async () => {
    const first = candidate(hour);
    const fence = await first.message<number>("leads");
    const second = candidate(hour);
    first.send("stop");
    await first.message("stopped");
    expect(await second.message<number>("leads")).toBeGreaterThan(fence);
  });

  test("processes: killed, the next one leads after the ttl", async () => {
    const first = candidate(1000);
    const fence = await first.message<number>("leads");
    const second = candidate(1000);
    first.sigkill();
    expect(await second.message<number>("leads")).toBeGreaterThan(fence);
  });

  test("processes: stopped past the ttl, and woken up: its signal is aborted, its write refused, and it leads again", async () => {
    const first = candidate(3000);
    const fence = await first.message<number>("leads");
    first.sigstop();
    const led: Leadership[] = [];
    const second = leader(hf, name, obedient(led), { ttl: 20_000 });
    await eventually(() => led.length === 1);
    const [leading] = led as [Leadership];
    expect(leading.fence).toBeGreaterThan(fence);
    first.send("write");
    first.sigcont();
    expect(await first.message<Wrote>("wrote")).toEqual({ aborted: true, outcome: "HF_STALE_FENCE" });
    await hf.transaction(async (tx) => {
      await fenced(tx, leading.lease);
      await tx.query(sql`INSERT INTO effect (who, fence) VALUES (${"second"}, ${leading.fence})`);
    });
    expect((await execute(site, sql`SELECT who FROM effect`)).map(({ who }) => who)).toEqual(["second"]);
    // It has not given up: when the other one ends, it runs the body again.
    await second.stop();
    expect(await first.message<number>("leads")).toBeGreaterThan(leading.fence);
    first.send("write");
    expect(await first.message<Wrote>("wrote")).toEqual({ aborted: false, outcome: "written" });
  });

  // So the test above could fail.
  test("a leader that does not ask writes too late", async () => {
    const first = candidate(1000, true);
    await first.message("leads");
    first.sigstop();
    const taken = await hf.lease(key("leader", name), { wait: 60_000 });
    first.send("write");
    first.sigcont();
    expect(await first.message<Wrote>("wrote")).toEqual({ aborted: true, outcome: "written" });
    await taken.release();
  });

  test("a body that throws is told of, and tried again; one that returns is done", async () => {
    const errors: unknown[] = [];
    let runs = 0;
    const one = leader(
      hf,
      name,
      async () => {
        if (++runs === 1) throw new Error("no index");
      },
      { ttl: hour, onError: (error) => void errors.push(error) },
    );
    await one.ended;
    expect(runs).toBe(2);
    expect(errors).toEqual([new Error("no index")]);
    expect(await hf.leases(key("leader", name))).toEqual([]);
  });

  test("by a signal, by a block, and by a key of one's own", async () => {
    const controller = new AbortController();
    const led: Leadership[] = [];
    const one = leader(hf, key("my", name), obedient(led), { signal: controller.signal });
    await eventually(() => led.length === 1);
    expect(one.name).toBe(`my:${name}`);
    controller.abort(new Error("shutting down"));
    await one.ended;
    expect(led[0]?.signal.reason).toEqual(new Error("shutting down"));
    let again: AbortSignal | undefined;
    {
      await using other = leader(hf, key("my", name), obedient(led), { ttl: hour });
      await eventually(() => other.leading);
      again = led[1]?.signal;
    }
    expect(again?.aborted).toBe(true);
    // Aborted before it began.
    await leader(hf, name, obedient(led), { signal: controller.signal }).ended;
    expect(led.length).toBe(2);
  });

  test("taken away by hand: the signal aborts, and the body runs again", async () => {
    const led: Leadership[] = [];
    const one = leader(hf, name, obedient(led), { ttl: 900 });
    await eventually(() => led.length === 1);
    await execute(
      site,
      sql`DELETE FROM ${backend.name === "pg" ? sql.id("holdfast", "lease") : sql.id("holdfast_lease")}`,
    );
    await eventually(() => led.length === 2);
    expect(led[0]?.signal.reason).toMatchObject({ code: "HF_LEASE_LOST" });
    await one.stop();
  });

  test("after a pause of the whole process the signal tells the truth before any timer has run", async () => {
    const said = Promise.withResolvers<boolean[]>();
    const one = leader(
      hf,
      name,
      async ({ signal }) => {
        const before = signal.aborted;
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 600);
        said.resolve([before, signal.aborted]);
      },
      { ttl: 500 },
    );
    expect(await said.promise).toEqual([false, true]);
    await one.stop();
  });

  test("the instance is closed: it ends", async () => {
    const own = await backend.open(place.url);
    const other = holdfast(own.database);
    const led: Leadership[] = [];
    const one = leader(other, name, obedient(led), { ttl: hour });
    await eventually(() => led.length === 1);
    await other.close();
    await one.ended;
    expect(led[0]?.signal.aborted).toBe(true);
    await own.close();
  });

  test("what is wrong is said", () => {
    const body = async () => {};
    expect(() => leader({} as typeof hf, name, body)).toThrow("not what holdfast");
    expect(() => leader(hf, name, undefined as never)).toThrow("must be an async function");
    expect(() => leader(hf, "", body)).toThrow();
    expect(() => leader(hf, name, body, { ttl: 1 })).toThrow("ttl must be");
    expect(() => leader(hf, name, body, { tll: 1 } as never)).toThrow("no option `tll`");
    expect(() => leader(hf, name, body, { signal: {} as never })).toThrow("AbortSignal");
  });
});
