/** What becomes of leases when processes are stopped, killed and misled, and servers restarted. */
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import {
  type Holdfast,
  LockTimeoutError,
  SchemaMissingError,
  StaleFenceError,
  UnsupportedError,
  fenced,
  holdfast,
  key,
  shared,
  sql,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { type ConformanceSite, execute } from "holdfast/testing";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, describe, expect, test, type TestContext } from "vitest";
import { type Backend, backendNamed } from "./backends.ts";
import { createDatabase } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";
import { runWorkers, startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";
import { type LeaseCallersArg, type LeaseCallersResult, crowdOf } from "./workers/lease-callers.ts";
import type { DoneMessage, HeldMessage, LeaseHolderArg } from "./workers/lease-holder.ts";

const holderFile = new URL("./workers/lease-holder.ts", import.meta.url);
const callersFile = new URL("./workers/lease-callers.ts", import.meta.url);
const exitFile = fileURLToPath(new URL("./workers/lease-exit.ts", import.meta.url));
const patience = 60_000;
const pg = backendNamed("pg");

interface Scene {
  readonly url: string;
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
    const ask = (statement: ReturnType<typeof sql>) => execute(site, statement);
    return await run({ url: place.url, site, hf, ask });
  } finally {
    await hf.close();
    await site.close();
    await place.drop();
  }
}

async function effectTable({ ask }: Scene): Promise<void> {
  await ask(sql`CREATE TABLE effect (lane integer, round integer, who text, fence bigint)`);
}

interface Rounds {
  readonly lane: number;
  readonly rounds: number;
  readonly ttl: number;
  readonly backend?: string;
  readonly clockMs?: number;
  readonly naive?: boolean;
  readonly renew?: boolean;
  readonly inRenewal?: boolean;
}

