/** How locks are kept is the same for everybody: written down in the database, and changed in one way only. */
import { type Holdfast, StrategyError, changeStrategy, holdfast, key, strategyOf } from "holdfast";
import { trail } from "holdfast/audit";
import { fromPg } from "holdfast/pg";
import { PGlite } from "@electric-sql/pglite";
import { fromPglite } from "holdfast/pglite";
import { Client, Pool, type PoolClient } from "pg";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { createDatabase } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { Spent, StrategyArg } from "./workers/strategy-spend.ts";

const never = async () => expect.unreachable("entered");
const closing: (() => Promise<unknown>)[] = [];

async function place() {
  const found = await createDatabase("postgres");
  closing.push(() => found.drop());
  const open = (max = 8) => {
    const pool = new Pool({ connectionString: found.url, max });
    closing.push(() => pool.end());
    return pool;
  };
  const pool = open();
  await holdfast(fromPg(pool)).migrate();
  return { url: found.url, name: found.name, pool, open };
}

let here: Awaited<ReturnType<typeof place>>;
beforeEach(async () => {
  here = await place();
});
afterEach(async () => {
  for (const close of closing.splice(0).toReversed()) await close();
});

const written = async (pool: Pool) =>
  (await pool.query("SELECT value, next FROM holdfast.agreed WHERE name = 'strategy'")).rows as unknown[];

describe("processes", () => {
  const limit = 20;

  async function spend(...of: readonly Pick<StrategyArg, "strategy">[]): Promise<Spent[]> {
    await here.pool.query("CREATE TABLE spent ()");
    const worker = new URL("./workers/strategy-spend.ts", import.meta.url);
    const arg = { url: here.url, calls: 20, limit };
    return Promise.all(of.map((each) => startWorker<Spent>(worker, { ...arg, ...each }).result));
  }

  test("that are told to keep locks in two ways: one of them is refused, and the limit holds", async () => {
    const all = await spend({ strategy: "lock row" }, { strategy: "transaction advisory" });
    expect(all.reduce((sum, { spent }) => sum + spent, 0)).toBe(limit);
    expect(all.map(({ refused }) => refused.length).toSorted((a, b) => a - b)).toEqual([0, 20]);
    expect(new Set(all.flatMap(({ refused }) => refused))).toEqual(new Set(["HF_STRATEGY"]));
    expect((await here.pool.query("SELECT FROM spent")).rowCount).toBe(limit);
  });

  test("that are not told keep them as the database says", async () => {
    await holdfast(fromPg(here.pool), { strategy: "lock row" }).lock(key("first"), async () => {});
    const all = await spend({}, { strategy: "lock row" }, {});
    expect(all.flatMap(({ refused }) => refused)).toEqual([]);
    expect((await here.pool.query("SELECT FROM spent")).rowCount).toBe(limit);
    expect((await holdfast(fromPg(here.pool)).capabilities()).transactionLocks).toBe("lock row");
  });
});

