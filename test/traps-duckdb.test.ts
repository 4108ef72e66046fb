/** The traps of DuckDB, one test each, and what Holdfast makes of them. */
import { spawnSync } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type DuckDBConnection, DuckDBInstance } from "@duckdb/node-api";
import { type Holdfast, fenced, holdfast, isUniqueViolation, key, once, sql, versioned } from "holdfast";
import { fromDuckdb } from "holdfast/duckdb";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";

let instance: DuckDBInstance;
/** Two instances of Holdfast, made separately, on one of DuckDB. */
let hf: Holdfast<DuckDBConnection>;
let other: Holdfast<DuckDBConnection>;
let [a, b]: DuckDBConnection[] = [];

beforeAll(async () => {
  instance = await DuckDBInstance.create(":memory:");
  // Many wait for each other here, and the machine may be busy.
  const patience = { wait: 60_000 };
  [hf, other] = [holdfast(fromDuckdb(instance), patience), holdfast(fromDuckdb(instance), patience)];
  await Promise.all([hf.migrate(), other.migrate()]);
  [a, b] = [await instance.connect(), await instance.connect()];
});
beforeEach(async () => {
  for (const connection of [a, b]) await connection?.run("ROLLBACK").catch(() => {});
  await a?.run("CREATE OR REPLACE TABLE t (id integer, n integer, s varchar, version integer DEFAULT 0)");
  await a?.run("INSERT INTO t (id, n, s) VALUES (1, 0, 'x'), (2, 0, 'y')");
});
afterAll(async () => {
  await Promise.all([hf.close(), other.close()]);
  instance.closeSync();
});

async function rows(text: string): Promise<object[]> {
  return (await (a as DuckDBConnection).runAndReadAll(text)).getRowObjectsJS();
}

async function both(body: (a: DuckDBConnection, b: DuckDBConnection) => Promise<void>): Promise<void> {
  const [one, two] = [a as DuckDBConnection, b as DuckDBConnection];
  await one.run("BEGIN");
  await two.run("BEGIN");
  await body(one, two);
}

describe("the traps themselves", () => {
  test("a change that meets another one fails at once, and takes its transaction with it", () =>
    both(async (one, two) => {
      await one.run("UPDATE t SET n = 1 WHERE id = 1");
      await expect(two.run("UPDATE t SET n = 2 WHERE id = 1")).rejects.toThrow(/Conflict on update/);
      await expect(two.run("SELECT 1")).rejects.toThrow(/transaction is aborted/);
      await two.run("ROLLBACK");
      await one.run("COMMIT");
    }));

  test("changes of two columns of one row do not meet", () =>
    both(async (one, two) => {
      await one.run("UPDATE t SET n = 1 WHERE id = 1");
      await two.run("UPDATE t SET s = 'z' WHERE id = 1");
      await one.run("COMMIT");
      await two.run("COMMIT");
    }));

  test("a change of a row that somebody else deletes is lost without a word", () =>
    both(async (one, two) => {
      await one.run("UPDATE t SET n = 1 WHERE id = 1");
      await two.run("DELETE FROM t WHERE id = 1");
      await two.run("COMMIT");
      await one.run("COMMIT");
      expect(await rows("SELECT id FROM t")).toEqual([{ id: 2 }]);
    }));

  test("COMMIT of a transaction that has failed says that all is well", async () => {
    await a?.run("CREATE OR REPLACE TABLE u (id integer PRIMARY KEY)");
    await a?.run("BEGIN");
    await a?.run("INSERT INTO u VALUES (1)");
    await expect(a?.run("INSERT INTO u VALUES (1)")).rejects.toThrow(/PRIMARY KEY/);
    await a?.run("COMMIT");
    expect(await rows("SELECT * FROM u")).toEqual([]);
  });

  test("another process cannot even open the file", async () => {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-duckdb-"));
    const file = join(folder, "test.db");
    const own = await DuckDBInstance.create(file);
    const script = `import("@duckdb/node-api").then(({ DuckDBInstance }) => DuckDBInstance.create(process.env.FILE))
      .then(() => console.log("opened"), (error) => console.log(error.message))`;
    const { stdout } = spawnSync(process.execPath, ["-e", script], {
      env: { ...process.env, FILE: file },
      cwd: new URL(".", import.meta.url),
      encoding: "utf8",
    });
    expect(stdout).toMatch(/Could not set lock on file/);
    own.closeSync();
    await rm(folder, { recursive: true, force: true });
  });
});

