/** Races of applications on SQLite, between processes: each actor in a thread of its own. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { createClient } from "@libsql/client";
import Sqlite from "better-sqlite3";
import { UsageError } from "holdfast";
import {
  type Invariant,
  RaceError,
  type Results,
  type ThreadScenario,
  expectNoRace,
  explore,
  inThread,
} from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";

const long = process.env["HOLDFAST_LONG"] === "1";

/** Whoever looks from outside: with the actors' own library, since two in one process do not see each other's locks. */
interface Onlooker {
  run(script: string): Promise<unknown>;
  rows(query: string): Promise<Record<string, unknown>[]>;
  close(): unknown;
}

const onlookers = {
  "better-sqlite3"(file: string): Onlooker {
    const db = new Sqlite(file);
    return {
      run: async (script) => db.exec(script),
      rows: async (query) => db.prepare<[], Record<string, unknown>>(query).all(),
      close: () => db.close(),
    };
  },
  "node:sqlite"(file: string): Onlooker {
    const db = new DatabaseSync(file, { timeout: 5000 });
    return {
      run: async (script) => db.exec(script),
      rows: async (query) => db.prepare(query).all(),
      close: () => db.close(),
    };
  },
  libsql(file: string): Onlooker {
    const db = createClient({ url: `file:${file}`, timeout: 5000 });
    return {
      run: (script) => db.executeMultiple(script),
      rows: async (query) => (await db.execute(query)).rows,
      close: () => db.close(),
    };
  },
};

/** The name of an exported function, and what it gets besides the file. */
type Actor = readonly [name: string, ...args: unknown[]];
type Pair = readonly [Actor, Actor];

interface Flow {
  readonly title: string;
  readonly module: string;
  readonly library: keyof typeof onlookers;
  readonly tables: string;
  readonly rows?: string;
  readonly naive: Pair;
  readonly fixed: readonly Pair[];
  /** More orders than all with three switches. */
  readonly large?: readonly string[];
  /** Its queries are sent where the stack does not show who asked. */
  readonly placeless?: boolean;
  invariant(db: Onlooker, results: Results): Promise<void>;
}

const twice = (name: string, ...args: unknown[]): Pair => [
  [name, ...args],
  [name, ...args],
];

const number = async (db: Onlooker, query: string) =>
  Number(Object.values((await db.rows(query))[0] ?? {})[0]);
const accepted = (results: Results) =>
  Object.values(results).filter(({ status }) => status === "fulfilled").length;

