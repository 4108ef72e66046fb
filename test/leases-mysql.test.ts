/** Leases on MySQL and MariaDB when processes are stopped, tables emptied and servers asked for the impossible. */
import { type Holdfast, StaleFenceError, fenced, holdfast, key, sql } from "holdfast";
import { type ConformanceSite, execute } from "holdfast/testing";
import { describe, expect, test, type TestContext } from "vitest";
import { type Backend, backendNamed } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";
import { runWorkers, startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import { type LeaseCallersArg, type LeaseCallersResult, crowdOf } from "./workers/lease-callers.ts";
import type { DoneMessage, HeldMessage, LeaseHolderArg } from "./workers/lease-holder.ts";

const holderFile = new URL("./workers/lease-holder.ts", import.meta.url);
const callersFile = new URL("./workers/lease-callers.ts", import.meta.url);
const patience = 60_000;
const chosen = ["mysql2 on MySQL", "mysql2 on MariaDB", "mariadb on MariaDB"].map(backendNamed);

interface Scene {
  readonly url: string;
  readonly backend: Backend;
  readonly site: ConformanceSite;
  readonly hf: Holdfast<unknown>;
  ask(statement: ReturnType<typeof sql>): Promise<Record<string, unknown>[]>;
}

async function scene<T>(
  skip: TestContext["skip"],
  backend: Backend,
  run: (scene: Scene) => Promise<T>,
): Promise<T> {
  skip(missing(backend) !== undefined, missing(backend));
  const place = await placeFor(backend);
  const site = await backend.open(place.url);
  const hf = holdfast(site.database);
  try {
    await hf.migrate();
    await execute(
      site,
      sql`CREATE TABLE effect (lane integer, round integer, who varchar(20), fence bigint)`,
    );
    const ask = (statement: ReturnType<typeof sql>) => execute(site, statement);
    return await run({ url: place.url, backend, site, hf, ask });
  } finally {
    await hf.close();
    await site.close();
    await place.drop();
  }
}

/** One holder, stopped again and again; whoever takes over writes before it wakes up, or while it does. */
async function stopAndGo(
  { url, hf, backend }: Scene,
  lane: number,
  rounds: number,
  naive: boolean,
): Promise<(DoneMessage & { late: boolean })[]> {
  const arg: LeaseHolderArg = { backend: backend.name, url, lane, ttl: 300, naive };
  const holder = startWorker(holderFile, arg);
  const done: (DoneMessage & { late: boolean })[] = [];
  for (let round = 0; round < rounds; round++) {
    holder.send("round", true);
    const { fence, until } = await holder.message<HeldMessage>("held");
    holder.sigstop();
    const taken = await hf.lease(key("lane", lane), { wait: patience });
    const wake = () => {
      holder.send("go on");
      holder.sigcont();
    };
    if (round % 2 === 0) wake();
    await hf.transaction(async (tx) => {
      await fenced(tx, taken);
      await tx.query(
        sql`INSERT INTO effect (lane, round, who, fence) VALUES (${lane}, ${round}, ${"taker"}, ${taken.fence})`,
      );
    });
    if (round % 2 === 1) wake();
    done.push({
      ...(await holder.message<DoneMessage>("done")),
      late: taken.since >= until && taken.fence > fence,
    });
    await taken.release();
  }
  holder.send("round", false);
  await holder.result;
  return done;
}

const refused = { aborted: true, outcome: "StaleFenceError", late: true };

describe("a holder that is stopped past its time", () => {
  test.for(chosen)("was told, its write is refused, every effect happens once: $name", (backend, { skip }) =>
    scene(skip, backend, async (place) => {
      const lanes = await Promise.all([0, 1].map((lane) => stopAndGo(place, lane, 6, false)));
      expect(lanes.flat()).toEqual(Array.from({ length: 12 }, () => refused));
      const effects = await place.ask(sql`SELECT lane, round, who FROM effect`);
      expect(effects.every(({ who }) => who === "taker")).toBe(true);
      expect(new Set(effects.map(({ lane, round }) => `${String(lane)} ${String(round)}`)).size).toBe(12);
      expect(effects).toHaveLength(12);
    }),
  );

  // The same without the fence must show the bug, or it would prove nothing.
  test.for(chosen.slice(0, 2))("writes without the fence: $name", (backend, { skip }) =>
    scene(skip, backend, async (place) => {
      const done = await stopAndGo(place, 0, 2, true);
      expect(done).toEqual([1, 2].map(() => ({ ...refused, outcome: "written" })));
      expect(await place.ask(sql`SELECT who FROM effect`)).toHaveLength(4);
    }),
  );

  test.for(chosen.slice(0, 2))(
    "inside of a fenced transaction commits before anybody else gets the lease: $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ url, hf, ask }) => {
        const arg: LeaseHolderArg = {
          backend: backend.name,
          url,
          lane: 0,
          ttl: 300,
          insideMs: patience,
        };
        const holder = startWorker(holderFile, arg);
        holder.send("round", true);
        await holder.message("held");
        holder.sigstop();
        await eventually(async () => (await hf.leases(key("lane", 0))).length === 0);
        // Its time is over, and nobody gets it all the same.
        for (let i = 0; i < 10; i++) expect(await hf.lease(key("lane", 0), { wait: "skip" })).toBeUndefined();
        holder.send("go on");
        holder.sigcont();
        const taken = await hf.lease(key("lane", 0), { wait: patience });
        const [row] = await ask(sql`SELECT who, fence FROM effect`);
        expect(row?.who).toBe("holder");
        expect(Number(row?.fence)).toBeLessThan(taken.fence);
        expect(await holder.message<DoneMessage>("done")).toEqual({ aborted: true, outcome: "written" });
        await taken.release();
        holder.send("round", false);
        await holder.result;
      }),
  );
});