/** Counts, then inserts: nothing in the database itself would stop one too many. */
async function consume(client: DuckDBConnection, limit: number): Promise<boolean> {
  const found = (await client.runAndReadAll("SELECT count(*) AS n FROM t")).getRowObjectsJS();
  if (Number(found[0]?.n) >= limit) return false;
  await client.run("INSERT INTO t (id) VALUES (7)");
  return true;
}

async function crowd(
  call: (i: number) => Promise<boolean>,
  calls = 300,
): Promise<{ granted: number; rows: number }> {
  await a?.run("DELETE FROM t");
  const granted = await Promise.all(Array.from({ length: calls }, (_, i) => call(i)));
  const [row] = await rows("SELECT count(*) AS n FROM t");
  return { granted: granted.filter(Boolean).length, rows: Number((row as { n: bigint }).n) };
}

describe("300 check-then-write calls of one user, limit 100", () => {
  const exact = { granted: 100, rows: 100 };
  const lock = key("quota", 1);

  test("exactly 100 with the lock, from two instances of Holdfast", async () => {
    const call = (i: number) =>
      (i % 2 ? hf : other).transaction({ lock, wait: 60_000 }, (tx) => consume(tx.client, 100));
    expect(await crowd(call)).toEqual(exact);
  });

  test("exactly 20 of 60 where half of them lock in the middle: those whose snapshot is older run again", async () => {
    let most = 0;
    const call = (i: number) => {
      const instanceOf = i % 2 ? hf : other;
      if (i % 4 < 2) return instanceOf.transaction({ lock, wait: 60_000 }, (tx) => consume(tx.client, 20));
      return instanceOf.transaction({ retry: { attempts: 1000, maxMs: 50 } }, async (tx) => {
        most = Math.max(most, tx.attempt);
        await tx.query(sql`SELECT count(*) AS n FROM t`);
        await tx.lock(lock, { wait: 60_000 });
        return consume(tx.client, 20);
      });
    };
    expect(await crowd(call, 60)).toEqual({ granted: 20, rows: 20 });
    expect(most).toBeGreaterThan(1);
  });

  test("exactly 100 where half of them are transactions of the caller's own", async () => {
    const own = async (i: number): Promise<boolean> => {
      const connection = await instance.connect();
      try {
        for (;;) {
          await connection.run("BEGIN");
          try {
            await (i % 4 === 0 ? hf : other).join(connection).lock(lock, { wait: 60_000 });
            const granted = await consume(connection, 100);
            await connection.run("COMMIT");
            return granted;
          } catch (error) {
            await connection.run("ROLLBACK").catch(() => {});
            if ((error as { retryable?: boolean }).retryable || hf.classify(error) === "serialization")
              continue;
            throw error;
          }
        }
      } finally {
        connection.closeSync();
      }
    };
    const call = (i: number) =>
      i % 2 ? hf.transaction({ lock, wait: 60_000 }, (tx) => consume(tx.client, 100)) : own(i);
    expect(await crowd(call)).toEqual(exact);
  });

  // The same without the lock must show the bug, or it would prove nothing.
  test("more than 100 without it", async () => {
    const { rows: count } = await crowd(() => hf.transaction((tx) => consume(tx.client, 100)));
    expect(count).toBeGreaterThan(100);
  });
});

