/** Transactions of pg begin with the first statement in them. Nobody can tell, except by what it costs. */
import {
  CommitUnknownError,
  ConnectionLostError,
  type Holdfast,
  LockTimeoutError,
  UsageError,
  holdfast,
  key,
  sql,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { Client, Pool, type PoolClient, Query } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { type Proxy, isCommit, startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let proxy: Proxy;
let pool: Pool;
let hf: Holdfast<PoolClient>;
/** Somebody else, past the proxy. */
let psql: Client;

const insert = (note: string) => sql`INSERT INTO entry (note) VALUES (${note})`;
const notes = async () =>
  (await psql.query<{ note: string }>("SELECT note FROM entry ORDER BY id")).rows.map(({ note }) => note);

beforeAll(async () => {
  database = await createDatabase("postgres");
  proxy = await startProxy({ port: Number(new URL(database.url).port) });
  psql = new Client({ connectionString: database.url });
  await psql.connect();
  await psql.query("CREATE TABLE entry (id serial PRIMARY KEY, note text NOT NULL UNIQUE)");
  await psql.query("CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL)");
  await psql.query("INSERT INTO account VALUES (1, 100), (2, 100)");
  await holdfast(fromPg(psql)).migrate();
});

afterAll(async () => {
  await psql.end();
  await proxy.close();
  await database.drop();
});

beforeEach(async () => {
  await psql.query("TRUNCATE entry RESTART IDENTITY");
  pool = new Pool({ connectionString: proxy.url(database.url), max: 1 });
  // A connection that is cut while nobody has it.
  pool.on("error", () => {});
  hf = holdfast(fromPg(pool));
});

afterEach(async () => {
  proxy.cutWhen(undefined);
  proxy.rewrite(undefined);
  await hf.close();
  await pool.end();
});

/** The third run: connections are open and statements prepared. */
async function count(run: () => Promise<unknown>): Promise<number> {
  await run();
  await run();
  proxy.resetCount();
  await run();
  return proxy.roundTrips;
}

describe("what it costs", () => {
  test("a row that is locked, read and written: 3 round trips; one statement: 2; nothing: none", async () => {
    const locked = () =>
      hf.transaction(async (tx) => {
        await tx.row("account", 1);
        await tx.client.query("UPDATE account SET balance = balance - 1 WHERE id = 1");
      });
    expect(await count(locked)).toBe(3);
    expect(await count(() => hf.transaction((tx) => tx.rows("account", [2, 1])))).toBe(2);
    expect(await count(() => hf.transaction((tx) => tx.query(sql`SELECT ${1}::int AS n`)))).toBe(2);
    expect(await count(() => hf.transaction(async () => "nothing"))).toBe(0);
  });

  test("a lock, a savepoint or a pattern's call carries it too", async () => {
    const uploads = quota(hf, { name: "uploads", limit: 1000, per: "day" });
    expect(await count(() => hf.transaction((tx) => tx.lock(key("later"))))).toBe(2);
    // SAVEPOINT, the statement, RELEASE, COMMIT.
    const nested = () => hf.transaction(() => hf.transaction((tx) => tx.query(sql`SELECT 1 AS one`)));
    expect(await count(nested)).toBe(4);
    expect(await count(() => hf.transaction((tx) => uploads.consume("somebody", 1, { tx })))).toBe(2);
  });

  test("a lock that is named by the call is held before the body starts", async () => {
    await hf.transaction({ lock: key("first") }, async () => {
      expect(await holdfast(fromPg(psql)).tryLock(key("first"), async () => {})).toMatchObject({
        acquired: false,
      });
    });
  });
});

describe("what is sent first", () => {
  test("has the deadline, the isolation and the id of the transaction", async () => {
    await hf.transaction({ deadline: 30_000 }, async (tx) => {
      const [row] = await tx.query<{ timeout: number; xid: string | null }>(
        sql`SELECT extract(epoch FROM current_setting('transaction_timeout')::interval)::float8 * 1000 AS timeout,
          pg_current_xact_id_if_assigned()::text AS xid`,
      );
      expect(row?.xid).not.toBeNull();
      expect(row?.timeout).toBeGreaterThan(0);
      expect(row?.timeout).toBeLessThanOrEqual(30_250);
    });
    const readOnly = hf.transaction({ readOnly: true }, (tx) => tx.query(insert("read only")));
    await expect(readOnly).rejects.toMatchObject({ code: "25006" });
  });

  test("several statements in one text, and values of any kind", async () => {
    await hf.transaction((tx) =>
      tx.query(sql.raw("INSERT INTO entry (note) VALUES ('a'); INSERT INTO entry (note) VALUES ('b')")),
    );
    expect(await notes()).toEqual(["a", "b"]);
    const when = new Date(0);
    const [row] = await hf.transaction((tx) =>
      tx.query(
        sql`SELECT ${when}::timestamptz AS moment, ${[1, 2]}::int[] AS list, ${{ a: 1 }}::jsonb AS object, ${null}::text AS nothing`,
      ),
    );
    expect(row).toEqual({ moment: when, list: [1, 2], object: { a: 1 }, nothing: null });
    const circular: { self?: unknown } = {};
    circular.self = circular;
    await expect(hf.transaction((tx) => tx.query(sql`SELECT ${circular}::jsonb`))).rejects.toThrow(
      /circular/i,
    );
    expect(await hf.transaction((tx) => tx.query(sql`SELECT 1 AS one`))).toEqual([{ one: 1 }]);
  });

  test("that fails is told as what it is; a savepoint is undone alone", async () => {
    const divided = hf.transaction((tx) => tx.query(sql`SELECT 1 / ${0}::int`));
    await expect(divided).rejects.toMatchObject({ code: "22012" });
    await hf.transaction(async (tx) => {
      const inner = tx.transaction(async (nested) => {
        await nested.query(insert("inner"));
        throw new Error("undo");
      });
      await expect(inner).rejects.toThrow("undo");
      await tx.query(insert("outer"));
    });
    expect(await notes()).toEqual(["outer"]);
    const swallowed = hf.transaction(async (tx) => {
      await tx.query(sql`SELECT 1 / ${0}::int`).catch(() => {});
    });
    await expect(swallowed).rejects.toMatchObject({ code: "HF_TRANSACTION_ABORTED" });
  });

  test("a row that is locked is waited for, and no longer than it may be, or wanted", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    try {
      const bounded = hf.transaction((tx) => tx.row("account", 1, { wait: 100 }));
      await expect(bounded).rejects.toThrow(LockTimeoutError);
      const lock = hf.transaction((tx) => tx.row("account", 1, { wait: "nowait" }));
      await expect(lock).rejects.toMatchObject({ code: "HF_LOCK_NOT_AVAILABLE" });
      const stop = new AbortController();
      const aborted = hf.transaction({ signal: stop.signal }, (tx) => tx.row("account", 1));
      await eventually(async () => {
        const waiting =
          "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
        return (await psql.query(waiting)).rowCount === 1;
      });
      stop.abort(new Error("not wanted"));
      await expect(aborted).rejects.toThrow("not wanted");
    } finally {
      await psql.query("ROLLBACK");
    }
    expect(await hf.transaction((tx) => tx.row("account", 1))).toMatchObject({ id: 1 });
  });

  test("a row of a table that has got another column since", async () => {
    const read = () => hf.transaction({ retry: false }, (tx) => tx.row("account", 2));
    for (let i = 0; i < 3; i++) expect(await read()).toEqual({ id: 2, balance: 100 });
    await psql.query("ALTER TABLE account ADD COLUMN note text");
    try {
      for (let i = 0; i < 3; i++) expect(await read()).toEqual({ id: 2, balance: 100, note: null });
    } finally {
      await psql.query("ALTER TABLE account DROP COLUMN note");
    }
    expect(await read()).toEqual({ id: 2, balance: 100 });
  });

  test("at the same time as others: in the order in which it was called", async () => {
    await hf.transaction(async (tx) => {
      const ids = await Promise.all(
        ["a", "b", "c"].map((note) =>
          tx.query<{ id: number }>(sql`INSERT INTO entry (note) VALUES (${note}) RETURNING id`),
        ),
      );
      expect(ids.flat().map(({ id }) => id)).toEqual([1, 2, 3]);
    });
    expect(await notes()).toEqual(["a", "b", "c"]);
  });
});

describe("the client's own", () => {
  test("sends what it is given after BEGIN, in its order, whatever way it is called", async () => {
    await hf.transaction(async (tx) => {
      const { client } = tx;
      const called = Promise.withResolvers<void>();
      const text = "INSERT INTO entry (note) VALUES ($1)";
      const first = client.query(text, ["promise"]);
      client.query(text, ["callback"], () => called.resolve());
      const query = new Query(text, ["query"]);
      expect(client.query(query)).toBe(query);
      await first;
      await called.promise;
      await client.query({ name: "named", text, values: ["named"] });
      const { rows } = await client.query("SELECT pg_current_xact_id_if_assigned()::text AS xid");
      expect(rows[0].xid).not.toBeNull();
      expect(await tx.query(sql`SELECT count(*)::int AS n FROM entry`)).toEqual([{ n: 4 }]);
    });
    expect(await notes()).toEqual(["promise", "callback", "query", "named"]);
  });

  test("what is not waited for is in the transaction, and nothing comes after it", async () => {
    let client!: PoolClient;
    await hf.transaction(async (tx) => {
      ({ client } = tx);
      void client.query("INSERT INTO entry (note) VALUES ('not waited for')");
    });
    expect(await notes()).toEqual(["not waited for"]);
    expect(() => client.query("SELECT 1")).toThrow(UsageError);
    let later!: () => Promise<unknown>;
    await hf.transaction(async (tx) => void (later = () => tx.query(insert("late"))));
    await expect(later()).rejects.toThrow(UsageError);
    expect(await notes()).toEqual(["not waited for"]);
  });

  test("hf.join of it is inside", async () => {
    const undone = hf.transaction(async (tx) => {
      await hf.join(tx.client).lock(key("joined"));
      await hf.join(tx.client).query(insert("joined"));
      throw new Error("undo");
    });
    await expect(undone).rejects.toThrow("undo");
    expect(await notes()).toEqual([]);
  });
});

/** By the transaction's first statement, and by its client. */
const ways = {
  "tx.query": (note: string) => (tx: { query(statement: ReturnType<typeof insert>): Promise<unknown> }) =>
    tx.query(insert(note)),
  "tx.client": (note: string) => (tx: { client: PoolClient }) =>
    tx.client.query("INSERT INTO entry (note) VALUES ($1)", [note]),
};

describe.each(Object.entries(ways))("BEGIN that fails, with %s", (_, write) => {
  test("is told, and nothing is kept, also if the body swallows it", async () => {
    await hf.transaction(write("before"));
    proxy.rewrite((direction, chunk) =>
      direction === "to-client"
        ? Buffer.from(chunk.toString("latin1").replaceAll("read committed", "read something"), "latin1")
        : chunk,
    );
    const told: unknown[] = [];
    const swallowing = hf.transaction(async (tx) => {
      await write("swallowed")(tx).catch((error: unknown) => told.push(error));
      return "done";
    });
    await expect(swallowing).rejects.toMatchObject({ code: "HF_ISOLATION" });
    expect(told).toMatchObject([{ code: "HF_ISOLATION" }]);
    await expect(hf.transaction(write("thrown"))).rejects.toMatchObject({ code: "HF_ISOLATION" });
    proxy.rewrite(undefined);
    await hf.transaction(write("after"));
    expect(await notes()).toEqual(["before", "after"]);
  });

  test("because the session was emptied is sent again", async () => {
    await hf.transaction(write("before"));
    await pool.query("DISCARD ALL");
    await hf.transaction({ retry: false }, write("after"));
    await hf.transaction({ retry: false }, write("again"));
    expect(await notes()).toEqual(["before", "after", "again"]);
  });

  test("because the connection is lost is tried again, with the body", async () => {
    await hf.transaction(write("before"));
    const cutOnce = () => {
      let left = 1;
      proxy.cutWhen((direction) => (direction === "to-server" && left-- > 0 ? "cut-before" : "pass"));
    };
    cutOnce();
    const attempts: number[] = [];
    await hf.transaction(async (tx) => {
      attempts.push(tx.attempt);
      await write("after")(tx);
    });
    expect(attempts).toEqual([1, 2]);
    cutOnce();
    await expect(hf.transaction({ retry: false }, write("lost"))).rejects.toThrow(ConnectionLostError);
    expect(await notes()).toEqual(["before", "after"]);
  });

  test("COMMIT whose answer is lost is looked up", async () => {
    let cuts = 0;
    proxy.cutWhen((direction, chunk) => {
      if (direction !== "to-server" || !isCommit(chunk) || cuts > 0) return "pass";
      cuts++;
      return "drop-answer";
    });
    const done = await hf.transaction(write("kept")).catch((error: unknown) => error);
    expect(cuts).toBe(1);
    expect(done).not.toBeInstanceOf(CommitUnknownError);
    expect(await notes()).toEqual(["kept"]);
  });
});

test("at a higher level it is begun at once: what it sees is what was there then", async () => {
  for (const isolation of ["repeatable read", "serializable"] as const) {
    const seen = await hf.transaction({ isolation }, async (tx) => {
      await psql.query("INSERT INTO entry (note) VALUES ($1)", [isolation]);
      return tx.query(sql`SELECT note FROM entry WHERE note = ${isolation}`);
    });
    expect(seen).toEqual([]);
  }
});

test("a body that opens nothing survives the loss of its connection", async () => {
  await hf.transaction((tx) => tx.query(insert("before")));
  expect(
    await hf.transaction(async () => {
      proxy.cut();
      return "done";
    }),
  ).toBe("done");
  await hf.transaction((tx) => tx.query(insert("after")));
  expect(await notes()).toEqual(["before", "after"]);
});
