/** Correct code by means that look odd from outside: none of it may be called a race, or end in an error. */
import { AsyncResource } from "node:async_hooks";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { mkdtemp, rm } from "node:fs/promises";
import { Agent, type IncomingMessage, type Server, createServer, request } from "node:http";
import { type AddressInfo, connect, createServer as createTunnel } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import knex, { type Knex } from "knex";
import Sqlite from "better-sqlite3";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres from "postgres";
import { Sequelize } from "sequelize";
import { type Scenario, explore, inThread } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type SqlClient, type Statements, isMysql, openSql, sqlServers } from "./harness/sql.ts";

/** Each takes one of what there is one of; true: it got it. */
type Act = () => Promise<boolean>;

const oneGot: Scenario["invariant"] = (results) => {
  const got = Object.values(results).map((each) => (each.status === "fulfilled" ? each.value : each.reason));
  expect(got.filter((each) => each === true)).toHaveLength(1);
  expect(got.filter((each) => each !== true && each !== false)).toEqual([]);
};

const fresh = () => randomUUID().replaceAll("-", "");

describe.each(sqlServers)("on %s", (server) => {
  const why = unavailable(server);
  const mysql = isMysql(server);
  let database: TestDatabase;
  let sql: SqlClient;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    sql = openSql(server, database.url, 8);
    await sql.script(
      "CREATE TABLE stock (id int PRIMARY KEY, qty int NOT NULL)",
      "INSERT INTO stock VALUES (1, 1)",
      "CREATE TABLE sale (sku int NOT NULL)",
    );
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await sql?.end();
    await database?.drop();
  });

  const reset = () => sql.script("DELETE FROM sale", "UPDATE stock SET qty = 1");
  const twice = (act: Act, more: Partial<Scenario> = {}) =>
    explore("twice", {
      db: sql.db,
      reset,
      actors: { A: act, B: act },
      invariant: oneGot,
      maxMs: 15_000,
      minCoverage: 1,
      ...more,
    });
  const atomic = async (on: Statements) =>
    (await on.change("UPDATE stock SET qty = qty - 1 WHERE qty >= 1")) === 1;
  const naive = async (on: Statements) => {
    if ((await on.number("SELECT qty FROM stock")) < 1) return false;
    await on.change("UPDATE stock SET qty = qty - 1");
    return true;
  };
  /** It is green, and what is wrong in the same way is found. */
  const passes = async (act: (on: typeof atomic) => Act, more: Partial<Scenario> = {}) => {
    const right = await twice(act(atomic), more);
    expect(right, right.text).toMatchObject({ ok: true });
    const wrong = await twice(act(naive), more);
    expect(wrong, wrong.text).toMatchObject({ ok: false, anomaly: "lost update" });
    return right;
  };

  test("random names of savepoints", async () => {
    await passes((take) => () => {
      const point = `sp_${fresh()}`;
      return sql.transaction(async (tx) => {
        await tx.rows(`SAVEPOINT ${point}`);
        const got = await take(tx);
        await tx.rows(got ? `RELEASE SAVEPOINT ${point}` : `ROLLBACK TO SAVEPOINT ${point}`);
        return got;
      });
    });
  });

  test("random names of temporary tables", async () => {
    await passes((take) => () => {
      const name = `mine_${fresh()}`;
      return sql.transaction(async (tx) => {
        await tx.rows(`CREATE TEMPORARY TABLE ${name} (n int)`);
        const got = await take(tx);
        await tx.rows(`INSERT INTO ${name} VALUES (1)`);
        await tx.number(`SELECT count(*) FROM ${name} WHERE n = 1`);
        await tx.rows(`DROP ${mysql ? "TEMPORARY " : ""}TABLE ${name}`);
        return got;
      });
    });
  });

  test("two-phase commit", async () => {
    let n = 0;
    await passes(
      (take) => () =>
        sql.connected(async (on) => {
          const name = `'alarm ${process.pid} ${n++}'`;
          await on.rows(mysql ? `XA START ${name}` : "BEGIN");
          const got = await take(on);
          if (mysql) {
            await on.rows(`XA END ${name}`);
            await on.rows(`XA PREPARE ${name}`);
            await on.rows(`XA COMMIT ${name}`);
          } else {
            await on.rows(`PREPARE TRANSACTION ${name}`);
            await on.rows(`COMMIT PREPARED ${name}`);
          }
          return got;
        }),
    );
  });

  test("a pause, in a database without tables of ours", async () => {
    const right = await twice(() => sql.transaction(atomic), { faults: ["pause", "expired lease"] });
    expect(right, right.text).toMatchObject({ ok: true });
    expect(right.text).toMatch(/with a fault/);
  });

  describe("calls that are sent as one", () => {
    /** So many statements at the same time; whoever comes meanwhile is answered by the next one, as by a batching loader. */
    const batching = (inFlight: number) => {
      let waiting: ((got: boolean) => void)[] = [];
      let busy = 0;
      const send = async () => {
        busy++;
        while (waiting.length > 0) {
          const these = waiting;
          waiting = [];
          const left = await sql.change("UPDATE stock SET qty = qty - 1 WHERE qty >= 1");
          for (const [i, answer] of these.entries()) answer(i < left);
        }
        busy--;
      };
      return () => {
        const { promise, resolve } = Promise.withResolvers<boolean>();
        waiting.push(resolve);
        if (busy < inFlight) void send();
        return promise;
      };
    };
    const three = (load: Act) =>
      explore("batched", {
        db: sql.db,
        reset,
        actors: { A: load, B: load, C: load },
        invariant: oneGot,
        minCoverage: 0,
      });

    test("that of the third one, by whoever is ready first", async () => {
      const found = await three(batching(2));
      expect(found, found.text).toMatchObject({ ok: true });
      expect(found.text).toMatch(/C waited for something that is not a statement/);
    });

    test("all of them: nothing can come in between", async () => {
      await expect(three(batching(1))).rejects.toThrow(
        /A, B, C never had a statement to send while another one had.*calls that are sent as one statement/,
      );
    });
  });

  test("a database behind a Unix socket", async () => {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-alarms-"));
    const { hostname, port, username, password, pathname } = new URL(database.url);
    const path = join(folder, ".s.PGSQL.5432");
    const tunnel = createTunnel((near) => {
      const far = connect(Number(port), hostname);
      near.pipe(far).pipe(near);
      for (const end of [near, far]) end.on("error", () => {});
    });
    await once(tunnel.listen(path), "listening");
    const login = { user: username, password: decodeURIComponent(password), database: pathname.slice(1) };
    const pool = mysql
      ? createPool({ ...login, socketPath: path })
      : new Pool({ ...login, host: folder, port: 5432 });
    const ask = async (text: string) => {
      const answer: unknown = await (pool as { query(text: string): Promise<unknown> }).query(text);
      return (Array.isArray(answer) ? answer[0] : (answer as { rows: unknown }).rows) as { qty: number }[];
    };
    try {
      await reset();
      // Without a reset: what is written there is brought back, too.
      const found = await explore("unix", {
        db: sql.db,
        actors: {
          A: async () => void (await ask("UPDATE stock SET qty = qty - 1 WHERE qty >= 1")),
          B: async () => {
            await ask("UPDATE stock SET qty = qty - 1 WHERE qty >= 1");
          },
        },
        invariant: async () => expect(await sql.number("SELECT qty FROM stock")).toBe(0),
      });
      expect(found, found.text).toMatchObject({ ok: true });
      const naively = async () => {
        const rows = await ask("SELECT qty FROM stock");
        if ((rows[0]?.qty ?? 0) >= 1) await ask("UPDATE stock SET qty = qty - 1");
      };
      const wrong = await explore("unix", {
        db: sql.db,
        actors: { A: naively, B: naively },
        invariant: async () => expect(await sql.number("SELECT qty FROM stock")).toBe(0),
      });
      expect(wrong, wrong.text).toMatchObject({ ok: false, anomaly: "lost update" });
      expect(await sql.number("SELECT qty FROM stock")).toBe(1);
    } finally {
      await pool.end();
      tunnel.close();
      await rm(folder, { recursive: true, force: true });
    }
  });

  test("what one of them does is seen by nobody: told, and brought back", async () => {
    await reset();
    // In nobody's name, as by another process.
    const outside = AsyncResource.bind(() => sql.change("UPDATE stock SET qty = qty - 1"));
    const exploring = explore("unseen", {
      db: sql.db,
      actors: { A: async () => void (await outside()), B: async () => void (await outside()) },
      invariant: async () => expect(await sql.number("SELECT qty FROM stock")).toBe(-1),
    });
    await expect(exploring).rejects.toThrow(/no statement of A, B was seen/);
    expect(await sql.number("SELECT qty FROM stock")).toBe(1);
  });

  describe("an application that is asked over HTTP", () => {
    let http: Server;
    let folder: string;

    beforeAll(async () => {
      folder = await mkdtemp(join(tmpdir(), "holdfast-alarms-"));
    });
    afterAll(() => rm(folder, { recursive: true, force: true }));

    const serve = async (take: typeof atomic, on: number | string) => {
      http = createServer((_, response) => {
        void sql.transaction(take).then((got) => response.end(JSON.stringify(got)));
      });
      await once(typeof on === "number" ? http.listen(on, "127.0.0.1") : http.listen(on), "listening");
    };
    const closed = async () => {
      http.closeAllConnections();
      await new Promise((done) => http.close(done));
    };
    const ask = async (agent: Agent, on: string | undefined) => {
      const place = on
        ? { socketPath: on }
        : { port: (http.address() as AddressInfo).port, host: "127.0.0.1" };
      const asked = request({ ...place, agent, method: "POST" }).end();
      const [answer] = (await once(asked, "response")) as [IncomingMessage];
      const parts: Buffer[] = [];
      for await (const part of answer) parts.push(part as Buffer);
      return JSON.parse(Buffer.concat(parts).toString()) as boolean;
    };

    test.for(["TCP", "a Unix socket"])("over %s", async (over) => {
      const on = over === "TCP" ? undefined : join(folder, `${fresh()}.sock`);
      const agent = new Agent({ keepAlive: true, maxSockets: 5 });
      for (const take of [atomic, naive]) {
        await serve(take, on ?? 0);
        try {
          const found = await twice(() => ask(agent, on));
          expect(found, found.text).toMatchObject({ ok: take === atomic });
        } finally {
          await closed();
        }
      }
      agent.destroy();
    });

    // The second one is sent when the first one is answered: they cannot meet, and both are whose they are.
    test.for([
      ["TCP", "reset"],
      ["TCP", "no reset"],
      ["a Unix socket", "no reset"],
    ])("over %s, one after the other, with %s", async ([over, how]) => {
      const on = over === "TCP" ? undefined : join(folder, `${fresh()}.sock`);
      const agent = new Agent({ keepAlive: true, maxSockets: 1 });
      await serve(atomic, on ?? 0);
      await reset();
      try {
        const exploring = explore("one socket", {
          db: sql.db,
          ...(how === "reset" ? { reset } : {}),
          actors: { A: () => ask(agent, on), B: () => ask(agent, on) },
          invariant: oneGot,
        });
        await expect(exploring).rejects.toThrow(/A, B never had a statement to send while another one had/);
        if (how !== "reset") expect(await sql.number("SELECT qty FROM stock")).toBe(1);
      } finally {
        agent.destroy();
        await closed();
      }
    });
  });
});