/** One holder, stopped again and again; whoever takes over writes before it wakes up, or while it does. */
async function stopAndGo({ url, hf }: Scene, rounds: Rounds): Promise<(DoneMessage & { late: boolean })[]> {
  const { lane, ttl, clockMs = 0, naive = false, renew = true, inRenewal = false, backend = "pg" } = rounds;
  const arg: LeaseHolderArg = { backend, url, lane, ttl, clockMs, naive, renew, inRenewal };
  const holder = startWorker(holderFile, arg);
  const done: (DoneMessage & { late: boolean })[] = [];
  for (let round = 0; round < rounds.rounds; round++) {
    holder.send("round", true);
    const { fence, until } = await holder.message<HeldMessage>("held");
    if (inRenewal) await holder.message("renewing");
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

describe.concurrent("a holder that is stopped past its time", () => {
  test("200 rounds: it was told, its write is refused, every effect happens once", ({ skip }) =>
    scene(skip, pg, async (place) => {
      await effectTable(place);
      const lanes = Array.from({ length: 5 }, (_, lane) => stopAndGo(place, { lane, rounds: 40, ttl: 200 }));
      const done = (await Promise.all(lanes)).flat();
      expect(done).toEqual(Array.from({ length: 200 }, () => refused));
      const effects = await place.ask(
        sql`SELECT who, count(*)::int AS n, count(DISTINCT (lane, round))::int AS rounds FROM effect GROUP BY who`,
      );
      expect(effects).toEqual([{ who: "taker", n: 200, rounds: 200 }]);
    }));

  // The same without the fence must show the bug, or it would prove nothing.
  test("without the fence effects happen twice", ({ skip }) =>
    scene(skip, pg, async (place) => {
      await effectTable(place);
      const done = await stopAndGo(place, { lane: 0, rounds: 3, ttl: 200, naive: true });
      expect(done).toEqual(Array.from({ length: 3 }, () => ({ ...refused, outcome: "written" })));
      expect(await place.ask(sql`SELECT count(*)::int AS n FROM effect`)).toEqual([{ n: 6 }]);
    }));

  const others = ["Prisma", "pg through PgBouncer", "better-sqlite3", "node:sqlite", "libsql"];
  test.for(others.map(backendNamed))("the same through $name", (backend, { skip }) =>
    scene(skip, backend, async (place) => {
      await effectTable(place);
      const done = await stopAndGo(place, {
        lane: 0,
        rounds: 3,
        ttl: 300,
        backend: backend.name,
        renew: backend.server !== "file",
      });
      // What refuses the write may be the end of its connection: see the next test.
      expect(done).toMatchObject(Array.from({ length: 3 }, () => ({ aborted: true, late: true })));
      expect(await place.ask(sql`SELECT DISTINCT who AS who FROM effect`)).toEqual([{ who: "taker" }]);
    }),
  );
});

// A client that sends BEGIN and COMMIT by itself can be stopped between them, with the lease's row locked.
test("a holder that is stopped between a renewal and its COMMIT keeps nobody out for long", ({ skip }) =>
  scene(skip, backendNamed("Prisma"), async (place) => {
    await effectTable(place);
    const done = await stopAndGo(place, {
      lane: 0,
      rounds: 1,
      ttl: 3000,
      backend: "Prisma",
      inRenewal: true,
    });
    expect(done).toMatchObject([{ aborted: true, late: true }]);
    expect(await place.ask(sql`SELECT who FROM effect`)).toEqual([{ who: "taker" }]);
  }));

describe.concurrent("a holder that is stopped inside a fenced transaction", () => {
  async function stopInside(
    { url }: Scene,
    backend: Backend,
    insideMs: number,
    meanwhile: (holder: { wake(): void }) => Promise<void>,
  ): Promise<DoneMessage> {
    const arg: LeaseHolderArg = { backend: backend.name, url, lane: 0, ttl: 200, insideMs };
    const holder = startWorker(holderFile, arg);
    holder.send("round", true);
    await holder.message("held");
    holder.sigstop();
    await meanwhile({
      wake() {
        holder.send("go on");
        holder.sigcont();
      },
    });
    const done = await holder.message<DoneMessage>("done");
    holder.send("round", false);
    await holder.result;
    return done;
  }

  test("commits what it wrote before anybody else gets the lease", ({ skip }) =>
    scene(skip, pg, async (place) => {
      await effectTable(place);
      const { hf } = place;
      const done = await stopInside(place, pg, patience, async ({ wake }) => {
        await eventually(async () => (await hf.leases(key("lane", 0))).length === 0);
        // Its time is over, and nobody gets it all the same.
        for (let i = 0; i < 20; i++) expect(await hf.lease(key("lane", 0), { wait: "skip" })).toBeUndefined();
        wake();
        const taken = await hf.lease(key("lane", 0), { wait: patience });
        expect(await place.ask(sql`SELECT who, fence < ${taken.fence} AS older FROM effect`)).toEqual([
          { who: "holder", older: true },
        ]);
        await taken.release();
      });
      expect(done).toEqual({ aborted: true, outcome: "written" });
    }));

  test.for([pg, backendNamed("pg on an older PostgreSQL")])(
    "is evicted by the server at its deadline, and has written nothing: $name",
    (backend, { skip }) =>
      scene(skip, backend, async (place) => {
        await effectTable(place);
        const { hf } = place;
        const done = await stopInside(place, backend, 4000, async ({ wake }) => {
          const taken = await hf.lease(key("lane", 0), { wait: patience });
          await hf.transaction((tx) => fenced(tx, taken));
          await taken.release();
          wake();
        });
        expect(done.outcome).not.toBe("written");
        expect(await place.ask(sql`SELECT who FROM effect`)).toEqual([]);
      }),
  );
});

/** Callers of several processes; resolves to how many were inside at once, by the database's clock. */
async function crowd(
  { url, ask }: Scene,
  processes: number,
  each: (process: number) => Omit<LeaseCallersArg, "url">,
): Promise<{ most: number; served: number; errors: string[] }> {
  await ask(sql`CREATE TABLE place (id bigserial PRIMARY KEY)`);
  const workers = Array.from({ length: processes }, (_, i) =>
    runWorkers<LeaseCallersResult>(callersFile, 1, { ...each(i), url }),
  );
  return crowdOf((await Promise.all(workers)).flat());
}

describe.concurrent("clocks of applications that are an hour off", () => {
  test.for([3_600_000, -3_600_000])(
    "change nothing for a holder that is stopped: %i ms",
    (clockMs, { skip }) =>
      scene(skip, pg, async (place) => {
        await effectTable(place);
        const done = await stopAndGo(place, { lane: 0, rounds: 3, ttl: 200, clockMs });
        expect(done).toEqual(Array.from({ length: 3 }, () => refused));
        expect(await place.ask(sql`SELECT DISTINCT who AS who FROM effect`)).toEqual([{ who: "taker" }]);
      }),
  );

  test("change nothing for who gets in", ({ skip }) =>
    scene(skip, pg, async (place) => {
      const found = await crowd(place, 3, (i) => ({
        backend: "pg",
        callers: 2,
        times: 10,
        clockMs: (i - 1) * 3_600_000,
      }));
      expect(found).toEqual({ most: 1, served: 60, errors: [] });
      expect(await place.hf.leases()).toEqual([]);
    }));
});

describe("a semaphore of 5 under 64 callers of 4 processes", () => {
  const callers = { callers: 16, times: 3, permits: 5 };

  test.for(["pg", "pg through PgBouncer"].map(backendNamed))(
    "never 6, and everybody is served: $name",
    (backend, { skip }) =>
      scene(skip, backend, async (place) => {
        const { most, ...rest } = await crowd(place, 4, () => ({ backend: backend.name, ...callers }));
        expect(rest).toEqual({ served: 192, errors: [] });
        expect(most).toBeLessThanOrEqual(5);
        expect(await place.hf.leases()).toEqual([]);
      }),
  );

  test("more than 5 if they count first, and enter then", ({ skip }) =>
    scene(skip, pg, async (place) => {
      const { most } = await crowd(place, 4, () => ({ backend: "pg", naive: true, ...callers }));
      expect(most).toBeGreaterThan(5);
    }));

  test("is exact too where the server's default isolation is serializable", ({ skip }) =>
    scene(skip, pg, async (place) => {
      const [row] = await place.ask(sql`SELECT current_database() AS name`);
      await place.ask(
        sql`ALTER DATABASE ${sql.id(String(row?.name))} SET default_transaction_isolation = 'serializable'`,
      );
      const { most, served, errors } = await crowd(place, 2, () => ({
        backend: "pg",
        callers: 4,
        times: 4,
        permits: 2,
      }));
      expect({ served, errors }).toEqual({ served: 32, errors: [] });
      expect(most).toBeLessThanOrEqual(2);
    }));
});

describe("a process that is killed", () => {
  test("leaves its lease, its permits and its place in line to others", ({ skip }) =>
    scene(skip, pg, async (place) => {
      const { url, hf } = place;
      await effectTable(place);
      const arg: LeaseHolderArg = { backend: "pg", url, lane: 7, ttl: 5000 };
      const [holder, waiter] = [startWorker(holderFile, arg), startWorker(holderFile, arg)];
      holder.send("round", true);
      const { fence, until } = await holder.message<HeldMessage>("held");
      // A reader makes the one who waits for all of it stand in line.
      const reader = hf.lease(shared(key("lane", 7)), { wait: patience });
      await eventually(async () => (await hf.leases(key("lane", 7))).length === 2);
      waiter.send("round", true);
      await eventually(async () => (await hf.leases(key("lane", 7))).length === 3);
      waiter.sigkill();
      holder.sigkill();
      const first = await reader;
      expect(first.fence).toBeGreaterThan(fence);
      expect(first.since.getTime()).toBeGreaterThanOrEqual(until.getTime());
      const second = await hf.lease(shared(key("lane", 7)), { wait: patience });
      await Promise.all([first.release(), second.release()]);
      await (await hf.lease(key("lane", 7), { wait: patience })).release();
    }));
});

describe("a process that stands still", () => {
  test("learns when it gives the lease back that its time had passed", ({ skip }) =>
    scene(skip, pg, async ({ hf }) => {
      const lease = await hf.lease(key("still"), { ttl: 300 });
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 400);
      await lease.release();
      expect(lease.signal.aborted).toBe(true);
    }));
});

describe("fences", () => {
  test("grow although the tables are emptied, and a lease that was deleted is over", ({ skip }) =>
    scene(skip, pg, async ({ hf, ask }) => {
      const lease = await hf.lease(key("emptied"), { ttl: 300 });
      await ask(sql`DELETE FROM holdfast.lease`);
      await ask(sql`DELETE FROM holdfast.resource`);
      await expect(hf.transaction((tx) => fenced(tx, lease))).rejects.toBeInstanceOf(StaleFenceError);
      await eventually(() => lease.signal.aborted);
      const next = await hf.lease(key("emptied"), { wait: "nowait" });
      expect(next.fence).toBeGreaterThan(lease.fence);
      await next.release();
    }));

  describe("and leases of a server that is restarted", () => {
    let server: EmbeddedPostgres;
    beforeAll(async () => {
      // A crash must not undo a grant either where commits are not flushed.
      server = await startPostgres({ settings: { synchronous_commit: "off" } });
    });
    afterAll(() => server.stop());

    test.each(["pg", "postgres.js", "Prisma"].map(backendNamed))("are kept: $name", async (backend) => {
      const site = await backend.open(server.url());
      const hf = holdfast(site.database);
      try {
        await hf.migrate();
        let last = 0;
        for (const mode of ["fast", "immediate"] as const) {
          const lease = await hf.lease(key("restart", backend.name), { ttl: patience });
          expect(lease.fence).toBeGreaterThan(last);
          const waiting = hf.lease(key("restart", backend.name), { ttl: patience, wait: patience });
          await server.restart(mode);
          await lease.renew();
          await hf.transaction((tx) => fenced(tx, lease));
          expect(await hf.lease(key("restart", backend.name), { wait: "skip" })).toBeUndefined();
          await lease.release();
          const next = await waiting;
          expect(next.fence).toBeGreaterThan(lease.fence);
          await next.release();
          last = next.fence;
        }
      } finally {
        await hf.close();
        await site.close();
      }
    });
  });

  test.for(["repeatable read", "serializable"] as const)(
    "count in transactions that are %s",
    (isolation, { skip }) =>
      scene(skip, pg, async ({ hf }) => {
        const lost = await hf.lease(key("level"), { ttl: 200, renew: false });
        await hf.transaction({ isolation }, (tx) => fenced(tx, lost));
        const taken = await hf.lease(key("level"), { wait: patience });
        await expect(hf.transaction({ isolation }, (tx) => fenced(tx, lost))).rejects.toBeInstanceOf(
          StaleFenceError,
        );
        await hf.transaction({ isolation }, (tx) => fenced(tx, taken));
        await taken.release();
      }),
  );

  test("of a lease that another database keeps count there", async ({ skip }) => {
    skip(missing(pg) !== undefined, missing(pg));
    await scene(skip, pg, (kept) =>
      scene(skip, pg, async ({ hf: here, ask }) => {
        const { hf } = kept;
        const lock = key("elsewhere");
        const first = await hf.lease(lock);
        await here.transaction((tx) => fenced(tx, first));
        await here.transaction((tx) => fenced(tx, first));
        await first.release();
        const second = await hf.lease(lock);
        // Nothing newer has been here, and only the other database knows of it.
        await here.transaction((tx) => fenced(tx, first));
        // What is written in this order is kept in this order: the older one waits, and is refused.
        let waiting: Promise<void> | undefined;
        await here.transaction(async (tx) => {
          await fenced(tx, second);
          waiting = here.transaction({ separate: true }, (other) => fenced(other, first));
          waiting.catch(() => {});
          await eventually(async () => {
            const [row] = await ask(
              sql`SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`,
            );
            return row?.n === 1;
          });
        });
        await expect(waiting).rejects.toMatchObject({ fence: first.fence, newest: second.fence });
        await here.transaction((tx) => fenced(tx, second));
        await second.release();
        // Of several at a time the newest says nothing about the others.
        const reader = await hf.lease(shared(lock));
        await expect(here.transaction((tx) => fenced(tx, reader))).rejects.toBeInstanceOf(UnsupportedError);
        await reader.release();
        // A lease of the same key that is kept here is another one.
        const own = await here.lease(lock);
        await here.transaction((tx) => fenced(tx, own));
        await own.release();
        await expect(here.transaction((tx) => fenced(tx, own))).rejects.toBeInstanceOf(StaleFenceError);
      }),
    );
  });
});

describe.concurrent("networks", () => {
  async function through<T>(
    backend: Backend,
    run: (
      net: Awaited<ReturnType<typeof startProxy>>,
      hf: Holdfast<unknown>,
      direct: Holdfast<unknown>,
    ) => Promise<T>,
  ): Promise<T> {
    const database = await createDatabase("postgres");
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const [near, far] = [await backend.open(database.url), await backend.open(proxy.url(database.url))];
    const [direct, hf] = [holdfast(near.database), holdfast(far.database)];
    try {
      await direct.migrate();
      return await run(proxy, hf, direct);
    } finally {
      proxy.cutWhen(undefined);
      proxy.thaw();
      await Promise.all([hf.close(), direct.close()]);
      await Promise.all([near.close(), far.close()]);
      await proxy.close();
      await database.drop();
    }
  }

  const clients = ["pg", "postgres.js", "Prisma"].map(backendNamed);

  test.each(clients)("an answer that is lost leaves no lease behind, and costs none: $name", (backend) =>
    through(backend, async (net, hf, direct) => {
      await (await hf.lease(key("warm"))).release();
      let cuts = 0;
      const lose = (what: string) => {
        cuts = net.cuts;
        net.cutWhen((direction, chunk) => {
          if (direction !== "to-server" || !chunk.toString("latin1").includes(what)) return "pass";
          net.cutWhen(undefined);
          return "drop-answer";
        });
      };
      lose("take_lease");
      const lease = await hf.lease(key("answer"));
      expect(net.cuts).toBeGreaterThan(cuts);
      expect((await direct.leases()).map(({ fence }) => fence)).toEqual([lease.fence]);
      lose("UPDATE holdfast.lease");
      await lease.renew();
      expect(net.cuts).toBeGreaterThan(cuts);
      lease.throwIfLost();
      lose("release_lease");
      // Whether the first one was done is not known, so the second may find nothing.
      await lease.release().catch(() => {});
      expect(await direct.leases()).toEqual([]);
    }),
  );

  test.each(clients)("one that falls silent: the holder is told before another gets it: $name", (backend) =>
    through(backend, async (net, hf, direct) => {
      const lease = await hf.lease(key("silent"), { ttl: 600 });
      net.freeze();
      const taken = await direct.lease(key("silent"), { wait: patience });
      expect(lease.signal.aborted).toBe(true);
      expect(taken.fence).toBeGreaterThan(lease.fence);
      net.thaw();
      await expect(hf.transaction((tx) => fenced(tx, lease))).rejects.toBeInstanceOf(StaleFenceError);
      await taken.release();
    }),
  );

  test.each(clients)("one that is cut whenever it is renewed, four times, costs no lease: $name", (backend) =>
    through(backend, async (net, hf) => {
      // Two thirds of it are for four connections, each made anew, on a machine that may be busy.
      const lease = await hf.lease(key("cut"), { ttl: 30_000 });
      const { until } = lease;
      let left = 4;
      net.cutWhen((direction, chunk) => {
        const renewal =
          direction === "to-server" && chunk.toString("latin1").includes("UPDATE holdfast.lease");
        return renewal && left-- > 0 ? "cut-before" : "pass";
      });
      await eventually(() => lease.until > until, { timeout: 60_000 });
      expect(left).toBeLessThan(0);
      lease.throwIfLost();
      await lease.release();
    }),
  );
});

describe.concurrent("those who wait", () => {
  /** Connections that wait for messages. */
  const listening = async ({ ask }: Scene): Promise<number> => {
    const [row] = await ask(
      sql`SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN %'`,
    );
    return Number(row?.n);
  };

  test.for(["pg", "postgres.js"].map(backendNamed))(
    "listen on one connection, for as long as anybody waits: $name",
    (backend, { skip }) =>
      scene(skip, backend, async (place) => {
        const other = await backend.open(place.url);
        const waiter = holdfast(other.database);
        const lease = await place.hf.lease(key("listen"));
        const waiting = [1, 2, 3].map(async () => {
          const next = await waiter.lease(key("listen"), { wait: patience });
          await next.release();
        });
        await eventually(async () => (await listening(place)) === 1);
        await lease.release();
        await Promise.all(waiting);
        await eventually(async () => (await listening(place)) === 0);
        await waiter.close();
        await other.close();
      }),
  );

  test("leave no place in line behind when they give up", ({ skip }) =>
    scene(skip, pg, async ({ hf, ask }) => {
      const lock = key("given up");
      const lease = await hf.lease(lock);
      // All rows: one that has run out stays until somebody else wants the lease.
      const inLine = async () => (await ask(sql`SELECT fence FROM holdfast.lease WHERE waiting`)).length;
      const controller = new AbortController();
      const aborted = hf.lease(shared(lock), { wait: patience, signal: controller.signal });
      aborted.catch(() => {});
      await eventually(async () => (await inLine()) === 1);
      controller.abort(new Error("enough"));
      await expect(aborted).rejects.toThrow("enough");
      await eventually(async () => (await inLine()) === 0);
      await expect(hf.lease(shared(lock), { wait: 100 })).rejects.toBeInstanceOf(LockTimeoutError);
      await eventually(async () => (await inLine()) === 0);
      await lease.release();
    }));

  test("are told by the server, through each client that can tell", async ({ skip }) => {
    skip(missing(pg) !== undefined, missing(pg));
    const database = await createDatabase("postgres");
    const [pool, client] = [
      new Pool({ connectionString: database.url, max: 1 }),
      postgres(database.url, { max: 1 }),
    ];
    for (const { listen } of [fromPg(pool), fromPostgres(client)]) {
      const stop = new AbortController();
      const heard: string[] = [];
      await listen?.('odd "channel"', (payload) => heard.push(payload), stop.signal);
      await pool.query("SELECT pg_notify($1, $2)", ['odd "channel"', "é 1"]);
      await eventually(() => heard.length === 1);
      stop.abort();
      await eventually(async () => {
        const { rows } = await pool.query<{ n: number }>(
          "SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN %'",
        );
        return rows[0]?.n === 0;
      });
      expect(heard).toEqual(["é 1"]);
    }
    await Promise.all([pool.end(), client.end()]);
    await database.drop();
  });

  // Nothing is heard there: they look again and again.
  test.for(["pg through PgBouncer", "postgres.js through PgBouncer", "Prisma"].map(backendNamed))(
    "get in through $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ url, hf }) => {
        const other = await backend.open(url);
        const waiter = holdfast(other.database);
        const lease = await hf.lease(key("poll"));
        const waiting = waiter.lease(key("poll"), { wait: patience });
        // Longer than it takes to find out that nothing is heard.
        await new Promise((resolve) => setTimeout(resolve, 2500));
        await lease.release();
        await (await waiting).release();
        await waiter.close();
        await other.close();
      }),
  );

  test.for(["pg", "postgres.js", "Prisma"].map(backendNamed))(
    "do not keep a process that is done, nor does what is held: $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ url }) => {
        const child = spawn(process.execPath, ["--conditions=holdfast-source", exitFile, backend.name, url], {
          stdio: ["ignore", "pipe", "inherit"],
        });
        let output = "";
        child.stdout.on("data", (chunk: Buffer) => (output += chunk.toString()));
        const timer = setTimeout(() => child.kill("SIGKILL"), patience);
        const signal = await new Promise((resolve) => child.once("close", (_, s) => resolve(s)));
        clearTimeout(timer);
        expect({ signal, output }).toEqual({ signal: null, output: "LockTimeoutError\nclosed, fence 1\n" });
      }),
  );
});

