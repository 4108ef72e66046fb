/** What looks like a green run, and in which nothing was tested, fails with its reason. */
import { once } from "node:events";
import { mkdtemp, rm } from "node:fs/promises";
import { type Server, createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import Sqlite from "better-sqlite3";
import {
  RaceError,
  type Scenario,
  type ThreadScenario,
  expectNoRace,
  explore,
  inThread,
} from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type SqlClient, type Statements, openSql, sqlServers } from "./harness/sql.ts";

const once1: Scenario["invariant"] = (results) =>
  expect(Object.values(results).filter((each) => each.status === "fulfilled" && each.value).length).toBe(1);

describe.each(sqlServers)("on %s", (name) => {
  const why = unavailable(name);
  let database: TestDatabase;
  let sql: SqlClient;
  let server: Server;
  let origin: string;

  /** Check, then write. */
  async function buy(from: Statements): Promise<boolean> {
    const qty = await from.number("SELECT qty FROM stock");
    if (qty < 1) return false;
    await from.change(`UPDATE stock SET qty = ${qty - 1}`);
    return true;
  }

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(name);
    sql = openSql(name, database.url);
    await sql.script(
      "CREATE TABLE stock (qty int NOT NULL)",
      "INSERT INTO stock VALUES (1)",
      "CREATE TABLE account (id int PRIMARY KEY, n int)",
      "INSERT INTO account VALUES (1, 0), (2, 0)",
    );
    server = createServer((request, response) => {
      const parts: Buffer[] = [];
      request.on("data", (part: Buffer) => parts.push(part));
      // The body arrives in the context of the connection, not of the request.
      request.on("end", () => {
        const answer = (bought: boolean) =>
          response.end(JSON.stringify({ bought, bytes: Buffer.concat(parts).length }));
        void (request.url === "/exact" ? atomic() : buy(sql)).then(answer);
      });
    });
    await once(server.listen(0, "127.0.0.1"), "listening");
    origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    server?.close();
    server?.closeAllConnections();
    await sql?.end();
    await database?.drop();
  });

  const atomic = async () => (await sql.change("UPDATE stock SET qty = qty - 1 WHERE qty >= 1")) === 1;
  const reset = () => sql.script("UPDATE stock SET qty = 1");
  const twice = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
    explore("twice", { db: sql.db, reset, actors: { A: act, B: act }, invariant: once1, ...more });

  test("every actor throws", async () => {
    const act = async () => {
      await sql.rows("SELECT qty FROM stok");
    };
    await expect(twice(act, { invariant: () => {} })).rejects.toThrow(
      /every actor threw in every run.*A: .*stok.* (does not|doesn't) exist/,
    );
  });

  test("the invariant returns false", async () => {
    const invariant = async () => (await sql.number("SELECT qty FROM stock")) === 7;
    const report = await twice(() => buy(sql), { invariant });
    expect(report).toMatchObject({ ok: false, error: { message: "the invariant returned false" } });
  });

  test.for(["GET", "POST"])(
    "requests to a server in this process are the actor's who sent them: %s",
    async (method) => {
      const ask = (path: string) => async () => {
        const answer = await fetch(`${origin}${path}`, {
          method,
          ...(method === "POST" ? { body: "x".repeat(200_000) } : {}),
        });
        return ((await answer.json()) as { bought: boolean }).bought;
      };
      expect(await twice(ask("/naive"))).toMatchObject({ ok: false, preemptions: 1, anomaly: "lost update" });
      expect(await twice(ask("/exact"))).toMatchObject({ ok: true, coverage: "exhaustive" });
    },
  );

  test("no statement is seen", async () => {
    await expect(twice(async () => true, { invariant: () => {} })).rejects.toThrow(
      /no statement of A, B was seen/,
    );
    await expect(
      explore("one", {
        db: sql.db,
        reset,
        actors: { A: atomic, B: async () => true },
        invariant: () => {},
      }),
    ).rejects.toThrow(/no statement of B was seen/);
  });

  test("the pool is one too small", async () => {
    const small = openSql(name, database.url, 2);
    const act = () => small.transaction(buy);
    try {
      await expect(twice(act, { db: small.db })).rejects.toThrow(
        /never had a statement.*too few connections/,
      );
    } finally {
      await small.end();
    }
  });

  test("a timer keeps them apart", async () => {
    await expect(
      explore("apart", {
        db: sql.db,
        reset,
        actors: { A: atomic, B: () => sleep(1500).then(atomic) },
        invariant: once1,
      }),
    ).rejects.toThrow(/keeps them apart/);
  });

  test("too little time for one switch", async () => {
    const many = async () => {
      for (let i = 0; i < 12; i++) await sql.change(`UPDATE stock SET qty = qty + ${i}`);
    };
    await expect(twice(many, { maxMs: 1, invariant: () => {} })).rejects.toThrow(
      /(?:not all orders with one switch between each two actors were tried|no run came to its end).*`maxMs`/,
    );
  });

  test("too little time for a single run, which no coverage makes enough", async () => {
    const onProgress = () => void Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 2500);
    await expect(twice(atomic, { maxMs: 1, minCoverage: 0, onProgress })).rejects.toThrow(
      /in 2000 ms no run came to its end.*`maxMs`/,
    );
  });

  test("less than was asked for, and what that is", async () => {
    const act = async () => {
      for (let i = 0; i < 6; i++) await sql.change("UPDATE stock SET qty = qty + 1");
    };
    const invariant = () => {};
    await expect(twice(act, { invariant, maxMs: 2000, minCoverage: "exhaustive" })).rejects.toThrow(
      /not all orders|no run came to its end/,
    );
    await expect(twice(act, { invariant, minCoverage: -1 })).rejects.toThrow(/minCoverage/);
    expect(await twice(atomic, { minCoverage: "exhaustive" })).toMatchObject({ ok: true });
  });

  test("what was tried, deadlocks and errors are said of a green one too", async () => {
    const move = (a: number, b: number) => () =>
      sql.transaction(async (tx) => {
        await tx.change(`UPDATE account SET n = n + 1 WHERE id = ${a}`);
        await tx.change(`UPDATE account SET n = n + 1 WHERE id = ${b}`);
      });
    const said: string[] = [];
    const report = await expectNoRace(sql.db, [move(1, 2), move(2, 1)], () => {}, {
      reset: async () => {},
      name: "moves",
      maxMs: 30_000,
      report: (text) => said.push(text),
    });
    expect(report.deadlocks).toBeGreaterThan(0);
    expect(said).toEqual([report.text]);
    expect(report.text).toMatch(
      /✓ moves: \d+ runs, exhaustive; \d+ runs with a deadlock; .* threw in some: [dD]eadlock/,
    );
    await expect(
      expectNoRace(sql.db, [() => buy(sql), () => buy(sql)], once1, {
        reset,
        report: (text) => said.push(text),
      }),
    ).rejects.toThrow(RaceError);
    expect(said.length).toBe(1);
  });
});

