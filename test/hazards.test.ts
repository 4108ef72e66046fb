/** What is done under a lock and should not be: seen on every backend, named with its place. */
import { spawn, spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { lookup } from "node:dns/promises";
import http from "node:http";
import http2 from "node:http2";
import { type AddressInfo, connect } from "node:net";
import { createInterface } from "node:readline/promises";
import { PassThrough } from "node:stream";
import { scheduler, setTimeout as sleep } from "node:timers/promises";
import { connect as connectTls } from "node:tls";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { Worker } from "node:worker_threads";
import { PrismaPg } from "@prisma/adapter-pg";
import {
  type Events,
  HazardError,
  type Holdfast,
  type HoldfastOptions,
  fenced,
  type Transaction,
  TransactionAbortedError,
  holdfast,
  key,
  rows,
  sql,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { holdfast as inPrisma } from "holdfast/prisma";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { backends } from "./backends.ts";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

type Name = "holdfast:hazard" | "holdfast:section:slow" | "holdfast:section:end" | "holdfast:order:inverted";

/** What is told while it runs. */
async function told<K extends Name>(name: K, run: () => Promise<unknown>): Promise<Events[K][]> {
  const events: Events[K][] = [];
  const listen = (event: unknown) => void events.push(event as Events[K]);
  subscribe(name, listen);
  try {
    await run();
  } finally {
    unsubscribe(name, listen);
  }
  return events;
}

const source = readFileSync(fileURLToPath(import.meta.url), "utf8").split("\n");

/** The mark at the end of a line of this file, by its place. */
function mark(place: string | undefined): string | undefined {
  const [, line] = /hazards\.test\.ts:(\d+):\d+$/.exec(place ?? "") ?? [];
  return /\/\/ <(.*)>$/.exec(source[Number(line) - 1] ?? "")?.[1];
}

/** Whatever takes time is slow. */
const always = { suspect: 0, broken: 60_000 };

const getLock = [
  "SELECT GET_LOCK('hazard:1', 5)",
  "SELECT RELEASE_LOCK('hazard:1')",
  "GET_LOCK hazard:1",
] as const;
/** Takes one, gives it back, and what it is called. */
const byNames: Readonly<Record<string, readonly [string, string, string]>> = {
  postgres: ["SELECT pg_advisory_lock(4711)", "SELECT pg_advisory_unlock(4711)", "bigint 4711"],
  mysql: getLock,
  mariadb: getLock,
};

/** Clients whose statements are not seen. Their servers have one writer at a time, so nothing is to be known of an order. */
const unseen = new Set([
  "PGlite",
  "libsql",
  "libsql, one connection",
  ...["Drizzle", "Kysely", "TypeORM", "MikroORM", "Knex"].map((orm) => `${orm} on SQLite`),
  "Drizzle on PGlite",
]);

const backendsOnce = backends.filter(({ server }) => server !== "pgbouncer" && server !== "postgresOld");

describe.each(backendsOnce)("$name", (backend) => {
  test("a timer under a lock, what was written, and the end", async ({ skip }) => {
    skip(missing(backend) !== undefined, missing(backend));
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database, { hazards: "warn", slow: always });
    try {
      await hf.migrate();
      // There are servers that commit with it, which is told.
      await hf
        .transaction(async (tx) => site.send(tx.client, "CREATE TABLE thing (id int, n int)"))
        .catch((error: unknown) => expect(error).toBeInstanceOf(TransactionAbortedError));
      const body = async () => {
        const write = async (tx: { readonly client: unknown }) => {
          await site.send(tx.client, "UPDATE thing SET n = 4711 WHERE id = 1");
          await sleep(5); // <timer>
        };
        await hf.transaction({ lock: key("thing", 1) }, write); // <transaction>
      };
      let hazards: Events["holdfast:hazard"][] = [];
      const [slow] = await told("holdfast:section:slow", async () => {
        hazards = await told("holdfast:hazard", body);
      });
      expect(hazards.map(({ kind, place: at }) => [kind, mark(at)])).toEqual([["timer", "timer"]]);
      expect(slow).toMatchObject({ level: "suspect", kind: "transaction", hazards: { timer: 1 } });
      expect(slow?.locks).toEqual(["thing:1"]);
      expect(mark(slow?.place)).toBe("transaction");
      expect(slow?.statement ?? "").not.toContain("4711");
      // Where what is sent is seen.
      if (!unseen.has(backend.name)) {
        expect(slow).toMatchObject({ statements: 1, statement: "UPDATE thing SET n = ? WHERE id = ?" });
        expect(slow?.tables).toEqual(["thing"]);
        expect(slow?.slowest).toEqual({
          statement: "UPDATE thing SET n = ? WHERE id = ?",
          durationMs: expect.any(Number),
        });
      }
      // The same outside of the lock, and on purpose.
      const none = await told("holdfast:hazard", async () => {
        await sleep(5);
        await hf.transaction({ lock: key("thing", 1) }, async () => hf.outside(() => sleep(5)));
        await sleep(5);
      });
      expect(none).toEqual([]);
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  });
});

const withNames = backendsOnce.filter(({ name, server }) => byNames[server] && !unseen.has(name));

test.for(withNames)(
  "a lock by name that a statement takes, until it is given back: $name",
  async (backend, { skip }) => {
    skip(missing(backend) !== undefined, missing(backend));
    const byName = byNames[backend.server];
    const [lock, unlock, name] = byName as NonNullable<typeof byName>;
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database, { hazards: "warn", slow: always });
    try {
      await hf.migrate();
      const during = (before: readonly string[], after: readonly string[]) =>
        told("holdfast:hazard", () =>
          hf.transaction(async (tx) => {
            for (const each of before) await site.send(tx.client, each);
            await sleep(5);
            for (const each of after) await site.send(tx.client, each);
          }),
        );
      expect(await during([lock], [unlock])).toMatchObject([{ kind: "timer", locks: [name] }]);
      expect(await during([lock, unlock], [])).toEqual([]);
      expect(await during([lock, lock, unlock], [unlock])).toMatchObject([{ kind: "timer", locks: [name] }]);
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  },
);

describe("on PostgreSQL", () => {
  let database: TestDatabase;
  let pool: Pool;
  let server: http.Server;
  let url: string;
  let http2Server: http2.Http2Server;
  let http2Client: http2.ClientHttp2Session;
  const instances: Holdfast<PoolClient>[] = [];

  beforeAll(async () => {
    if (unavailable("postgres")) return;
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 6 });
    await pool.query("CREATE TABLE purchase (id int PRIMARY KEY, n int); INSERT INTO purchase VALUES (1, 0)");
    await pool.query("CREATE TABLE piece (id int PRIMARY KEY, n int); INSERT INTO piece VALUES (1, 0)");
    await pool.query("CREATE TABLE upload (id serial PRIMARY KEY, user_id text, bytes int)");
    server = http.createServer((_, response) => response.end("paid")).listen(0, "127.0.0.1");
    await new Promise((resolve) => server.once("listening", resolve));
    url = `http://localhost:${(server.address() as AddressInfo).port}/`;
    http2Server = http2.createServer((_, response) => response.end("paid")).listen(0, "127.0.0.1");
    await new Promise((resolve) => http2Server.once("listening", resolve));
    http2Client = http2.connect(`http://127.0.0.1:${(http2Server.address() as AddressInfo).port}`);
    await new Promise((resolve) => http2Client.once("connect", resolve));
  });

  afterAll(async () => {
    server?.close();
    server?.closeAllConnections();
    http2Client?.destroy();
    http2Server?.close();
    for (const each of instances) await each.close();
    await pool?.end();
    await database?.drop();
  });

  const open = (options: HoldfastOptions = {}, from = pool) => {
    const hf = holdfast(fromPg(from), { hazards: "warn", wrongConnection: "off", ...options });
    instances.push(hf);
    return hf;
  };

  test("LOCK TABLE, and what was locked after a savepoint that is rolled back to", async () => {
    const hf = open();
    const during = (...statements: readonly string[]) =>
      told("holdfast:hazard", () =>
        hf.transaction(async ({ client }) => {
          for (const each of statements) await client.query(each);
          await sleep(5);
        }),
      );
    const lock = "LOCK TABLE piece IN SHARE ROW EXCLUSIVE MODE";
    expect(await during(lock)).toMatchObject([{ kind: "timer", locks: ["piece"] }]);
    expect(await during("SAVEPOINT a", lock, "ROLLBACK TO SAVEPOINT a")).toEqual([]);
    const name = "SELECT pg_advisory_xact_lock(hashtext('piece:' || id)) FROM piece";
    expect(await during(name)).toMatchObject([{ locks: ["pg_advisory_xact_lock(…)"] }]);
    expect(await during("SAVEPOINT a", name, "ROLLBACK TO a")).toEqual([]);
  });

  const hazards: Readonly<
    Record<string, readonly [string, (tx: { client: PoolClient }) => Promise<unknown>]>
  > = {
    fetch: [
      "fetch",
      async () => (await fetch(url)).text(), // <fetch>
    ],
    "http.get": [
      "http",
      () =>
        new Promise((resolve) => {
          const request = http.get(url, (response) => response.resume().on("end", resolve)); // <http.get>
          request.on("error", resolve);
        }),
    ],
    "a request by HTTP/2, on a connection that is open": [
      "http",
      () =>
        new Promise((resolve) => {
          const request = http2Client.request({ ":path": "/" }); // <a request by HTTP/2, on a connection that is open>
          request.on("close", resolve).resume().end();
        }),
    ],
    "a connection by TLS": [
      "socket",
      () =>
        new Promise((resolve) => {
          const socket = connectTls((server.address() as AddressInfo).port, "127.0.0.1"); // <a connection by TLS>
          socket.on("error", () => {}).on("close", resolve);
        }),
    ],
    "a socket": [
      "socket",
      () =>
        new Promise((resolve) => {
          const socket = connect((server.address() as AddressInfo).port, "127.0.0.1"); // <a socket>
          socket.on("connect", () => socket.destroy()).on("close", resolve);
        }),
    ],
    DNS: [
      "dns",
      async () => lookup("localhost"), // <DNS>
    ],
    setTimeout: [
      "timer",
      () => new Promise((resolve) => setTimeout(resolve, 5)), // <setTimeout>
    ],
    "promisify(setTimeout)": [
      "timer",
      async () => promisify(setTimeout)(5), // <promisify(setTimeout)>
    ],
    "timers/promises": [
      "timer",
      async () => sleep(5), // <timers/promises>
    ],
    "scheduler.wait": [
      "timer",
      async () => scheduler.wait(5), // <scheduler.wait>
    ],
    "a child process": [
      "process",
      () =>
        new Promise((resolve) => {
          const child = spawn("true"); // <a child process>
          child.on("close", resolve);
        }),
    ],
    "a child process that is waited for": [
      "process",
      async () => spawnSync("true"), // <a child process that is waited for>
    ],
    "a thread": [
      "process",
      () =>
        new Promise((resolve) => {
          const thread = new Worker("", { eval: true }); // <a thread>
          thread.on("exit", resolve);
        }),
    ],
    "a prompt": [
      "prompt",
      async () => {
        const input = new PassThrough();
        const line = createInterface({ input });
        const answer = line.question("Sure? "); // <a prompt>
        input.end("yes\n");
        await answer;
        line.close();
      },
    ],
    "the outer client": [
      "connection",
      async () => pool.query("SELECT 1"), // <the outer client>
    ],
  };

  test.each(Object.entries(hazards))("%s: told once, with its place", async (name, [kind, act]) => {
    const hf = open();
    const lock = key("hazard", name);
    const seen = await told("holdfast:hazard", async () => {
      await act({ client: pool as never });
      await hf.transaction({ lock }, async (tx) => {
        await act(tx);
      });
      await hf.transaction(async (tx) => {
        // No lock is held yet.
        await act(tx);
        await tx.lock(lock);
      });
      await hf.transaction({ lock }, async (tx) => {
        await hf.outside(() => act(tx));
      });
      await act({ client: pool as never });
    });
    expect(seen.map((each) => [each.kind, mark(each.place), each.locks])).toEqual([
      [kind, name, [`hazard:${name}`]],
    ]);
    expect(seen[0]?.transaction).toMatch(/hazards\.test\.ts:\d+:\d+$/);
  });

  test("not without a lock, but with whatever locks: tx.lock, rows, a table, an UPDATE, a fence, a joined transaction", async () => {
    const hf = open({ slow: always });
    await hf.migrate();
    await using lease = await hf.lease(key("leased", 1));
    /** Locks, and then does what it should not. */
    const after = (lock: (tx: Transaction<PoolClient>) => Promise<unknown>) => () =>
      hf.transaction(async (tx) => {
        await lock(tx);
        await sleep(5);
      });
    const ways: Record<string, () => Promise<unknown>> = {
      nothing: after((tx) => tx.client.query("SELECT 1")),
      "tx.lock": after((tx) => tx.lock(key("a", 1))),
      "tx.rows": after((tx) => tx.rows("purchase", [1])),
      "tx.table": after((tx) => tx.table("purchase", "share")),
      lockAll: after((tx) => tx.lockAll([key("b", 1), rows("piece", [1])])),
      update: after((tx) => tx.client.query("UPDATE piece SET n = n + 1 WHERE id = $1", [1])),
      fenced: after((tx) => fenced(tx, lease)),
      "a quota": after((tx) =>
        quota(hf, { name: "watched", limit: 1000, per: "day" }).consume("ada", 1, { tx }),
      ),
      "what is left of it": after((tx) =>
        quota(hf, { name: "watched", limit: 1000, per: "day" }).peek("ada", { tx }),
      ),
      stock: after((tx) => stock(hf, { name: "watched" }).apply([{ sku: "CAP", quantity: 1 }], { tx })),
      join: async () => {
        const client = await pool.connect();
        await client.query("BEGIN");
        await hf.join(client).lock(key("joined", 1));
        await sleep(5);
        await client.query("COMMIT");
        client.release();
        await sleep(5);
      },
    };
    const seen: Record<string, unknown> = {};
    for (const [name, way] of Object.entries(ways)) {
      let found: Events["holdfast:hazard"][] = [];
      const slow = await told(
        "holdfast:section:slow",
        async () => (found = await told("holdfast:hazard", way)),
      );
      seen[name] = [
        found.map(({ kind }) => kind),
        slow.map(({ kind, locks, tables }) => [kind, ...locks, ...tables]),
      ];
    }
    expect(seen).toEqual({
      nothing: [[], []],
      "tx.lock": [["timer"], [["transaction", "a:1"]]],
      "tx.rows": [["timer"], [["transaction", "purchase"]]],
      "tx.table": [["timer"], [["transaction", "purchase"]]],
      lockAll: [["timer"], [["transaction", "b:1", "piece"]]],
      update: [["timer"], [["transaction", "piece"]]],
      fenced: [["timer"], [["transaction", "leased:1"]]],
      "a quota": [["timer"], [["transaction", "quota watched:ada"]]],
      "what is left of it": [[], []],
      stock: [["timer"], [["transaction", expect.stringMatching(/^stock watched:CAP:/)]]],
      join: [["timer"], [["joined", "joined:1"]]],
    });
  });

  test("$lock of Prisma: until its transaction has ended", async () => {
    const adapter = new PrismaPg({ connectionString: database.url, max: 2 });
    const prisma = new PrismaClient({ adapter }).$extends(inPrisma({ hazards: "warn", slow: always }));
    try {
      let seen: Events["holdfast:hazard"][] = [];
      const slow = await told("holdfast:section:slow", async () => {
        seen = await told("holdfast:hazard", async () => {
          await prisma.$transaction(async (tx) => {
            await sleep(5);
            await tx.$lock(key("upload", 1));
            await tx.upload.count();
            await sleep(5); // <under $lock>
          });
          await sleep(5);
        });
      });
      expect(seen.map(({ kind, place }) => [kind, mark(place)])).toEqual([["timer", "under $lock"]]);
      expect(slow).toMatchObject([{ kind: "joined", locks: ["upload:1"], hazards: { timer: 1 } }]);
    } finally {
      await prisma.$disconnect();
    }
  });

  test('"throw": the transaction fails, and is not tried again', async () => {
    const hf = open({ hazards: "throw" });
    let runs = 0;
    const failing = hf.transaction({ lock: key("throws", 1) }, async (tx) => {
      runs++;
      await tx.client.query("UPDATE purchase SET n = 99 WHERE id = 1");
      await (await fetch(url)).text(); // <thrown>
    });
    const error = (await failing.catch((thrown: unknown) => thrown)) as HazardError;
    expect(error).toBeInstanceOf(HazardError);
    expect(error).toMatchObject({ code: "HF_HAZARD", kind: "fetch", retryable: false });
    expect(mark(error.place)).toBe("thrown");
    expect(error.message).toContain("lock throws:1, purchase".replace("lock", "locks"));
    expect(runs).toBe(1);
    const { rows: kept } = await pool.query("SELECT n FROM purchase WHERE id = 1");
    expect(kept[0].n).not.toBe(99);
  });

  test('"warn": once per place', async () => {
    const hf = open({ hazards: "warn" });
    const warnings: Error[] = [];
    const listen = (warning: Error) => void warnings.push(warning);
    process.on("warning", listen);
    try {
      for (let i = 0; i < 3; i++)
        await hf.transaction({ lock: key("warns", i) }, async () => {
          await sleep(5); // <warned>
        });
      await eventually(() => expect(warnings.length).toBeGreaterThan(0));
      await new Promise((resolve) => setImmediate(resolve));
    } finally {
      process.off("warning", listen);
    }
    const ours = warnings.filter((warning) => (warning as { code?: string }).code === "HF_HAZARD");
    expect(ours).toHaveLength(1);
    expect(ours[0]?.message).toMatch(
      /^A timer was waited for while lock warns:0 was held: at .*hazards\.test\.ts:\d+:\d+/,
    );
  });

  test("off: nothing is told", async () => {
    const hf = open({ hazards: "off", slow: false });
    const seen = await told("holdfast:hazard", async () => {
      const ends = await told("holdfast:section:end", () =>
        hf.transaction({ lock: key("off", 1) }, async () => {
          await sleep(5);
        }),
      );
      expect(ends).toEqual([]);
    });
    expect(seen).toEqual([]);
  });

  test('"count": what Node tells is counted, and the rest is not looked at, whoever else watches', async () => {
    const other = open({ hazards: "warn" });
    const hf = open({ hazards: "count", slow: always });
    const [slow] = await told("holdfast:section:slow", async () => {
      await hf.transaction({ lock: key("counted", 1) }, async () => {
        await (await fetch(url)).text();
        await sleep(5);
        await lookup("localhost");
      });
    });
    expect(slow?.hazards).toEqual({ fetch: 1 });
    await other.close();
  });

  test("what libraries do in case of silence is no hazard: a timer that is cleared, or that is a package's", async () => {
    const hf = open();
    const limited = new Pool({ connectionString: database.url, max: 1, query_timeout: 60_000 });
    const other = open({}, limited);
    const seen = await told("holdfast:hazard", async () => {
      await hf.transaction({ lock: key("cleared", 1) }, async (tx) => {
        const timer = setTimeout(() => {}, 60_000);
        await tx.client.query("SELECT 1");
        clearTimeout(timer);
      });
      await other.transaction(
        { lock: key("limited", 1) },
        async (tx) => void (await tx.client.query("SELECT 1")),
      );
    });
    expect(seen).toEqual([]);
    await other.close();
    await limited.end();
  });

  test("what Holdfast does itself is none: connections that it opens, statements that it sends through an ORM", async () => {
    const fresh = new Pool({ connectionString: database.url, max: 3 });
    const hf = open({}, fresh);
    const adapter = new PrismaPg({ connectionString: database.url, max: 2 });
    const prisma = new PrismaClient({ adapter }).$extends(inPrisma({ hazards: "warn", slow: always }));
    await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('ada', 1)");
    const slow: Events["holdfast:section:slow"][] = [];
    const seen = await told("holdfast:hazard", async () => {
      const client = await fresh.connect();
      await client.query("BEGIN");
      await hf.join(client).lock(key("itself", 1));
      // On another connection, which is not there yet.
      expect(await hf.tryLock(key("itself", 1), async () => 1)).toEqual({ acquired: false });
      await client.query("COMMIT");
      client.release();
      const rowsOfPrisma = () =>
        prisma.$exact({ lock: key("itself", 2) }, async (tx) => {
          await tx.upload.findManyForUpdate();
          await tx.upload.count();
        });
      slow.push(...(await told("holdfast:section:slow", rowsOfPrisma)));
    });
    expect(seen).toEqual([]);
    // What is locked by the client's own methods is a section of its own, inside.
    expect(slow.map(({ locks, tables }) => [...locks, ...tables].join()).toSorted()).toEqual([
      "itself:2",
      "upload",
    ]);
    await hf.close();
    await fresh.end();
    await prisma.$disconnect();
  });

  test("a pool that has no connection left for the second one", async () => {
    const small = new Pool({ connectionString: database.url, max: 2 });
    const hf = open({}, small);
    const seen = await told("holdfast:hazard", async () => {
      const other = await small.connect();
      await hf.transaction({ lock: key("small", 1) }, async () => {
        const second = hf.transaction({ separate: true }, async () => {});
        other.release();
        await second;
      });
      // Now there is one.
      await hf.transaction({ lock: key("small", 1) }, async () =>
        hf.transaction({ separate: true }, async () => {}),
      );
    });
    expect(seen.map(({ kind, locks }) => [kind, locks])).toEqual([["pool", ["small:1"]]]);
    await hf.close();
    await small.end();
  });

  test("a forgotten await: a statement after the body has returned", async () => {
    const hf = open();
    const over = Promise.withResolvers<void>();
    let late: Promise<unknown> | undefined;
    const seen = await told("holdfast:hazard", async () => {
      await hf.transaction({ lock: key("late", 1) }, async (tx) => {
        const write = async () => {
          await over.promise;
          await tx.client.query("UPDATE purchase SET n = 7 WHERE id = 1"); // <late>
        };
        late = write().catch((error: unknown) => error);
        await Promise.resolve();
      });
      over.resolve();
      expect(await late).toMatchObject({ code: "HF_TRANSACTION_OVER" });
    });
    expect(seen.map(({ kind, place }) => [kind, mark(place)])).toEqual([["late", "late"]]);
  });

  test("but not what a body sends whose transaction was ended meanwhile", async () => {
    const hf = open();
    const [begun, over] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const stop = new AbortController();
    const reason = new Error("no longer wanted");
    let late: Promise<unknown> | undefined;
    const seen = await told("holdfast:hazard", async () => {
      const gone = hf.transaction({ lock: key("late", 2), signal: stop.signal }, (tx) => {
        const write = async () => {
          await over.promise;
          await tx.client.query("UPDATE purchase SET n = 7 WHERE id = 1");
        };
        late = write().catch((error: unknown) => error);
        begun.resolve();
        return late;
      });
      await begun.promise;
      stop.abort(reason);
      await expect(gone).rejects.toBe(reason);
      over.resolve();
      expect(await late).toMatchObject({ code: expect.stringMatching(/^HF_/) });
    });
    expect(seen.filter(({ kind }) => kind === "late")).toEqual([]);
  });

  test("a hazard in a transaction that is apart counts for the locks around it", async () => {
    const hf = open();
    const seen = await told("holdfast:hazard", () =>
      hf.transaction({ lock: key("around", 1) }, () =>
        hf.transaction({ separate: true }, async () => {
          await sleep(5);
        }),
      ),
    );
    expect(seen.map(({ kind, locks }) => [kind, locks])).toEqual([["timer", ["around:1"]]]);
  });

  test("slow: suspect and broken, with what was done meanwhile, and no values", async () => {
    const hf = open({ slow: { suspect: 1, broken: 50 } });
    const run = (ms: number) =>
      hf.transaction({ lock: key("slow", ms) }, async (tx) => {
        await tx.client.query("UPDATE piece SET n = n + 1 WHERE id = $1", [1]);
        await tx.client.query(`SELECT pg_sleep(${ms / 1000}), 'secret' AS "private name", 12345`);
        await tx.query(sql`SELECT n FROM piece WHERE id = ${1}`);
      });
    const [suspect] = await told("holdfast:section:slow", () => run(2));
    // Longer than a busy machine takes for the other statements.
    const [broken] = await told("holdfast:section:slow", () => run(3000));
    expect(suspect?.level).toMatch(/suspect|broken/);
    expect(broken).toMatchObject({
      level: "broken",
      locks: ["slow:3000"],
      tables: ["piece"],
      statements: 3,
      statement: "SELECT n FROM piece WHERE id = ?",
      slowest: { statement: 'SELECT pg_sleep(?), ? AS "private name", ?', durationMs: expect.any(Number) },
      hazards: {},
    });
    expect(
      await told("holdfast:section:slow", () =>
        open({ slow: false }).transaction({ lock: key("s", 1) }, async () => {}),
      ),
    ).toEqual([]);
  });
});

test("what is wrong in the options is refused", () => {
  const make = (options: object) => () => holdfast({ engine: { begin() {} }, traits: {} } as never, options);
  expect(make({ hazards: "loud" })).toThrow(/hazards must be one of "warn", "throw", "count", "off"/);
  expect(make({ slow: { suspect: 100, broken: 10 } })).toThrow(/slow\.broken must not be less/);
  expect(make({ slow: { late: 1 } })).toThrow(/no option `late`/);
  expect(make({ orderFile: 7 })).toThrow(/orderFile must be the name of a file/);
});
