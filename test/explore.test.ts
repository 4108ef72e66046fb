/** Races that people have published, as they would have been written, and their fixes. */
import { once } from "node:events";
import { createServer, request } from "node:http";
import type { AddressInfo } from "node:net";
import { PrismaPg } from "@prisma/adapter-pg";
import { eq, sql as drizzleSql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { integer, pgTable, text } from "drizzle-orm/pg-core";
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import {
  CoverageError,
  RaceError,
  type Scenario,
  type UnexploredPair,
  expectNoRace,
  explore,
} from "holdfast/testing";
import makeKnex, { type Knex } from "knex";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;
let knex: Knex;
let prisma: PrismaClient;
let sql: postgres.Sql;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  knex = makeKnex({ client: "pg", connection: database.url, pool: { min: 0, max: 4 } });
  prisma = new PrismaClient({
    adapter: new PrismaPg({ connectionString: database.url, max: 4 }),
    // Its statements are held back, and its own limits are not what is looked for.
    transactionOptions: { maxWait: 60_000, timeout: 60_000 },
  });
  sql = postgres(database.url, { max: 4, onnotice: () => {} });
  await pool.query(`
    CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL);
    CREATE TABLE voucher (code text PRIMARY KEY, uses int NOT NULL);
    CREATE TABLE stock (id text PRIMARY KEY, qty int NOT NULL);
    CREATE TABLE account (id text PRIMARY KEY, balance int NOT NULL)`);
});

afterAll(async () => {
  await Promise.all([pool?.end(), knex?.destroy(), prisma?.$disconnect(), sql?.end()]);
  await database?.drop();
});

const reset = () =>
  pool.query(`DELETE FROM upload; DELETE FROM voucher; DELETE FROM stock; DELETE FROM account;
    INSERT INTO voucher VALUES ('v', 1); INSERT INTO stock VALUES ('pen', 1);
    INSERT INTO account VALUES ('a', 10), ('b', 10)`);

async function number(query: string): Promise<number> {
  return Number((await pool.query(query)).rows[0].n);
}

/** Two of the same, at the same time. */
function twice(act: () => Promise<unknown>, check: () => Promise<void>, more: { replay?: string } = {}) {
  return explore("twice", {
    db: fromPg(pool),
    reset,
    actors: { A: act, B: act },
    invariant: check,
    maxMs: 30_000,
    ...more,
  });
}

const uploadsFit = async () =>
  expect(await number("SELECT sum(bytes) AS n FROM upload")).toBeLessThanOrEqual(100);
const neverBelowZero = async () => {
  const n = await number("SELECT min(qty) AS n FROM stock");
  const sold = await number("SELECT count(*) AS n FROM upload");
  expect([n >= 0, sold <= 1]).toEqual([true, true]);
};