/** Actors in threads: there is no pool that is too small, and no request to this process. */
describe("on SQLite", () => {
  let folder: string;
  let db: Sqlite.Database;

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-nothing-"));
    db = new Sqlite(join(folder, "nothing.db"));
    db.exec("PRAGMA journal_mode = WAL; CREATE TABLE stock (qty int NOT NULL); INSERT INTO stock VALUES (1)");
  });
  afterAll(async () => {
    db?.close();
    await rm(folder, { recursive: true });
  });

  const module = new URL("./races/sqlite/nothing.ts", import.meta.url);
  const actor = (name: string, ...args: unknown[]) => inThread(module, name, db.name, ...args);
  const twice = (name: string, more: Partial<ThreadScenario> = {}) =>
    explore("twice", {
      reset: () => db.exec("UPDATE stock SET qty = 1"),
      actors: { A: actor(name), B: actor(name) },
      invariant: once1,
      ...more,
    });

  test("every actor throws", async () => {
    await expect(twice("refused", { invariant: () => {} })).rejects.toThrow(
      /every actor threw in every run.*A: NOT NULL constraint failed: stock.qty/,
    );
    // Before it has sent anything.
    await expect(twice("misspelt", { invariant: () => {} })).rejects.toThrow(
      /A sends no statement that can be held back: it threw no such table: stok/,
    );
  });

  test("the invariant returns false", async () => {
    const report = await twice("buy", {
      invariant: () => db.prepare("SELECT qty FROM stock").pluck().get() === 7,
    });
    expect(report).toMatchObject({ ok: false, error: { message: "the invariant returned false" } });
  });

  test("no statement is seen", async () => {
    const actors = { A: actor("buy"), B: actor("idle") };
    await expect(twice("", { actors, invariant: () => {} })).rejects.toThrow(/B sends no statement/);
  });

  test("a timer keeps them apart", async () => {
    const actors = { A: actor("atomic"), B: actor("late") };
    await expect(twice("", { actors })).rejects.toThrow(/keeps them apart/);
  });

  test("too little time for one switch, and less than was asked for", async () => {
    await expect(twice("many", { maxMs: 1, invariant: () => {} })).rejects.toThrow(
      /(?:not all orders with one switch between each two actors were tried|no run came to its end).*`maxMs`/,
    );
    await expect(
      twice("many", { invariant: () => {}, maxMs: 2000, minCoverage: "exhaustive" }),
    ).rejects.toThrow(/not all orders|no run came to its end/);
    expect(await twice("atomic", { minCoverage: "exhaustive" })).toMatchObject({ ok: true });
  });
});