describe("read, add one, write: 4 callers of two instances", () => {
  const add = async (client: DuckDBConnection) => {
    const found = (await client.runAndReadAll("SELECT n FROM t WHERE id = 1")).getRowObjectsJS();
    const n = Number(found[0]?.n);
    if (Math.random() < 0.1) throw new Error("on purpose");
    // Not the column that anybody else writes at the same time, so that no conflict helps.
    await client.run(`INSERT INTO t (id, n) VALUES (3, ${n})`);
    await client.run("DELETE FROM t WHERE id = 1");
    await client.run(`INSERT INTO t (id, n) VALUES (1, ${n + 1})`);
  };
  const kinds: Record<string, (from: Holdfast<DuckDBConnection>, i: number) => Promise<unknown>> = {
    lock: (from) => from.transaction({ lock: key("counter"), wait: 60_000 }, async (tx) => add(tx.client)),
    "lease and fence": async (from) => {
      await using lease = await from.lease(key("counter"), { wait: 60_000 });
      await from.transaction(async (tx) => {
        await fenced(tx, lease);
        await add(tx.client);
      });
    },
    version: (from) =>
      versioned<{ id: number; n: number }>(from, "t", { key: "id", attempts: 1000 }).update(1, ({ n }) => {
        if (Math.random() < 0.1) throw new Error("on purpose");
        return { n: n + 1 };
      }),
    once: (from, i) =>
      once(from, ["counter", Math.floor(i / 2)], (tx) =>
        tx.transaction({ lock: key("counter") }, (inner) => add(inner.client)),
      ),
  };

  test.each(["lock", "lease and fence", "version"])("%s", async (kind) => {
    let done = 0;
    let left = 200;
    const caller = async (from: Holdfast<DuckDBConnection>) => {
      while (left-- > 0) {
        try {
          await kinds[kind]?.(from, left);
          done++;
        } catch (error) {
          expect(String(error)).toMatch(/on purpose/);
        }
      }
    };
    await Promise.all([hf, other, hf, other].map(caller));
    const [row] = await rows("SELECT max(n) AS n FROM t WHERE id = 1");
    expect(done).toBeGreaterThan(100);
    expect((row as { n: number }).n).toBe(done);
  });

  test("once: two of each message, each counts once", async () => {
    const calls = Array.from({ length: 60 }, async (_, i) => {
      for (;;) {
        try {
          return await kinds["once"]?.(i % 2 ? hf : other, i);
        } catch (error) {
          // What locks in the middle may have to begin again, and what failed on purpose is sent again.
          if (!/on purpose|concurrent transaction/.test(String(error))) throw error;
        }
      }
    });
    await Promise.all(calls);
    const [row] = await rows("SELECT max(n) AS n FROM t WHERE id = 1");
    expect((row as { n: number }).n).toBe(30);
  });
});

test("a lock of a key that is new, in the middle of a transaction, shows whose snapshot is older", async () => {
  const lock = key("brand new");
  const begun = Promise.withResolvers<void>();
  const taken = Promise.withResolvers<void>();
  let attempts = 0;
  // Its snapshot is older than the key's row: nobody has held it, so it is granted at once.
  const first = hf.transaction(async (tx) => {
    expect(tx.attempt).toBe(1);
    await tx.query(sql`SELECT count(*) AS n FROM t`);
    await tx.lock(lock);
    taken.resolve();
    await begun.promise;
    await tx.query(sql`INSERT INTO t (id) VALUES (77)`);
  });
  await taken.promise;
  // This one's snapshot lies between the row's making and the first one's COMMIT.
  const second = other.transaction(async (tx) => {
    attempts = tx.attempt;
    await tx.query(sql`SELECT count(*) AS n FROM t`);
    begun.resolve();
    await first;
    await tx.lock(lock);
    return (await tx.query(sql`SELECT id FROM t WHERE id = 77`)).length;
  });
  expect(await second).toBe(1);
  expect(attempts).toBe(2);
});

test("a key is locked anew by each transaction of one connection of the caller's", async () => {
  const [lock, more] = [key("again"), key("more")];
  const own = b as DuckDBConnection;
  // Keys that nobody has locked before have no row yet, and a transaction that has begun would not see it.
  await hf.transaction({ lock: [lock, more] }, async () => {});
  for (let i = 0; i < 2; i++) {
    await own.run("BEGIN");
    const joined = hf.join(own);
    await joined.lock(lock);
    await joined.lock(lock, { wait: "nowait" });
    await joined.lock([lock, more], { wait: "nowait" });
    for (const each of [lock, more])
      expect(await other.tryLock(each, async () => {})).toEqual({ acquired: false });
    await own.run("COMMIT");
    for (const each of [lock, more])
      expect(await other.tryLock(each, async () => {})).toMatchObject({ acquired: true });
  }
  await other.transaction({ lock }, async () => {
    await own.run("BEGIN");
    expect(await hf.join(own).tryLock(lock)).toBe(false);
    await own.run("ROLLBACK");
  });
});