describe("an upload that checks the quota, then writes", () => {
  const onPg = async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      const { rows } = await client.query(
        "SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = $1",
        ["u"],
      );
      if (Number(rows[0].used) + 60 <= 100)
        await client.query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", ["u", 60]);
      await client.query("COMMIT");
    } finally {
      client.release();
    }
  };
  const onKnex = () =>
    knex.transaction(async (trx) => {
      const found = await trx("upload").where({ user_id: "u" }).sum({ used: "bytes" }).first();
      if (Number(found?.["used"]) + 60 <= 100) await trx("upload").insert({ user_id: "u", bytes: 60 });
    });
  const onPrisma = () =>
    prisma.$transaction(async (tx) => {
      const { _sum } = await tx.upload.aggregate({ where: { userId: "u" }, _sum: { bytes: true } });
      if ((_sum.bytes ?? 0) + 60 <= 100) await tx.upload.create({ data: { userId: "u", bytes: 60 } });
    });
  const onPostgres = () =>
    sql.begin(async (tx) => {
      const [row] = await tx`SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = 'u'`;
      if (Number(row?.["used"]) + 60 <= 100) await tx`INSERT INTO upload (user_id, bytes) VALUES ('u', 60)`;
    });
  const upload = pgTable("upload", { userId: text("user_id").notNull(), bytes: integer().notNull() });
  const onDrizzle = () =>
    drizzle(pool).transaction(async (tx) => {
      const [row] = await tx
        .select({ used: drizzleSql<number>`coalesce(sum(bytes), 0)` })
        .from(upload)
        .where(eq(upload.userId, "u"));
      if (Number(row?.used) + 60 <= 100) await tx.insert(upload).values({ userId: "u", bytes: 60 });
    });

  test.for(Object.entries({ onPg, onKnex, onPrisma, onPostgres, onDrizzle }))(
    "leaks: %s",
    async ([, act]) => {
      const report = await twice(act, uploadsFit);
      expect(report.text).toContain("Replay:");
      expect({ ok: report.ok, few: report.runs <= 20, preemptions: report.preemptions }).toEqual({
        ok: false,
        few: true,
        preemptions: 1,
      });
      // Every statement says where in this file it comes from.
      expect(report.turns?.filter(({ place }) => place?.includes("explore.test.ts")).length).toBeGreaterThan(
        3,
      );
      // What it found can be had again.
      for (let i = 0; i < 50; i++)
        expect(await twice(act, uploadsFit, { replay: report.replay as string })).toMatchObject({
          ok: false,
          runs: 1,
        });
    },
  );

  test("with its lock it does not", async () => {
    const hf = holdfast(fromPg(pool));
    const exact = () =>
      hf.transaction({ lock: key("upload", "u") }, async ({ client }) => {
        const { rows } = await client.query(
          "SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = $1",
          ["u"],
        );
        if (Number(rows[0].used) + 60 <= 100)
          await client.query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", ["u", 60]);
      });
    expect(await twice(exact, uploadsFit)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});

describe("stock that is read, then written", () => {
  const naive = async () => {
    const { rows } = await pool.query("SELECT qty FROM stock WHERE id = 'pen'");
    if (rows[0].qty < 1) return;
    await pool.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
    await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
  };
  const fixed = async () => {
    const { rowCount } = await pool.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1");
    if (rowCount === 1) await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
  };

  test("is sold twice", async () => {
    await expect(
      expectNoRace({ db: fromPg(pool), reset, actors: { A: naive, B: naive }, invariant: neverBelowZero }),
    ).rejects.toThrow(/switch[\s\S]*SELECT qty[\s\S]*Replay/);
  });

  test("and with a guard in the write it is not", async () => {
    expect(await twice(fixed, neverBelowZero)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });

  test("nor with FOR UPDATE, whose waits are seen", async () => {
    const locked = async () => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        const { rows } = await client.query("SELECT qty FROM stock WHERE id = 'pen' FOR UPDATE");
        if (rows[0].qty >= 1) {
          await client.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
          await client.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
        }
        await client.query("COMMIT");
      } finally {
        client.release();
      }
    };
    expect(await twice(locked, neverBelowZero)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});

describe("transfers in both directions", () => {
  const transfer = (from: string, to: string) => async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      await client.query("UPDATE account SET balance = balance - 1 WHERE id = $1", [from]);
      await client.query("UPDATE account SET balance = balance + 1 WHERE id = $1", [to]);
      await client.query("COMMIT");
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  };
  const both = (invariant: Scenario["invariant"], more: Partial<Scenario> = {}) =>
    explore("transfers", {
      db: fromPg(pool),
      reset,
      actors: { A: transfer("a", "b"), B: transfer("b", "a") },
      invariant,
      ...more,
    });

  test("deadlock, and it is seen in which order", async () => {
    const report = await both((results) =>
      expect(Object.values(results).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]),
    );
    expect(report).toMatchObject({ ok: false, preemptions: 1, anomaly: "deadlock" });
    expect(report.text).toMatch(/waits for [AB][\s\S]*deadlock detected/);
    // What the victim sends afterwards, though pg keeps it back until the error has been read to its end.
    expect(report.turns?.map(({ statement }) => statement)).toContain("ROLLBACK");
  });

  test.for(["A", "B"] as const)("%s is the one that is ended, in some order", async (victim) => {
    const chosen = new RegExp(`!${victim}$`);
    const find = () => both((results) => expect(results[victim]?.status).toBe("fulfilled"));
    let report = await find();
    // The server looks for deadlocks too, and is the first to choose on a machine that stands still.
    for (let i = 0; i < 5 && !chosen.test(report.replay ?? ""); i++) report = await find();
    expect(report).toMatchObject({ ok: false, anomaly: "deadlock" });
    expect(report.replay).toMatch(chosen);
    for (let i = 0; i < 10; i++)
      expect(
        await both((results) => expect(results[victim]?.status).toBe("fulfilled"), {
          replay: report.replay as string,
        }),
      ).toMatchObject({ ok: false });
  });
});

describe("levels", () => {
  const use = async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      const { rows } = await client.query("SELECT uses FROM voucher WHERE code = 'v'");
      if (rows[0].uses < 1) return await client.query("COMMIT").then(() => false);
      await client.query("UPDATE voucher SET uses = $1 WHERE code = 'v'", [rows[0].uses - 1]);
      await client.query("COMMIT");
      return true;
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  };
  const usedOnce: Scenario["invariant"] = ({ A, B }) =>
    expect([A, B].filter((each) => each?.status === "fulfilled" && each.value).length).toBe(1);

  test("each is tried by itself, and the sessions are left as they were", async () => {
    const settings = async () =>
      Promise.all(
        Array.from({ length: 6 }, async () => {
          const client = await pool.connect();
          const { rows } = await client.query(
            "SELECT current_setting('default_transaction_isolation') AS level, current_setting('deadlock_timeout') AS patience, pg_sleep(0.05)",
          );
          client.release();
          return [rows[0].level, rows[0].patience];
        }),
      );
    const before = await settings();
    const scenario = {
      db: fromPg(pool),
      reset,
      actors: { A: use, B: use },
      invariant: usedOnce,
      maxMs: 60_000,
    };
    const strict = await explore("use", { ...scenario, isolation: ["repeatable read", "serializable"] });
    expect(strict).toMatchObject({
      ok: true,
      coverage: "exhaustive",
      levels: [{ isolation: "repeatable read" }, { isolation: "serializable" }],
    });
    const lax = await explore("use", { ...scenario, isolation: ["serializable", "read committed"] });
    expect(lax).toMatchObject({ ok: false, isolation: "read committed", anomaly: "lost update" });
    expect(lax.text).toContain("READ COMMITTED");
    expect(await settings()).toEqual(before);
  });

  test("in one line: the rows come back by themselves", async () => {
    await reset();
    await expect(expectNoRace(fromPg(pool), [use, use], usedOnce)).rejects.toThrow(RaceError);
    await expectNoRace(fromPg(pool), [use, use], usedOnce, { isolation: "serializable" });
    expect(await number("SELECT uses AS n FROM voucher")).toBe(1);
  });
});