test("a claim that arrives twice is granted once", ({ skip }) =>
  scene(skip, pg, async ({ hf, ask }) => {
    const lease = await hf.lease(key("twice"));
    // Its message was under way on a connection that was thought to be lost, and comes after the one that was answered.
    const [late] = await ask(
      sql`SELECT t.o_fence = l.fence AS same, t.o_until >= l.until AS renewed FROM holdfast.lease l,
        holdfast.take_lease(l.resource, l.name, l.mode, l.token, l.holder, l.weight, l.weight, 30000, 0, 1000) t`,
    );
    expect(late).toEqual({ same: true, renewed: true });
    await lease.renew();
    await hf.transaction((tx) => fenced(tx, lease));
    await lease.release();
    expect(await hf.leases()).toEqual([]);
  }));

test("names that are not to be seen on the server are not there", ({ skip }) =>
  scene(skip, pg, async ({ site, ask }) => {
    const hf = holdfast(site.database, { names: false });
    const lease = await hf.lease(key("secret"));
    expect(lease.name).toBe("secret");
    expect(await ask(sql`SELECT name FROM holdfast.lease`)).toEqual([{ name: "" }]);
    const error: unknown = await hf.lease(key("secret"), { wait: 50 }).catch((e: unknown) => e);
    expect(error).toBeInstanceOf(LockTimeoutError);
    await lease.release();
    await hf.close();
  }));

test("tables that are not there are asked for by name", async ({ skip }) => {
  skip(missing(pg) !== undefined, missing(pg));
  const database = await createDatabase("postgres");
  const site = await pg.open(database.url);
  const hf = holdfast(site.database);
  await expect(hf.lease(key("missing"))).rejects.toBeInstanceOf(SchemaMissingError);
  await expect(hf.leases()).rejects.toThrow(/holdfast\.lease/);
  await hf.close();
  await site.close();
  await database.drop();
});