const flows: readonly Flow[] = [
  {
    title: "an upload within a quota: better-sqlite3",
    module: "quota",
    library: "better-sqlite3",
    tables: "CREATE TABLE upload (id integer PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL)",
    naive: twice("naive", "u", 60),
    fixed: [twice("deferred", "u", 60), twice("immediate", "u", 60), twice("byHand", "u", 60)],
    async invariant(db) {
      expect(await number(db, "SELECT coalesce(sum(bytes), 0) FROM upload")).toBeLessThanOrEqual(100);
    },
  },
  {
    title: "a voucher that is used twice: node:sqlite",
    module: "voucher",
    library: "node:sqlite",
    tables: `CREATE TABLE voucher (code text PRIMARY KEY, discount int NOT NULL, used_by int);
      CREATE TABLE purchase (id int PRIMARY KEY, code text NOT NULL)`,
    rows: "INSERT INTO voucher VALUES ('SPRING', 10, NULL)",
    large: ["deferred"],
    naive: [
      ["naive", 1, "SPRING"],
      ["naive", 2, "SPRING"],
    ],
    fixed: (["deferred", "conditional", "impatient"] as const).map((name) => [
      [name, 1, "SPRING"],
      [name, 2, "SPRING"],
    ]),
    async invariant(db, results) {
      expect(await number(db, "SELECT count(*) FROM purchase")).toBe(1);
      expect(accepted(results)).toBe(1);
    },
  },
  {
    title: "the last one in stock: @libsql/client",
    module: "oversell",
    library: "libsql",
    tables: `CREATE TABLE stock (item text PRIMARY KEY, qty int NOT NULL);
      CREATE TABLE sale (id integer PRIMARY KEY, item text NOT NULL)`,
    rows: "INSERT INTO stock VALUES ('pen', 1)",
    naive: twice("naive", "pen"),
    // Not `deferred`: after SQLITE_BUSY_SNAPSHOT a connection of libsql goes on to read what was there before.
    fixed: [twice("guarded", "pen")],
    async invariant(db) {
      expect(await number(db, "SELECT count(*) FROM sale")).toBe(1);
    },
  },
  {
    title: "one account for an address: Kysely",
    module: "sign-up",
    library: "better-sqlite3",
    tables: `CREATE TABLE account (id integer PRIMARY KEY, email text NOT NULL);
      CREATE TABLE member (id integer PRIMARY KEY, email text NOT NULL UNIQUE)`,
    naive: twice("naive", "ada@example.org"),
    fixed: [twice("unique", "ada@example.org")],
    async invariant(db, results) {
      expect(await number(db, "SELECT (SELECT count(*) FROM account) + (SELECT count(*) FROM member)")).toBe(
        1,
      );
      expect(accepted(results)).toBe(1);
    },
  },
  {
    title: "one cart for each: Knex",
    module: "two-carts",
    library: "better-sqlite3",
    tables: `CREATE TABLE cart (id integer PRIMARY KEY, owner text NOT NULL);
      CREATE TABLE own_cart (id integer PRIMARY KEY, owner text NOT NULL UNIQUE);
      CREATE TABLE cart_item (cart int NOT NULL, item text NOT NULL)`,
    large: ["unique"],
    naive: [
      ["naive", "ada", "pen"],
      ["naive", "ada", "ink"],
    ],
    fixed: [
      [
        ["unique", "ada", "pen"],
        ["unique", "ada", "ink"],
      ],
    ],
    async invariant(db) {
      expect(await number(db, "SELECT count(DISTINCT cart) FROM cart_item")).toBe(1);
    },
  },
  {
    title: "a room that is booked twice: TypeORM",
    module: "double-booking",
    library: "better-sqlite3",
    tables:
      "CREATE TABLE booking (id integer PRIMARY KEY AUTOINCREMENT, room text NOT NULL, first int NOT NULL, last int NOT NULL)",
    naive: [
      ["naive", "attic", 1, 5],
      ["naive", "attic", 4, 8],
    ],
    fixed: (["deferred", "immediate"] as const).map((name) => [
      [name, "attic", 1, 5],
      [name, "attic", 4, 8],
    ]),
    async invariant(db) {
      expect(await number(db, "SELECT count(*) FROM booking")).toBe(1);
    },
  },
  {
    title: "a cart as one JSON text: Drizzle",
    placeless: true,
    module: "cart-blob",
    library: "better-sqlite3",
    tables: `CREATE TABLE blob_cart (token text PRIMARY KEY, items text NOT NULL);
      CREATE TABLE blob_cart_line (token text NOT NULL, item text NOT NULL)`,
    rows: "INSERT INTO blob_cart VALUES ('t', '[]')",
    naive: [
      ["naive", "t", "pen"],
      ["naive", "t", "ink"],
    ],
    fixed: (["rowEach", "immediate"] as const).map((name) => [
      [name, "t", "pen"],
      [name, "t", "ink"],
    ]),
    async invariant(db) {
      const inText = await number(db, "SELECT json_array_length(items) FROM blob_cart");
      expect(inText + (await number(db, "SELECT count(*) FROM blob_cart_line"))).toBe(2);
    },
  },
  {
    title: "a payment that is confirmed from two sides: Kysely",
    module: "webhook",
    library: "better-sqlite3",
    tables: `CREATE TABLE payment (id int PRIMARY KEY, status text NOT NULL);
      CREATE TABLE receipt (id integer PRIMARY KEY, payment int NOT NULL, by text NOT NULL)`,
    rows: "INSERT INTO payment VALUES (7, 'pending')",
    naive: [
      ["naiveWebhook", 7],
      ["naiveReturn", 7],
    ],
    fixed: [
      [
        ["webhook", 7],
        ["customerReturn", 7],
      ],
    ],
    async invariant(db) {
      expect(await number(db, "SELECT count(*) FROM receipt")).toBe(1);
    },
  },
  {
    title: "an item is added while the order is finalized: better-sqlite3, Holdfast",
    module: "finalize",
    library: "better-sqlite3",
    tables: `CREATE TABLE purchase_order (id int PRIMARY KEY, status text NOT NULL, total int);
      CREATE TABLE order_item (order_id int NOT NULL, price int NOT NULL)`,
    rows: "INSERT INTO purchase_order VALUES (1, 'open', NULL)",
    naive: [
      ["naiveAdd", 1, 30],
      ["naiveFinalize", 1],
    ],
    fixed: [
      [
        ["add", 1, 30],
        ["finalize", 1],
      ],
    ],
    async invariant(db) {
      const [order] = await db.rows("SELECT total FROM purchase_order");
      expect(order?.["total"]).toBe(await number(db, "SELECT coalesce(sum(price), 0) FROM order_item"));
    },
  },
  {
    title: "store credit is checked before its transaction: node:sqlite",
    module: "shop",
    library: "node:sqlite",
    tables: `CREATE TABLE store_credit (amount int NOT NULL, used int NOT NULL);
      CREATE TABLE credit_payment (id int PRIMARY KEY, amount int NOT NULL)`,
    rows: "INSERT INTO store_credit VALUES (50, 0)",
    naive: [
      ["payNaively", 1, 40],
      ["payNaively", 2, 30],
    ],
    fixed: [
      [
        ["payExactly", 1, 40],
        ["payExactly", 2, 30],
      ],
    ],
    async invariant(db) {
      expect(await number(db, "SELECT used FROM store_credit")).toBeLessThanOrEqual(50);
    },
  },
  {
    title: "a cart is edited during checkout: node:sqlite",
    module: "shop",
    library: "node:sqlite",
    tables: `CREATE TABLE cart_item (price int NOT NULL);
      CREATE TABLE checkout (total int NOT NULL, items int NOT NULL)`,
    rows: "INSERT INTO cart_item VALUES (10)",
    naive: [["checkOutNaively"], ["addItem", 10]],
    fixed: [[["checkOut"], ["addItem", 10]]],
    async invariant(db) {
      expect(await number(db, "SELECT total - 10 * items FROM checkout")).toBe(0);
    },
  },
  {
    title: "a lock runs out before the work is done: node:sqlite",
    module: "shop",
    library: "node:sqlite",
    tables: `CREATE TABLE lease (name text PRIMARY KEY, owner text NOT NULL);
      CREATE TABLE status (fetched_by text NOT NULL)`,
    naive: [
      ["fetchNaively", "A"],
      ["fetchNaively", "B"],
    ],
    fixed: [
      [
        ["fetchFenced", "A"],
        ["fetchFenced", "B"],
      ],
    ],
    async invariant(db) {
      expect(await number(db, "SELECT count(*) FROM status")).toBe(1);
    },
  },
  {
    title: "a lock is keyed on the session: node:sqlite",
    module: "shop",
    library: "node:sqlite",
    tables: `CREATE TABLE held (name text PRIMARY KEY);
      CREATE TABLE customer_order (total int NOT NULL)`,
    rows: "INSERT INTO customer_order VALUES (0)",
    naive: [
      ["addForSession", "phone", 5],
      ["addForSession", "work", 5],
    ],
    fixed: [
      [
        ["addForCustomer", "phone", 5],
        ["addForCustomer", "work", 5],
      ],
    ],
    async invariant(db, results) {
      expect(await number(db, "SELECT total FROM customer_order")).toBe(5 * accepted(results));
    },
  },
];