describe("what is not decided by statements", () => {
  const insert = (bytes: () => number) => async () => {
    await pool.query("SELECT count(*) FROM voucher");
    if (bytes() > 50) await pool.query("INSERT INTO voucher VALUES ('w', 1)");
    else await pool.query("DELETE FROM voucher");
  };

  test("chance is told", async () => {
    let calls = 0;
    const act = insert(() => (calls++ < 4 ? 100 : 0));
    await expect(
      explore("chance", { db: fromPg(pool), reset, actors: { A: act, B: act }, invariant: () => {} }),
    ).rejects.toThrow(/came out differently: .*(insert into upload|delete from voucher|nothing to send)/);
  });

  test("a lock in this process keeps them apart, so that nothing was tested", async () => {
    let tail = Promise.resolve();
    const alone = () => {
      const turn = tail.then(async () => {
        const { rows } = await pool.query("SELECT qty FROM stock WHERE id = 'pen'");
        if (rows[0].qty < 1) return;
        await pool.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
      });
      tail = turn.catch(() => {});
      return turn;
    };
    await expect(twice(alone, neverBelowZero)).rejects.toThrow(/keeps them apart/);
  });

  test("a pool with one connection for two", async () => {
    const small = new Pool({ connectionString: database.url, max: 1 });
    try {
      const act = async () => {
        const { rows } = await small.query("SELECT qty FROM stock WHERE id = 'pen'");
        if (rows[0].qty > 0) {
          await small.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen'");
          await small.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
        }
      };
      expect(await twice(act, neverBelowZero)).toMatchObject({ ok: false });
    } finally {
      await small.end();
    }
  });

  test("what fails without any race is called so", async () => {
    const report = await twice(
      () => pool.query("INSERT INTO upload (user_id, bytes) VALUES ('u', 200)"),
      uploadsFit,
    );
    expect(report).toMatchObject({ ok: false, preemptions: 0, anomaly: "not a race" });
  });
});