describe("an instance", () => {
  test("that is told otherwise is refused in every way to take a lock, and may look", async () => {
    await holdfast(fromPg(here.pool)).lock(key("a"), async () => {});
    expect(await written(here.pool)).toEqual([{ value: "transaction advisory", next: null }]);
    const byRows = holdfast(fromPg(here.pool), { strategy: "lock row" });
    for (const call of [
      () => byRows.lock(key("a"), never),
      () => byRows.tryLock(key("a"), never),
      () => byRows.transaction((tx) => tx.lock(key("a"))),
      () => byRows.hold(key("a")),
      async () => {
        const client = await here.pool.connect();
        try {
          await client.query("BEGIN");
          await byRows.join(client).lock(key("a"));
        } finally {
          await client.query("ROLLBACK");
          client.release();
        }
      },
    ]) {
      const error: unknown = await call().then(never, (e: unknown) => e);
      expect(error).toBeInstanceOf(StrategyError);
      expect(error).toMatchObject({ code: "HF_STRATEGY", retryable: false });
      expect((error as Error).message).toMatch(/"transaction advisory".*"lock row".*holdfast strategy set/);
    }
    expect((await byRows.inspect()).holders).toEqual([]);
    expect(await strategyOf(byRows)).toEqual({ strategy: "transaction advisory", changingTo: undefined });
  });

  test("writes it down beside the transaction that it is asked in first, whatever becomes of that", async () => {
    const hf = holdfast(fromPg(here.pool));
    const client = await here.pool.connect();
    await client.query("BEGIN");
    await hf.join(client).lock(key("a"));
    // The call waits for it a moment only, and goes on.
    await eventually(async () => expect(await written(here.pool)).toHaveLength(1));
    await client.query("ROLLBACK");
    client.release();
    expect(await written(here.pool)).toHaveLength(1);
  });

  test("goes on where the pool has no other connection to write it down on", async () => {
    const pool = here.open(1);
    const hf = holdfast(fromPg(pool));
    const client = await pool.connect();
    await client.query("BEGIN");
    await hf.join(client).lock(key("a"));
    await client.query("COMMIT");
    client.release();
    await eventually(async () => {
      await hf.lock(key("a"), async () => {});
      expect(await written(here.pool)).toHaveLength(1);
    });
  });

  test("of a user who may not see it is refused, and the doctor says so", async () => {
    const role = `holdfast_blind_${here.name.slice(-8)}`;
    await here.pool.query(`CREATE ROLE ${role} LOGIN PASSWORD 'blind'`);
    const url = new URL(here.url);
    [url.username, url.password] = [role, "blind"];
    const blind = new Pool({ connectionString: url.href });
    try {
      await expect(holdfast(fromPg(blind)).lock(key("a"), never)).rejects.toMatchObject({
        code: "HF_ACCESS_DENIED",
        message: expect.stringMatching(/SELECT on .*holdfast\.agreed/),
      });
      expect(await written(here.pool)).toEqual([]);
      const { out } = await command(["doctor", "--json", "--only", "strategy", "--url", url.href]);
      expect(JSON.parse(out).findings).toMatchObject([
        { severity: "warning", what: `${role} may not read holdfast.agreed` },
      ]);
    } finally {
      await blind.end();
      await here.pool.query(`DROP ROLE ${role}`);
    }
  });

  test("of a client with one connection writes it down too", async () => {
    await using server = new PGlite();
    const hf = holdfast(fromPglite(server));
    await hf.migrate();
    await hf.lock(key("a"), async () => {});
    expect((await strategyOf(hf)).strategy).toBe("transaction advisory");
    await expect(
      holdfast(fromPglite(server), { strategy: "lock row" }).lock(key("a"), never),
    ).rejects.toBeInstanceOf(StrategyError);
  });
});