/** Whose threads start quickly. */
const light = ["quota", "voucher", "oversell", "shop"];

const message = (error: unknown) => (error as Error).message;

const moduleOf = (name: string) => new URL(`./races/sqlite/${name}.ts`, import.meta.url);

let folder: string;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "holdfast-races-"));
  // A hundred threads load the same few modules: this takes a third of the time off.
  process.env["NODE_COMPILE_CACHE"] = join(folder, "compiled");
});

afterAll(() => rm(folder, { recursive: true, force: true }));

describe.each(flows)("$title", (flow) => {
  let file: string;
  let db: Onlooker;

  beforeAll(async () => {
    file = join(folder, `${flow.module}.db`);
    db = onlookers[flow.library](file);
    await db.run(`PRAGMA journal_mode = WAL; ${flow.tables}`);
    const tables = await db.rows(
      "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'",
    );
    empty = tables.map(({ name }) => `DELETE FROM ${String(name)}`).join("; ");
    return () => db.close();
  });

  let empty = "";
  const run = ([a, b]: Pair, options: Partial<ThreadScenario> = {}) => {
    const module = moduleOf(flow.module);
    const actor = ([name, ...args]: Actor) => inThread(module, name, file, ...args);
    return explore(flow.title, {
      reset: () => db.run(`BEGIN IMMEDIATE; ${empty}; ${flow.rows ?? "SELECT 1"}; COMMIT`),
      actors: { A: actor(a), B: actor(b) },
      invariant: (results) => flow.invariant(db, results),
      ...options,
    });
  };

  test("is found", async () => {
    const report = await run(flow.naive);
    expect(report.text).toContain("Replay:");
    expect({ ok: report.ok, preemptions: report.preemptions }).toEqual({ ok: false, preemptions: 1 });
    if (!flow.placeless)
      expect(report.turns?.filter(({ place }) => !place?.includes(`${flow.module}.ts`))).toEqual([]);
    // What it found can be had again.
    for (let i = 0; i < (long || light.includes(flow.module) ? 5 : 1); i++)
      expect(await run(flow.naive, { replay: report.replay as string })).toMatchObject({
        ok: false,
        runs: 1,
      });
  });

  // One flow tells: each takes two threads of its own.
  test.each([flow].filter(({ module }) => module === "quota"))(
    "without a switch, it is said what was never interleaved",
    async ({ naive }) => {
      const report = await run(naive, { preemptions: 0, invariant: () => {} });
      expect(report).toMatchObject({ ok: true, coverage: { bounded: 0 } });
      expect(report.unexplored).toContainEqual(
        expect.objectContaining({
          table: expect.stringMatching(/^\w+$/),
          statements: [expect.objectContaining({ actor: "A" }), expect.objectContaining({ actor: "B" })],
        }),
      );
    },
  );

  test.each(flow.fixed.map((pair) => [pair[0][0], pair] as const))("is not there: %s", async (name, pair) => {
    const large = flow.large?.includes(name);
    const report = await run(pair, large ? { maxMs: 3000, minCoverage: 0 } : {});
    expect(report.text).toContain("✓");
    if (!large) expect(report.coverage).toBe("exhaustive");
  });
});