test("requests to other services are no statements", async () => {
  const service = createServer((request, response) => request.resume().on("end", () => response.end("ok")));
  await once(service.listen(0, "127.0.0.1"), "listening");
  const { port } = service.address() as AddressInfo;
  try {
    const act = async () => {
      const { rows } = await pool.query("SELECT qty FROM stock WHERE id = 'pen'");
      await fetch(`http://127.0.0.1:${port}/`, { method: "POST", body: "Bought" });
      await plainPost(port);
      if (rows[0].qty < 1) return;
      await pool.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
      await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)");
    };
    const report = await twice(act, neverBelowZero);
    expect(report).toMatchObject({ ok: false, anomaly: "lost update" });
    expect(report.turns?.length).toBe(6);
  } finally {
    service.close();
    service.closeAllConnections();
  }
});

/** Through node:http, whose sockets are those of node:net. */
function plainPost(port: number): Promise<void> {
  return new Promise((resolve, reject) => {
    const sent = request({ port, host: "127.0.0.1", method: "POST", path: "/" }, (response) =>
      response.resume().on("end", resolve),
    );
    sent.on("error", reject).end("Paid");
  });
}

test("statements that were prepared before are known by their text", async () => {
  const act = () =>
    sql.begin(async (tx) => {
      const [row] = await tx`SELECT qty FROM stock WHERE id = ${"pen"}`;
      if (Number(row?.["qty"]) > 0) {
        await tx`UPDATE stock SET qty = ${Number(row?.["qty"]) - 1} WHERE id = ${"pen"}`;
        await tx`INSERT INTO upload (user_id, bytes) VALUES (${"order"}, ${1})`;
      }
    });
  await reset();
  await Promise.all([act(), act(), act()]);
  const report = await twice(act, neverBelowZero);
  expect(report).toMatchObject({ ok: false, anomaly: "lost update", table: "stock" });
  expect(report.text).toContain("SELECT qty FROM stock WHERE id = 'pen'");
});

test("a pool that closes a connection as soon as nobody uses it", async () => {
  const brief = new Pool({ connectionString: database.url, max: 4, idleTimeoutMillis: 1 });
  try {
    const act = async () => {
      const { rows } = await brief.query("SELECT qty FROM stock WHERE id = 'pen'");
      await brief.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
    };
    for (let i = 0; i < 5; i++)
      await explore("brief", { db: fromPg(pool), reset, actors: { A: act, B: act }, invariant: () => {} });
  } finally {
    await brief.end();
  }
});