describe("a change", () => {
  test("that was left half done refuses locks, and can be taken back at once", async () => {
    const hf = holdfast(fromPg(here.pool));
    await hf.lock(key("a"), async () => {});
    await here.pool.query("UPDATE holdfast.agreed SET next = 'lock row' WHERE name = 'strategy'");
    const fresh = holdfast(fromPg(here.open()));
    await expect(fresh.lock(key("a"), never)).rejects.toMatchObject({ code: "HF_STRATEGY", retryable: true });
    await expect(fresh.lock(key("a"), never)).rejects.toThrow(/holdfast strategy/);
    expect((await fresh.inspect()).holders).toEqual([]);
    const { out: doctor } = await command(["doctor", "--json", "--only", "strategy", "--url", here.url]);
    expect(JSON.parse(doctor).findings).toMatchObject([
      { severity: "error", fix: 'holdfast strategy set "transaction advisory"' },
    ]);
    const shown = await command(["strategy", "--url", here.url]);
    expect(shown.out).toMatch(/being changed to "lock row"/);
    const { out } = await command([
      "strategy",
      "set",
      "transaction advisory",
      "--yes",
      "--json",
      "--url",
      here.url,
    ]);
    expect(JSON.parse(out)).toEqual({
      from: "transaction advisory",
      to: "transaction advisory",
      changed: true,
    });
    expect(await fresh.lock(key("a"), async () => 1)).toBe(1);
    expect(await changeStrategy(hf, "transaction advisory", { actor: "ada" })).toMatchObject({
      changed: false,
    });
  });

  test("that cannot be is refused", async () => {
    const hf = holdfast(fromPg(here.pool));
    await expect(changeStrategy(hf, "rows" as never, { actor: "ada" })).rejects.toThrow(/must be one of/);
    await expect(changeStrategy(hf, "database write lock", { actor: "ada" })).rejects.toMatchObject({
      code: "HF_UNSUPPORTED",
    });
    await expect(changeStrategy(hf, "lock row", {} as never)).rejects.toThrow(/actor/);
    const bare = await createDatabase("postgres");
    closing.push(() => bare.drop());
    const pool = new Pool({ connectionString: bare.url });
    closing.push(() => pool.end());
    await pool.query("DROP SCHEMA IF EXISTS holdfast CASCADE");
    await expect(changeStrategy(holdfast(fromPg(pool)), "lock row", { actor: "ada" })).rejects.toMatchObject({
      code: "HF_SCHEMA_MISSING",
    });
  });

  /** Locks one key after the other until it is told to end. Each lock is free. */
  function busy(hf: Holdfast<PoolClient>) {
    const kinds = new Set<string>();
    const stop = new AbortController();
    const run = async () => {
      for (let i = 0; !stop.signal.aborted; i++)
        try {
          await hf.lock(key("busy", i % 3), async () => {
            kinds.add((await hf.capabilities()).transactionLocks as string);
          });
        } catch (error) {
          kinds.add((error as { code?: string }).code ?? String(error));
          await new Promise((resolve) => setTimeout(resolve, 20));
        }
    };
    const done = run();
    closing.push(async () => {
      stop.abort();
      await done;
    });
    return { kinds, stop: () => stop.abort(), done };
  }

  // At the same time, since each takes half a minute.
  test("is done once nobody can have a lock of the old kind, and not while somebody has", async () => {
    const there = await place();
    /** In the way until the end. */
    const inTheWay = async () => {
      const hf = holdfast(fromPg(here.pool));
      await using held = await hf.hold(key("leader"));
      const error: unknown = await changeStrategy(hf, "lock row", { actor: "ada", wait: 100 }).then(
        never,
        (e: unknown) => e,
      );
      expect(error).toMatchObject({ code: "HF_STRATEGY" });
      expect((error as Error).message).toMatch(/Locks stay "transaction advisory".*sessions \d+/);
      expect(held.signal.aborted).toBe(false);
      expect(await written(here.pool)).toEqual([{ value: "transaction advisory", next: null }]);
      expect(await hf.lock(key("after"), async () => 1)).toBe(1);
      expect(await trail(hf)).toMatchObject([{ action: "strategy.set", actor: "ada", outcome: "failed" }]);
    };
    /** Somebody gets the old kind of lock after the change has begun, having waited for it since before. */
    const lateGrant = async () => {
      const hf = holdfast(fromPg(there.pool), { hazards: "count" });
      const other = holdfast(fromPg(there.open()));
      const lived = busy(other);
      const blocker = new Client({ connectionString: there.url });
      await blocker.connect();
      closing.push(() => blocker.end());
      await blocker.query("BEGIN");
      await hf.join(blocker as never).lock(key("late"));
      const late = hf
        .lock(key("late"), never, { wait: 120_000, deadline: 120_000 })
        .then(never, (e: unknown) => e);
      await eventually(async () => {
        const { rowCount } = await there.pool.query(
          "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        );
        expect(rowCount).toBe(1);
      });
      const changing = command([
        "strategy",
        "set",
        "lock row",
        "--yes",
        "--wait",
        "60000",
        "--note",
        "why not",
        "--url",
        there.url,
      ]);
      // Its first look: everybody's trust is over by then.
      await eventually(
        async () => {
          const { rowCount } = await there.pool.query(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'holdfast strategy%' AND query LIKE 'SELECT DISTINCT%pg_catalog.pg_locks%'",
          );
          expect(rowCount).toBeGreaterThan(0);
        },
        { timeout: 120_000 },
      );
      expect(await written(there.pool)).toEqual([{ value: "transaction advisory", next: "lock row" }]);
      await blocker.query("COMMIT");
      expect(await late).toMatchObject({ code: "HF_STRATEGY" });
      const { code, err } = await changing;
      expect(code, err).toBe(0);
      expect(await written(there.pool)).toEqual([{ value: "lock row", next: null }]);
      await eventually(() => lived.kinds.has("lock row"));
      lived.stop();
      await lived.done;
      expect([...lived.kinds]).toEqual(["transaction advisory", "HF_STRATEGY", "lock row"]);
      expect(await hf.lock(key("late"), async () => 1)).toBe(1);
      await expect(hf.hold(key("late"))).rejects.toThrow(/lease/);
      const [line] = await trail(hf);
      expect(line).toMatchObject({
        outcome: "done",
        details: { from: "transaction advisory", to: "lock row", note: "why not" },
      });
    };
    await Promise.all([inTheWay(), lateGrant()]);
  }, 200_000);
});