describe("locks", () => {
  let file: string;
  let db: Onlooker;
  const module = moduleOf("quota");

  const open = async (mode: "WAL" | "DELETE") => {
    file = join(folder, `locks-${mode}.db`);
    db = onlookers["better-sqlite3"](file);
    await db.run(
      `PRAGMA journal_mode = ${mode}; CREATE TABLE upload (id integer PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL)`,
    );
    return () => db.close();
  };
  const scenario = (name: string, invariant: Invariant = () => {}) => ({
    reset: () => db.run("DELETE FROM upload"),
    actors: { A: inThread(module, name, file, "u", 60), B: inThread(module, name, file, "u", 60) },
    invariant,
  });
  const fits = async () =>
    expect(await number(db, "SELECT coalesce(sum(bytes), 0) FROM upload")).toBeLessThanOrEqual(100);

  describe("with a write-ahead log", () => {
    beforeAll(() => open("WAL"));

    test("who would be the second writer waits for the first", async () => {
      const { turns } = await explore("waits", {
        ...scenario("immediate", () => {
          throw new Error("show me");
        }),
        replay: "A2BA2B2",
      });
      expect(
        turns?.map(({ actor, statement, waitsFor }) => [actor, statement.split(" ")[0], ...waitsFor]),
      ).toEqual([
        ["A", "BEGIN"],
        ["A", "SELECT"],
        ["B", "BEGIN", "A"],
        ["A", "INSERT"],
        ["A", "COMMIT"],
        ["B", "SELECT"],
        ["B", "ROLLBACK"],
      ]);
      expect(turns?.map(({ error }) => error)).toEqual(turns?.map(() => undefined));
    });

    test("who has read, and would write, does not wait: it is told at once", async () => {
      const codes = new Set<unknown>();
      await explore(
        "deferred",
        scenario("deferred", async (results) => {
          for (const result of Object.values(results))
            if (result.status === "rejected") codes.add((result.reason as { code?: unknown }).code);
          await fits();
        }),
      );
      expect(codes).toEqual(new Set(["SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT", undefined]));
    });

    test("three at a time", async () => {
      const one = scenario("immediate", fits);
      const report = await explore("three", {
        ...one,
        actors: { ...one.actors, C: inThread(module, "immediate", file, "u", 60) },
        preemptions: 1,
      });
      expect(report.text).toContain("✓");
    });
  });

  describe("with a rollback journal", () => {
    beforeAll(() => open("DELETE"));

    test.each(["immediate", "deferred"])("%s", async (name) => {
      const report = await explore(name, scenario(name, fits));
      expect(report).toMatchObject({ ok: true, coverage: "exhaustive" });
    });

    test("a reader is in the way of COMMIT", async () => {
      const { turns } = await explore("commit", {
        ...scenario("deferred", () => {
          throw new Error("show me");
        }),
        // A has read; B reads, writes and would commit; A would write.
        replay: "A2B4A2",
      });
      expect(
        turns?.map(({ actor, statement, waitsFor, error }) => [
          actor,
          statement.split(" ")[0],
          waitsFor,
          error,
        ]),
      ).toEqual([
        ["A", "BEGIN", [], undefined],
        ["A", "SELECT", [], undefined],
        ["B", "BEGIN", [], undefined],
        ["B", "SELECT", [], undefined],
        ["B", "INSERT", [], undefined],
        ["B", "COMMIT", ["A"], undefined],
        ["A", "INSERT", [], "database is locked"],
        ["A", "ROLLBACK", [], undefined],
      ]);
    });
  });

  describe("of two files", () => {
    const files: string[] = [];
    const dbs: Onlooker[] = [];

    beforeAll(async () => {
      for (const name of ["north", "south"]) {
        const path = join(folder, `${name}.db`);
        const opened = onlookers["better-sqlite3"](path);
        await opened.run(
          "PRAGMA journal_mode = WAL; CREATE TABLE warehouse (qty int); INSERT INTO warehouse VALUES (5)",
        );
        files.push(path);
        dbs.push(opened);
      }
      return () => dbs.map((each) => each.close());
    });

    const run = (name: string, replay?: string) =>
      explore(name, {
        reset: () => Promise.all(dbs.map((each) => each.run("UPDATE warehouse SET qty = 5"))),
        actors: {
          A: inThread(moduleOf("two-files"), name, ...files),
          B: inThread(moduleOf("two-files"), name, ...files.toReversed()),
        },
        invariant: (results) => expect(accepted(results)).toBe(2),
        ...(replay === undefined ? {} : { replay }),
      });

    test("each waits for the other, until one has waited too long", async () => {
      const report = await run("naive");
      expect(report).toMatchObject({ ok: false, anomaly: "deadlock" });
      expect(report.replay).toMatch(/![AB]$/);
      for (const victim of ["A", "B"]) {
        const again = await run("naive", `AB2A!${victim}`);
        expect(again.text).toContain(`${victim} threw: database is locked`);
      }
    });

    test("in the same order nobody has to", async () => {
      expect(await run("inOrder")).toMatchObject({ ok: true, coverage: "exhaustive" });
    });
  });
});