test("statements that one actor sends at the same time", async () => {
  const act = async () => {
    const [{ rows }] = await Promise.all([
      pool.query("SELECT qty FROM stock WHERE id = 'pen'"),
      pool.query("SELECT uses FROM voucher WHERE code = 'v'"),
    ]);
    if (rows[0].qty < 1) return;
    await Promise.all([
      pool.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]),
      pool.query("INSERT INTO upload (user_id, bytes) VALUES ('order', 1)"),
    ]);
  };
  const report = await twice(act, neverBelowZero);
  expect(report).toMatchObject({ ok: false, anomaly: "lost update" });
});

test("more switches than were asked for are tried at random, and the smallest failure is told", async () => {
  const scenario = {
    db: fromPg(pool),
    reset,
    // Fails only if B comes between two statements of A, and A between two of B.
    actors: {
      A: async () => {
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('a', 1)");
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('a', 2)");
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('a', 3)");
      },
      B: async () => {
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('b', 1)");
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('b', 2)");
        await pool.query("INSERT INTO upload (user_id, bytes) VALUES ('b', 3)");
      },
    },
    invariant: async () => {
      const { rows } = await pool.query("SELECT string_agg(user_id, '' ORDER BY id) AS order FROM upload");
      expect(rows[0].order).not.toBe("ababab");
    },
  };
  const report = await explore("random", { ...scenario, preemptions: 1, seed: 7, maxMs: 20_000 });
  expect(report).toMatchObject({ ok: false, replay: "ABABAB", seed: 7 });
});

describe("kinds, as docs/anomalies.md draws them", () => {
  const never = () => expect.fail("both ran");
  const one = (...texts: string[]) => {
    return async () => {
      for (const query of texts) await pool.query(query);
    };
  };
  /** The first order in which the second actor comes between the first one's statements. */
  const between = (actors: Scenario["actors"]) =>
    explore("kind", {
      db: fromPg(pool),
      reset,
      actors,
      invariant: never,
      replay: "ABBA",
    });

  test.for([
    [
      "lost update",
      ["SELECT uses FROM voucher WHERE code = 'v'", "UPDATE voucher SET uses = 0 WHERE code = 'v'"],
      ["SELECT uses FROM voucher WHERE code = 'v'", "UPDATE voucher SET uses = 0 WHERE code = 'v'"],
    ],
    [
      "write skew",
      ["SELECT sum(balance) FROM account", "UPDATE account SET balance = 0 WHERE id = 'a'"],
      ["SELECT sum(balance) FROM account", "UPDATE account SET balance = 0 WHERE id = 'b'"],
    ],
    [
      "phantom",
      ["SELECT sum(bytes) FROM upload", "INSERT INTO upload (user_id, bytes) VALUES ('u', 60)"],
      ["SELECT sum(bytes) FROM upload", "INSERT INTO upload (user_id, bytes) VALUES ('u', 60)"],
    ],
    [
      "read skew",
      [
        "SELECT balance FROM account WHERE id = 'a'",
        "INSERT INTO upload (user_id, bytes) SELECT 'report', balance FROM account WHERE id = 'b'",
      ],
      [
        "UPDATE account SET balance = balance - 1 WHERE id = 'a'",
        "UPDATE account SET balance = balance + 1 WHERE id = 'b'",
      ],
    ],
    [
      "double effect",
      ["UPDATE voucher SET uses = 1", "INSERT INTO upload (user_id, bytes) VALUES ('u', 60)"],
      ["INSERT INTO upload (user_id, bytes) VALUES ('u', 60)", "SELECT 1"],
    ],
  ] as const)("%s", async ([kind, a, b]) => {
    const report = await between({ A: one(...a), B: one(...b) });
    expect(report).toMatchObject({ ok: false, anomaly: kind });
    expect(report.fix).toBeTruthy();
  });
});