describe("a semaphore of 5 under 32 callers of 4 processes", () => {
  test.for(chosen.slice(0, 2))("never 6, and everybody is served: $name", (backend, { skip }) =>
    scene(skip, backend, async ({ url, hf }) => {
      const clock = "UNIX_TIMESTAMP(SYSDATE(6)) * 1000";
      const arg: LeaseCallersArg = { backend: backend.name, url, callers: 8, times: 2, permits: 5, clock };
      const { most, ...rest } = crowdOf(await runWorkers<LeaseCallersResult>(callersFile, 4, arg));
      expect(rest).toEqual({ served: 64, errors: [] });
      expect(most).toBeLessThanOrEqual(5);
      expect(await hf.leases()).toEqual([]);
    }),
  );
});

describe("fences", () => {
  test.for(chosen.slice(0, 2))(
    "grow although the tables are emptied, and a lease that was deleted is over: $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ hf, ask }) => {
        const lease = await hf.lease(key("emptied"), { ttl: 300 });
        for (const table of ["lease", "grip", "resource"])
          await ask(sql`DELETE FROM ${sql.id(`holdfast_${table}`)}`);
        await expect(hf.transaction((tx) => fenced(tx, lease))).rejects.toBeInstanceOf(StaleFenceError);
        await eventually(() => lease.signal.aborted);
        const next = await hf.lease(key("emptied"), { wait: "nowait" });
        expect(next.fence).toBeGreaterThan(lease.fence);
        await next.release();
        // TRUNCATE sets the counter back to 1; the resource remembers.
        await ask(sql`TRUNCATE TABLE holdfast_lease`);
        const third = await hf.lease(key("emptied"), { wait: "nowait" });
        expect(third.fence).toBeGreaterThan(next.fence);
        await third.release();
        const other = await hf.lease(key("another"), { wait: "nowait" });
        expect(other.fence).toBeGreaterThan(third.fence);
        await other.release();
      }),
  );

  test("of a lease that another database keeps count there", ({ skip }) => {
    const [here, there] = [backendNamed("mysql2 on MySQL"), backendNamed("mysql2 on MariaDB")];
    skip(missing(there) !== undefined, missing(there));
    return scene(skip, here, (kept) =>
      scene(skip, there, async ({ hf }) => {
        const first = await kept.hf.lease(key("elsewhere"), { ttl: 300, renew: false });
        await hf.transaction((tx) => fenced(tx, first));
        const second = await kept.hf.lease(key("elsewhere"), { wait: patience });
        await hf.transaction((tx) => fenced(tx, second));
        await expect(hf.transaction((tx) => fenced(tx, first))).rejects.toBeInstanceOf(StaleFenceError);
        await hf.transaction((tx) => fenced(tx, second));
        await second.release();
        const permit = await kept.hf.semaphore(key("elsewhere"), { permits: 2 }).acquire();
        await expect(hf.transaction((tx) => fenced(tx, permit))).rejects.toMatchObject({
          code: "HF_UNSUPPORTED",
        });
        await permit.release();
      }),
    );
  });
});