describe("what else clients do", () => {
  let file: string;
  let db: Onlooker;
  let seen: Results[] = [];

  beforeAll(async () => {
    file = join(folder, "odds.db");
    db = onlookers["better-sqlite3"](file);
    await db.run("PRAGMA journal_mode = WAL; CREATE TABLE entry (name text NOT NULL)");
    return () => db.close();
  });

  beforeEach(() => void (seen = []));

  const odd = (name: string, ...args: unknown[]) => inThread(moduleOf("odds"), name, ...args);
  const run = (a: string, b: string, options: Partial<ThreadScenario> = {}) =>
    explore(`${a} and ${b}`, {
      reset: () => db.run("DELETE FROM entry; INSERT INTO entry VALUES ('x'), ('y'), ('z')"),
      actors: { A: odd(a, file), B: odd(b, file) },
      invariant: (results) => void seen.push(results),
      ...options,
    });
  const show: Partial<ThreadScenario> = {
    invariant() {
      throw new Error("show me");
    },
  };

  test("their timeouts are as they set them", async () => {
    await run("timeouts", "script", { maxMs: 3000, minCoverage: 0 });
    const value = [1234, 77, [{ timeout: 77 }]];
    expect(new Set(seen.map(({ A }) => JSON.stringify(A)))).toEqual(
      new Set([JSON.stringify({ status: "fulfilled", value })]),
    );
  });

  test("rows that are read one by one, a script, and a transaction that is left open", async () => {
    const { turns } = await run("rowByRow", "script", { ...show, replay: "AB3A" });
    expect(turns?.map(({ statement }) => statement)).toEqual([
      "SELECT name FROM entry ORDER BY name",
      "BEGIN;",
      "-- not yet the writer; that comes INSERT INTO entry VALUES ('a; b');",
      "COMMIT;",
      "INSERT INTO entry VALUES ('row by row')",
    ]);
    await run("leavesOpen", "rowByRow", { maxMs: 2000, minCoverage: 0 });
    expect(seen.map(({ B }) => B?.status)).not.toContain("rejected");
    expect(await number(db, "SELECT count(*) FROM entry WHERE name = 'never'")).toBe(0);
  });

  test("errors and values come as far as they can", async () => {
    await run("refused", "notForOthers");
    const [{ A, B } = {}] = seen;
    const { reason } = A as PromiseRejectedResult;
    expect(reason).toBeInstanceOf(Error);
    expect(reason).toMatchObject({
      name: "SqliteError",
      message: "NOT NULL constraint failed: entry.name",
      code: "SQLITE_CONSTRAINT_NOTNULL",
      stack: expect.stringContaining("odds.ts"),
    });
    expect(B).toEqual({ status: "fulfilled", value: "{ call: [Function: call] }" });
  });

  test("one that tries again by itself is not waited for, and does not go round for ever", async () => {
    const path = join(folder, "insistent.db");
    const builtin = onlookers["node:sqlite"](path);
    await builtin.run("PRAGMA journal_mode = WAL; CREATE TABLE entry (name text NOT NULL)");
    const both = {
      reset: () => builtin.run("DELETE FROM entry"),
      invariant: async () => expect(await number(builtin, "SELECT count(*) FROM entry")).toBe(2),
      maxMs: 3000,
      minCoverage: 0,
    };
    const report = await explore("insistent", {
      ...both,
      actors: { A: odd("insistent", path), B: odd("insistent", path) },
    });
    expect(report.text).toContain("✓");
    const tagged = await explore("tagged", {
      ...both,
      actors: { A: odd("tagged", path, "a"), B: odd("tagged", path, "b") },
      invariant: () => expect.fail("show me"),
      replay: "ABAB",
    });
    expect(tagged.turns?.map(({ statement, rows }) => [statement, ...rows])).toEqual([
      ["INSERT INTO entry VALUES ('a')"],
      ["INSERT INTO entry VALUES ('b')"],
      ["SELECT count(*) AS n FROM entry", ["2"]],
      ["SELECT count(*) AS n FROM entry", ["2"]],
    ]);
    builtin.close();
  });

  test("what cannot be done is refused", async () => {
    const refusal = (scenario: object) =>
      explore("refused", {
        reset: () => {},
        actors: { A: odd("script", file), B: odd("script", file) },
        invariant() {},
        ...scenario,
      }).catch(message);
    const actors = (b: unknown) => ({ actors: { A: odd("script", file), B: b } });
    expect(await refusal(actors(async () => {}))).toMatch(/all actors are in threads/);
    expect(await refusal({ isolation: "serializable" })).toMatch(/isolation/);
    expect(await refusal({ reset: undefined })).toMatch(/need `reset`/);
    expect(await refusal(actors(odd("nobody")))).toMatch(/B .*no function nobody/);
    expect(await refusal(actors(odd("builtin", file)))).toMatch(/more than one copy/);
    expect(await refusal(actors(odd("silent")))).toMatch(/B sends no statement/);
    expect(await refusal(actors(inThread(moduleOf("missing"), "pay")))).toMatch(/B .*missing\.ts/);
    expect(() => odd("script", () => {})).toThrow(UsageError);
    expect(() => inThread("./shop.ts", "pay")).toThrow(/new URL/);
    await expect(
      expectNoRace({
        reset: () => {},
        actors: { A: odd("script", file), B: odd("script", file) },
        ...show,
      } as ThreadScenario),
    ).rejects.toThrow(RaceError);
  });
});