describe("statements that were never interleaved", () => {
  const checkout = async (lock: "" | " FOR UPDATE") => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      const { rows } = await client.query(`SELECT qty FROM stock WHERE id = 'pen'${lock}`);
      if (rows[0].qty > 0) await client.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen'");
      else await client.query("DELETE FROM stock WHERE id = 'pen'");
      await client.query("COMMIT");
    } finally {
      client.release();
    }
  };
  const tried = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
    explore("checkouts", {
      db: fromPg(pool),
      reset,
      actors: { A: act, B: act },
      invariant: () => {},
      maxMs: 20_000,
      ...more,
    });
  const shown = (pairs: readonly UnexploredPair[]) =>
    pairs
      .map(({ table, statements }) =>
        [
          table,
          ...statements.map(({ actor, statement }) => `${actor} ${statement.split(" ", 1)[0]}`).toSorted(),
        ].join(),
      )
      .toSorted();

  test("are named, with their places, also those that never came in the same run", async () => {
    const report = await tried(() => checkout(""), { preemptions: 0 });
    expect(report).toMatchObject({ ok: true, coverage: { bounded: 0 } });
    // Who comes second finds nothing left, so in no run are there two UPDATEs.
    expect(shown(report.unexplored)).toEqual([
      "stock,A DELETE,B DELETE",
      "stock,A DELETE,B SELECT",
      "stock,A DELETE,B UPDATE",
      "stock,A SELECT,B DELETE",
      "stock,A SELECT,B UPDATE",
      "stock,A UPDATE,B DELETE",
      "stock,A UPDATE,B SELECT",
      "stock,A UPDATE,B UPDATE",
    ]);
    for (const { place } of report.unexplored.flatMap(({ statements }) => statements))
      expect(place).toMatch(/explore\.test\.ts:\d+:\d+$/);
    expect(report.text).toMatch(
      /; 8 pairs of statements were never interleaved, e\.g\. [AB]'s SELECT \(explore\.test\.ts:\d+\) and [AB]'s (UPDATE|DELETE) \(explore\.test\.ts:\d+\) on stock/,
    );
  });

  test("do not count what was tried, and what a lock keeps apart", async () => {
    // Whoever deletes comes when the other one has committed.
    const never = [
      "A DELETE,B DELETE",
      "A DELETE,B SELECT",
      "A DELETE,B UPDATE",
      "A SELECT,B DELETE",
      "A UPDATE,B DELETE",
    ];
    const switched = await tried(() => checkout(""), { preemptions: 1, maxMs: 3000 });
    expect(switched.coverage).toEqual({ bounded: 1 });
    expect(shown(switched.unexplored)).toEqual(never.map((pair) => `stock,${pair}`));
    // With more switches it comes to the same: the lock keeps them apart.
    const locked = await tried(() => checkout(" FOR UPDATE"), { preemptions: 1, maxMs: 3000 });
    expect(locked).toMatchObject({ coverage: "exhaustive", unexplored: [] });
    expect(await tried(() => checkout(""))).toMatchObject({ coverage: "exhaustive", unexplored: [] });
  });

  test("do not count what has no middle: then both orders are all there is", async () => {
    const sells = "UPDATE stock SET qty = 0 WHERE id = 'pen'";
    const count = async () => {
      await pool.query("SELECT count(*) FROM voucher");
      await pool.query(sells);
    };
    const add = async () => {
      await pool.query("INSERT INTO voucher VALUES ('w', 1)");
      await pool.query(sells);
    };
    const report = await tried(count, { actors: { A: count, B: add }, preemptions: 0 });
    expect(report).toMatchObject({ ok: true, coverage: { bounded: 0 } });
    expect(shown(report.unexplored)).toEqual(["stock,A UPDATE,B UPDATE"]);
  });

  test("are a part of the error if less was tried than was asked for", async () => {
    const error = await tried(() => checkout(""), { preemptions: 0, minCoverage: 1 }).catch(
      (thrown: unknown) => thrown,
    );
    expect(error).toBeInstanceOf(CoverageError);
    expect(shown((error as CoverageError).unexplored)).toContain("stock,A UPDATE,B UPDATE");
    expect((error as CoverageError).message).toContain("8 pairs of statements were never interleaved");
  });
});
