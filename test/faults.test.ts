/** What processes, networks and servers do to a transaction at the worst moment. */
import { startPostgres, type EmbeddedPostgres } from "@holdfast/cli";
import { setTimeout as sleep } from "node:timers/promises";
import { ConnectionLostError, type Holdfast, type TransactionOptions, holdfast, key, sql } from "holdfast";
import { type ConformanceSite, execute } from "holdfast/testing";
import { Client } from "pg";
import { afterAll, beforeAll, describe, expect, test, type TestContext } from "vitest";
import { type Backend, backendNamed, backends, campaigns } from "./backends.ts";
import { createDatabase, serverUrl } from "./harness/databases.ts";
import { type Place, missing, placeFor } from "./harness/places.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";
import type { HolderArg } from "./workers/holder.ts";

const worker = new URL("./workers/holder.ts", import.meta.url);

interface Scene {
  readonly place: Place;
  readonly site: ConformanceSite;
  readonly hf: Holdfast<unknown>;
  effects(): Promise<string[]>;
}

async function scene<T>(
  skip: TestContext["skip"],
  backend: Backend,
  run: (scene: Scene) => Promise<T>,
): Promise<T> {
  skip(missing(backend) !== undefined, missing(backend));
  const place = await placeFor(backend);
  const site = await backend.open(place.url);
  try {
    const hf = holdfast(site.database);
    await hf.migrate();
    await execute(site, sql`CREATE TABLE effect (who varchar(40) NOT NULL)`);
    const effects = async () =>
      (await hf.transaction((tx) => tx.query(sql`SELECT who FROM effect ORDER BY who`))).map(({ who }) =>
        String(who),
      );
    return await run({ place, site, hf, effects });
  } finally {
    await site.close();
    await place.drop();
  }
}

const evicting = campaigns.filter(({ server }) => !["mariadb", "mysql", "file"].includes(server));

describe("a holder that is killed", () => {
  test.for(campaigns)("leaves the lock to the waiter, and nothing written: $name", (backend, { skip }) =>
    scene(skip, backend, async ({ place, hf, effects }) => {
      const arg: HolderArg = { backend: backend.name, url: place.url, deadline: 60_000 };
      const holder = startWorker<string>(worker, arg);
      await holder.message("holding");
      const waiting = hf.transaction({ lock: key("fault"), wait: 60_000 }, async () => "entered");
      holder.sigkill();
      expect(await waiting).toBe("entered");
      expect(await effects()).toEqual([]);
    }),
  );
});

describe("a holder that is frozen past its deadline", () => {
  test.for(evicting)("is evicted by the server; thawed, its writes are refused: $name", (backend, { skip }) =>
    scene(skip, backend, async ({ place, hf, effects }) => {
      const arg: HolderArg = { backend: backend.name, url: place.url, deadline: 3000 };
      const holder = startWorker<string>(worker, arg);
      await holder.message("holding");
      holder.sigstop();
      // Nobody but the server can end what a frozen process holds.
      expect(await hf.transaction({ lock: key("fault"), wait: 60_000 }, async () => "entered")).toBe(
        "entered",
      );
      holder.send("go on");
      holder.sigcont();
      expect(await holder.result).not.toBe("committed");
      expect(await effects()).toEqual([]);
    }),
  );
});

/** Ends the session that a transaction runs on, from another one. */
async function terminate(pid: unknown): Promise<void> {
  const admin = new Client({ connectionString: serverUrl("postgres") });
  await admin.connect();
  await admin.query("SELECT pg_terminate_backend($1)", [Number(pid)]);
  await admin.end();
}

describe("a backend that is terminated in the middle", () => {
  const direct = backends.filter(({ server, name }) => server === "postgres" && !name.includes(", one"));

  test.for(direct)(
    "gives a typed error, keeps nothing, and leaves the pool usable: $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ hf, effects }) => {
        const body = (options: TransactionOptions, killed: { count: number }, times: number) =>
          hf.transaction({ ...options, lock: key("fault") }, async (tx) => {
            await tx.query(sql`INSERT INTO effect (who) VALUES (${`attempt ${tx.attempt}`})`);
            const [row] = await tx.query(sql`SELECT pg_backend_pid() AS pid`);
            if (killed.count++ < times) await terminate(row?.pid);
            await tx.query(sql`INSERT INTO effect (who) VALUES (${"second"})`);
            return tx.attempt;
          });
        const error: unknown = await body({ retry: false }, { count: 0 }, 1).catch((e: unknown) => e);
        expect(error).toBeInstanceOf(ConnectionLostError);
        expect(error).toMatchObject({ code: "HF_CONNECTION_LOST", retryable: true });
        expect(await effects()).toEqual([]);
        // With retries the whole transaction runs again, on another connection.
        expect(await body({}, { count: 0 }, 2)).toBe(3);
        expect(await effects()).toEqual(["attempt 3", "second"]);
      }),
  );

  test.for(direct)(
    "is a lost connection for a statement of the body's own, at once and later: $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ hf, site, effects }) => {
        const attempt = await hf.transaction({ lock: key("fault") }, async (tx) => {
          const [row] = await tx.query(sql`SELECT pg_backend_pid() AS pid`);
          if (tx.attempt <= 2) await terminate(row?.pid);
          // By then the client has seen it, too.
          if (tx.attempt === 2) await sleep(100);
          await site.send(tx.client, `INSERT INTO effect (who) VALUES ('own ${tx.attempt}')`);
          return tx.attempt;
        });
        expect(attempt).toBe(3);
        expect(await effects()).toEqual(["own 3"]);
      }),
  );

  test("ends a body that waits for something else, through tx.signal", ({ skip }) =>
    scene(skip, backendNamed("pg"), async ({ hf }) => {
      const running = hf.transaction({ retry: false }, async (tx) => {
        const [row] = await tx.query(sql`SELECT pg_backend_pid() AS pid`);
        await terminate(row?.pid);
        tx.signal.throwIfAborted();
        await new Promise((_, reject) =>
          tx.signal.addEventListener("abort", () => reject(tx.signal.reason as Error)),
        );
      });
      await expect(running).rejects.toBeInstanceOf(ConnectionLostError);
    }));
});