test("a transaction that has failed cannot be taken for one that was kept", async () => {
  await a?.run("CREATE OR REPLACE TABLE u (id integer PRIMARY KEY)");
  const swallowing = hf.transaction(async (tx) => {
    await tx.client.run("INSERT INTO u VALUES (1)");
    await tx.client.run("INSERT INTO u VALUES (1)").catch(() => {});
  });
  await expect(swallowing).rejects.toMatchObject({ code: "HF_TRANSACTION_ABORTED" });
  await hf.transaction((tx) => tx.client.run("INSERT INTO u VALUES (1)"));
  // Two that insert the same key meet at COMMIT.
  await a?.run("BEGIN");
  await a?.run("INSERT INTO u VALUES (2)");
  const second = hf.transaction(async (tx) => {
    await tx.client.run("INSERT INTO u VALUES (2)");
    await a?.run("COMMIT");
  });
  expect(isUniqueViolation(await second.catch((error: unknown) => error))).toBe(true);
  expect(await rows("SELECT count(*)::integer AS n FROM u")).toEqual([{ n: 2 }]);
});

test("a lease that a caller's own transaction relies on is not taken over before its end", async () => {
  const lock = key("relied");
  const lease = await hf.lease(lock, { ttl: 200, renew: false });
  await b?.run("BEGIN");
  await fenced(hf.join(b as DuckDBConnection), lease);
  while ((await other.leases(lock)).length > 0) await new Promise((resolve) => setTimeout(resolve, 20));
  expect(await other.lease(lock, { wait: "skip" })).toBeUndefined();
  await b?.run("COMMIT");
  const taken = await other.lease(lock, { wait: 60_000 });
  // A transaction that has seen the lease as its own before it was taken must not pass.
  await b?.run("BEGIN");
  await b?.run("SELECT * FROM holdfast_lease");
  await taken.release();
  await expect(fenced(hf.join(b as DuckDBConnection), taken)).rejects.toMatchObject({
    code: "HF_STALE_FENCE",
  });
  await b?.run("ROLLBACK");
});

test("two objects of one database, as fromCache gives them, know of each other", async () => {
  const folder = await mkdtemp(join(tmpdir(), "holdfast-duckdb-"));
  const made = await Promise.all([1, 2].map(() => DuckDBInstance.fromCache(join(folder, "test.db"))));
  const [here, there] = made.map((each) => holdfast(fromDuckdb(each))) as [typeof hf, typeof hf];
  await Promise.all([here.migrate(), there.migrate()]);
  const lock = key("shared file");
  await here.transaction({ lock }, async () => {
    expect(await there.tryLock(lock, async () => {})).toEqual({ acquired: false });
  });
  const lease = await here.lease(lock, { ttl: 100, renew: false });
  await here.transaction(async (tx) => {
    await fenced(tx, lease);
    while ((await there.leases(lock)).length > 0) await new Promise((resolve) => setTimeout(resolve, 20));
    expect(await there.lease(lock, { wait: "skip" })).toBeUndefined();
  });
  await (await there.lease(lock, { wait: 60_000 })).release();
  await Promise.all([here.close(), there.close()]);
  for (const each of made) each.closeSync();
  await rm(folder, { recursive: true, force: true });
});

test("fences grow from one start of the process to the next", async () => {
  const folder = await mkdtemp(join(tmpdir(), "holdfast-duckdb-"));
  let last = 0;
  for (let start = 0; start < 3; start++) {
    const own = await DuckDBInstance.create(join(folder, "test.db"));
    const here = holdfast(fromDuckdb(own));
    await here.migrate();
    const lease = await here.lease(key("grow"), { ttl: 100, wait: 60_000 });
    expect(lease.fence).toBeGreaterThan(last);
    last = lease.fence;
    await here.close();
    own.closeSync();
  }
  await rm(folder, { recursive: true, force: true });
});