describe("on postgres, through other clients", () => {
  const why = unavailable("postgres");
  let database: TestDatabase;
  let sql: SqlClient;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase("postgres");
    sql = openSql("postgres", database.url, 8);
    await sql.script(
      "CREATE TABLE stock (id int PRIMARY KEY, qty int NOT NULL)",
      "INSERT INTO stock VALUES (1, 1)",
      "CREATE TABLE item (n int)",
      "INSERT INTO item SELECT generate_series(1, 7)",
    );
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await sql?.end();
    await database?.drop();
  });
  const reset = () => sql.script("UPDATE stock SET qty = 1");
  const both =
    (right: Act, wrong: Act, minCoverage = 1) =>
    async () => {
      const of = (act: Act) =>
        explore("twice", { db: sql.db, reset, actors: { A: act, B: act }, invariant: oneGot, minCoverage });
      const passed = await of(right);
      expect(passed, passed.text).toMatchObject({ ok: true });
      const failed = await of(wrong);
      expect(failed, failed.text).toMatchObject({ ok: false, anomaly: "lost update" });
    };
  const guarded = "UPDATE stock SET qty = qty - 1 WHERE qty >= 1 RETURNING qty";

  test("Knex: a transaction inside of another", async () => {
    const db = knex({ client: "pg", connection: database.url, pool: { min: 0, max: 4 } });
    const act = (take: (tx: Knex.Transaction) => Promise<boolean>) => () =>
      db.transaction((outer) => outer.transaction(take));
    try {
      await both(
        act(async (tx) => (await tx.raw<{ rowCount: number }>(guarded)).rowCount === 1),
        act(async (tx) => {
          const { rows } = await tx.raw<{ rows: { qty: number }[] }>("SELECT qty FROM stock");
          if ((rows[0]?.qty ?? 0) < 1) return false;
          await tx.raw("UPDATE stock SET qty = qty - 1");
          return true;
        }),
      )();
    } finally {
      await db.destroy();
    }
  });

  test("Sequelize: a transaction inside of another", async () => {
    const db = new Sequelize(database.url, { logging: false, pool: { max: 4 } });
    const act = (fair: boolean) => () =>
      db.transaction((outer) =>
        db.transaction({ transaction: outer }, async (transaction) => {
          if (!fair) {
            const [rows] = await db.query("SELECT qty FROM stock", { transaction });
            if ((rows as { qty: number }[])[0]?.qty !== 1) return false;
          }
          const [rows] = await db.query(fair ? guarded : "UPDATE stock SET qty = qty - 1 RETURNING qty", {
            transaction,
          });
          return rows.length === 1;
        }),
      );
    try {
      await both(act(true), act(false))();
    } finally {
      await db.close();
    }
  });

  test("postgres.js: cursors, and other statements while they are open", async () => {
    const db = postgres(database.url, { max: 4, fetch_types: false });
    const act = (fair: boolean) => async () => {
      let got = false;
      for await (const rows of db`SELECT n FROM item`.cursor(4)) {
        if (got || rows.length < 4) continue;
        if (!fair && (await db`SELECT qty FROM stock`)[0]?.["qty"] !== 1) continue;
        const taken = await (fair ? db.unsafe(guarded) : db`UPDATE stock SET qty = qty - 1`);
        got = taken.count === 1;
      }
      await db`SELECT n + 1 FROM item`.cursor(3, () => db.CLOSE);
      return got;
    };
    try {
      await both(act(true), act(false))();
    } finally {
      await db.end();
    }
  });

  test("postgres.js: a cursor that writes, and one that waits for a lock", async () => {
    const db = postgres(database.url, { max: 4, fetch_types: false });
    const act = (lock: string) => () =>
      db.begin(async (tx) => {
        let id = 0;
        for await (const [row] of tx`SELECT id, qty FROM stock ORDER BY id ${tx.unsafe(lock)}`.cursor(1))
          if (row?.["qty"] === 1) id = Number(row["id"]);
        let got = false;
        for await (const rows of tx`UPDATE stock SET qty = qty - 1 WHERE id = ${id} RETURNING qty`.cursor(1))
          got = rows.length === 1;
        return got;
      });
    try {
      // What a cursor locks when it reads on cannot be held back.
      await both(act("FOR UPDATE"), act(""), 0)();
    } finally {
      await db.end();
    }
  });
});

describe("on SQLite, with a rollback journal", () => {
  test.for([0, 5000])("again after SQLITE_BUSY, with a timeout of %i", async (timeout) => {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-alarms-"));
    const file = join(folder, "db");
    const db = new Sqlite(file);
    db.exec("PRAGMA journal_mode = delete; CREATE TABLE stock (qty int); INSERT INTO stock VALUES (1)");
    const module = new URL("races/rollback-journal.ts", import.meta.url);
    try {
      const found = await explore("busy", {
        reset: () => db.exec("UPDATE stock SET qty = 1"),
        actors: { A: inThread(module, "buy", file, timeout), B: inThread(module, "buy", file, timeout) },
        invariant: oneGot,
        minCoverage: 1,
      });
      expect(found, found.text).toMatchObject({ ok: true });
      expect(found.text).not.toContain("deadlock");
    } finally {
      db.close();
      await rm(folder, { recursive: true, force: true });
    }
  });
});