describe("a server that restarts", () => {
  let server: EmbeddedPostgres;
  beforeAll(async () => {
    server = await startPostgres({ settings: { fsync: "off" } });
  });
  afterAll(() => server.stop());

  test.each(["pg", "postgres.js", "Prisma"].map(backendNamed))(
    "the next call works: $name",
    async (backend) => {
      const site = await backend.open(server.url());
      const hf = holdfast(site.database);
      const once = () =>
        hf.transaction({ lock: key("restart") }, async (tx) => (await tx.query(sql`SELECT 1 AS one`)).length);
      try {
        for (const mode of ["fast", "immediate"] as const) {
          expect(await once()).toBe(1);
          await server.restart(mode);
          expect(await once()).toBe(1);
        }
      } finally {
        await site.close();
      }
    },
  );
});

describe("a COMMIT whose answer is lost", () => {
  const clients = [
    "pg",
    "postgres.js",
    "Prisma",
    "Drizzle",
    "Drizzle on postgres.js",
    "Kysely",
    "Kysely with its pool",
    "Knex",
    "TypeORM",
    "MikroORM",
    "Sequelize",
  ].map(backendNamed);

  async function withProxy(
    backend: Backend,
    fate: "cut-before" | "drop-answer",
    run: (hf: Holdfast<unknown>, arm: () => void) => Promise<void>,
  ): Promise<string[]> {
    const database = await createDatabase("postgres");
    const direct = new Client({ connectionString: database.url });
    await direct.connect();
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const site = await backend.open(proxy.url(database.url));
    try {
      await direct.query("CREATE TABLE effect (who text NOT NULL)");
      let armed = false;
      proxy.cutWhen((direction, chunk) => {
        if (!armed || direction !== "to-server" || !/\bCOMMIT\b/i.test(chunk.toString("latin1")))
          return "pass";
        armed = false;
        return fate;
      });
      await run(holdfast(site.database), () => (armed = true));
      const { rows } = await direct.query<{ who: string }>("SELECT who FROM effect");
      return rows.map(({ who }) => who);
    } finally {
      await site.close();
      await proxy.close();
      await direct.end();
      await database.drop();
    }
  }

  test.each(clients)("was kept: the call succeeds, and the body ran once: $name", async (backend) => {
    let runs = 0;
    const effects = await withProxy(backend, "drop-answer", async (hf, arm) => {
      const value = await hf.transaction({ lock: key("commit") }, async (tx) => {
        runs++;
        await tx.query(sql`INSERT INTO effect (who) VALUES (${"kept"})`);
        arm();
        return "value";
      });
      expect(value).toBe("value");
    });
    expect(runs).toBe(1);
    expect(effects).toEqual(["kept"]);
  });

  test.each(clients)("never arrived: the call says so, or runs again: $name", async (backend) => {
    let runs = 0;
    const insert = (hf: Holdfast<unknown>, arm: () => void, options: TransactionOptions) =>
      hf.transaction({ ...options, lock: key("commit") }, async (tx) => {
        runs++;
        await tx.query(sql`INSERT INTO effect (who) VALUES (${`run ${runs}`})`);
        if (runs === 1) arm();
      });
    const none = await withProxy(backend, "cut-before", async (hf, arm) => {
      await expect(insert(hf, arm, { retry: false })).rejects.toBeInstanceOf(ConnectionLostError);
    });
    expect(none).toEqual([]);
    runs = 0;
    const again = await withProxy(backend, "cut-before", (hf, arm) => insert(hf, arm, {}));
    expect(again).toEqual(["run 2"]);
  });
});

describe("a session lock", () => {
  test.for(["pg", "postgres.js", "mysql2 on MariaDB"].map(backendNamed))(
    "tells its holder when its connection dies: $name",
    (backend, { skip }) =>
      scene(skip, backend, async ({ hf, site }) => {
        const held = await hf.hold(key("session"));
        const other = holdfast(site.database);
        await killSessions(backend, other);
        await eventually(() => held.signal.aborted);
        expect(held.signal.reason).toMatchObject({ code: "HF_LOCK_LOST" });
        await expect(held.release()).rejects.toMatchObject({ code: "HF_LOCK_LOST" });
        // The lock is somebody else's to take now, also for the one who lost it.
        await (await hf.hold(key("session"))).release();
      }),
  );
});

/** Ends every session of the database but the one that asks. */
async function killSessions(backend: Backend, hf: Holdfast<unknown>): Promise<void> {
  await hf.transaction(async (tx) => {
    if (backend.server !== "mariadb" && backend.server !== "mysql") {
      await tx.query(
        sql`SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`,
      );
      return;
    }
    const sessions = await tx.query(
      sql`SELECT id FROM /*M! information_schema. *//*!80022 performance_schema. */ processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()`,
    );
    for (const { id } of sessions) await tx.query(sql.raw(`KILL CONNECTION ${Number(id)}`));
  });
}