test("who holds what, and who waits for whom", async () => {
  const lock = key("seen");
  await hf.transaction({ lock }, async () => {
    const waiting = other.transaction({ lock, wait: 60_000 }, async () => {});
    let found = await hf.inspect();
    while (found.waiters.length === 0) found = await hf.inspect();
    expect(found.holders).toMatchObject([{ kind: "lock row", name: "seen", granted: true }]);
    expect(found.chains).toMatchObject([{ holds: ["seen"], waiters: [{ waiters: [] }] }]);
    void waiting.catch(() => {});
  });
  await hf.transaction({ lock, wait: 60_000 }, async () => {});
});

test("errors are known by their messages: there are no codes", async () => {
  await a?.run("CREATE OR REPLACE TABLE v (id integer PRIMARY KEY, n integer CHECK (n < 100))");
  await a?.run("CREATE OR REPLACE TABLE w (v integer REFERENCES v (id))");
  await a?.run("INSERT INTO v VALUES (1, 1)");
  const failure = async (text: string, options = {}) =>
    hf.classify(
      await hf
        .transaction({ retry: false, ...options }, (tx) => tx.query(sql.raw(text)))
        .catch((error: unknown) => error),
    );
  expect(await failure("INSERT INTO v VALUES (1, 1)")).toBe("unique");
  expect(await failure("INSERT INTO v VALUES (2, 100)")).toBe("check");
  expect(await failure("INSERT INTO w VALUES (9)")).toBe("foreign-key");
  expect(await failure("INSERT INTO v VALUES (3, 3)", { readOnly: true })).toBe("read-only");
  const stopped = hf.transaction({ deadline: 100 }, (tx) =>
    tx.query(
      sql.raw("SELECT count(*) FROM range(100000000) x, range(1000) y WHERE (x.range * y.range) % 7 = 3"),
    ),
  );
  const error = (await stopped.catch((e: unknown) => e)) as Error;
  expect(error).toMatchObject({ code: "HF_DEADLINE" });
  expect(hf.classify(error.cause)).toBe("canceled");
});

// The database knows nothing of waits, so nobody else would end it.
test("who would wait in a circle begins again", async () => {
  for (let i = 0; i < 10; i++) {
    const [one, two] = [key("circle", i, "a"), key("circle", i, "b")];
    const both = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    let attempts = 0;
    const run = (from: Holdfast<DuckDBConnection>, mine: number) =>
      from.transaction({ lock: mine === 0 ? one : two }, async (tx) => {
        attempts++;
        both[mine]?.resolve();
        await Promise.all(both.map(({ promise }) => promise));
        await tx.lock(mine === 0 ? two : one);
      });
    await Promise.all([run(hf, 0), run(other, 1)]);
    expect(attempts).toBeGreaterThan(2);
  }
});

// Of one that still works, DuckDB ends the process, now or later: it writes where it must not.
test("a connection is closed when the last statement on it has ended", async () => {
  const script = `const { DuckDBInstance } = await import("@duckdb/node-api");
    const { holdfast, sql } = await import("holdfast");
    const { fromDuckdb } = await import("holdfast/duckdb");
    const instance = await DuckDBInstance.create(":memory:");
    for (let i = 0; i < 150; i++) {
      const hf = holdfast(fromDuckdb(instance), { hazards: "off" });
      await hf.transaction(async (tx) => {
        for (let k = 0; k < 4; k++) {
          tx.query(sql\`SELECT count(*) FROM range(100000)\`).catch(() => {});
          tx.client.run("SELECT count(*) FROM range(100000)").catch(() => {});
        }
      });
      await hf.close();
    }
    console.log("all closed");`;
  const args = ["--conditions=holdfast-source", "--input-type=module", "-e", script];
  const { stdout, stderr, signal } = spawnSync(process.execPath, args, {
    cwd: new URL(".", import.meta.url),
    encoding: "utf8",
    timeout: 60_000,
    killSignal: "SIGKILL",
  });
  expect({ stdout, signal }, stderr).toEqual({ stdout: "all closed\n", signal: null });
});

test("nowait for several keys does not wait for one that somebody takes between two of them", async () => {
  for (let i = 0; i < 20; i++) {
    const [one, two] = [key("between", i, "a"), key("between", i, "b")];
    const first = hf.tryLock([one, two], async () => "first");
    // It would wait for the first one's end, which waits for this.
    const second = other.tryLock(two, async () => void (await first));
    const [all] = await Promise.all([first, second]);
    expect(all.acquired || (await second).acquired).toBe(true);
  }
});
