/** `hf.transactionSync`: exact among processes, beside asynchronous transactions of the same one, and over when it returns. */
import { fork } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import Sqlite from "better-sqlite3";
import {
  FileBusyError,
  type Holdfast,
  LockNotAvailableError,
  LockTimeoutError,
  UnsupportedError,
  UsageError,
  holdfast,
  key,
  shared,
  sql,
} from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import type { SqliteHandle as Handle } from "./harness/sqlite-handle.ts";
import { eventually } from "./harness/wait.ts";

/** Each with one handle, and with a function that opens them. */
const clients = {
  "better-sqlite3, handles": (file: string) => fromBetterSqlite3(() => new Sqlite(file)),
  "better-sqlite3, one handle": (file: string) => fromBetterSqlite3(new Sqlite(file)),
  "node:sqlite, handles": (file: string) => fromNodeSqlite(() => new DatabaseSync(file)),
  "node:sqlite, one handle": (file: string) => fromNodeSqlite(new DatabaseSync(file)),
} as const;

describe.each(Object.keys(clients) as (keyof typeof clients)[])("%s", (client) => {
  let folder: string;
  let file: string;
  let hf: Holdfast<Handle>;
  const open = () => holdfast(clients[client](file) as never) as unknown as Holdfast<Handle>;
  const counted = () => hf.transactionSync((tx) => tx.query(sql`SELECT n FROM counter`)[0]?.["n"]);
  const add = (db: Handle, by = 1) => db.prepare("UPDATE counter SET n = n + ?").run(by);

  beforeEach(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-sync-"));
    file = join(folder, "test.db");
    const handle = new DatabaseSync(file);
    handle.exec(
      "PRAGMA journal_mode = WAL; CREATE TABLE counter (n integer); INSERT INTO counter VALUES (0)",
    );
    handle.close();
    hf = open();
  });

  afterEach(async () => {
    await hf.close();
    await rm(folder, { recursive: true });
  });

  test("commits what returns, and undoes what throws", () => {
    const lock = key("counter");
    const held = hf.transactionSync({ lock }, (tx) => {
      add(tx.client);
      return [tx.holds(lock), tx.holds(key("other"))];
    });
    expect(held).toEqual([true, false]);
    const mine = new Error("mine");
    const failing = () =>
      hf.transactionSync({ lock }, ({ client: db }) => {
        add(db);
        throw mine;
      });
    expect(failing).toThrow(mine);
    expect(counted()).toBe(1);
  });

  test("one inside another is a savepoint", () => {
    hf.transactionSync({ lock: key("outer") }, (outer) => {
      add(outer.client);
      const failing = () =>
        hf.transactionSync({ lock: key("inner") }, (inner) => {
          expect([inner.holds(key("outer")), inner.holds(key("inner"))]).toEqual([true, true]);
          add(inner.client, 10);
          throw new Error("undone");
        });
      expect(failing).toThrow("undone");
      hf.transactionSync((inner) => add(inner.client, 100));
    });
    expect(counted()).toBe(101);
  });

  test("a body that returns a promise is undone", async () => {
    const wrong = () =>
      hf.transactionSync(async ({ client: db }) => {
        add(db);
        await Promise.resolve();
        add(db);
      });
    expect(wrong).toThrow(UsageError);
    await new Promise((resolve) => setImmediate(resolve));
    expect(counted()).toBe(0);
  });

  test("what it was given is refused after it", () => {
    let kept: Handle | undefined;
    hf.transactionSync((tx) => void (kept = tx.client));
    expect(() => kept?.prepare("SELECT 1")).toThrow(/transaction is over/);
  });

  test("a body that commits by itself is told so", () => {
    const early = () => hf.transactionSync(({ client: db }) => db.exec("COMMIT"));
    expect(early).toThrow(expect.objectContaining({ code: "HF_TRANSACTION_ABORTED" }));
    expect(counted()).toBe(0);
  });

  test("an inner one that rolls all of it back throws its own error, and the outer one is told", () => {
    const mine = new Error("mine");
    const inner = () =>
      hf.transactionSync(({ client: db }) => {
        db.exec("ROLLBACK");
        throw mine;
      });
    const outer = () =>
      hf.transactionSync(({ client: db }) => {
        add(db);
        expect(inner).toThrow(mine);
      });
    expect(outer).toThrow(expect.objectContaining({ code: "HF_TRANSACTION_ABORTED" }));
    expect(counted()).toBe(0);
  });

  test("an iterator that was left open undoes it, and the next one goes on", async () => {
    let rows: Iterator<unknown> | undefined;
    const left = () =>
      hf.transactionSync(({ client: db }) => {
        add(db);
        rows = db.prepare("SELECT n FROM counter UNION ALL SELECT 2").iterate();
        rows.next();
      });
    // SQLite commits while somebody reads; better-sqlite3 refuses it.
    if (client.startsWith("better")) expect(left).toThrow(/busy executing/);
    else left();
    rows?.return?.();
    await eventually(() => {
      hf.transactionSync(({ client: db }) => add(db));
    });
    expect(counted()).toBe(client.startsWith("better") ? 1 : 2);
  });

  test("read-only is kept", () => {
    const writing = () => hf.transactionSync({ readOnly: true }, ({ client: db }) => add(db));
    expect(writing).toThrow(/readonly|read-only/);
    expect(hf.transactionSync({ readOnly: true }, (tx) => tx.query(sql`SELECT n FROM counter`))).toEqual([
      { n: 0 },
    ]);
    hf.transactionSync(({ client: db }) => add(db));
    expect(counted()).toBe(1);
  });

  test("an open transaction of this process is not waited for", async () => {
    const inside = await hf.transaction({ lock: key("counter") }, async (tx) => {
      add(tx.client);
      const other = open();
      try {
        expect(() => other.transactionSync({ lock: key("counter") }, () => {})).toThrow(FileBusyError);
      } finally {
        await other.close();
      }
      return () => hf.transactionSync(() => {});
    });
    expect(inside).not.toThrow();
    await hf.transaction(async () => {
      expect(() => hf.transactionSync(() => {})).toThrow(/inside the body of hf\.transaction/);
    });
    expect(counted()).toBe(1);
  });

  test("and those that came meanwhile go on after it", async () => {
    const all = Array.from({ length: 20 }, (_, i) =>
      i % 2 === 0
        ? hf.transaction({ lock: key("counter") }, async (tx) => {
            const { n } = tx.client.prepare("SELECT n FROM counter").get() as { n: number };
            await new Promise((resolve) => setImmediate(resolve));
            tx.client.prepare("UPDATE counter SET n = ?").run(n + 1);
          })
        : (async () => {
            await new Promise((resolve) => setTimeout(resolve, i));
            await eventually(() => {
              hf.transactionSync({ lock: key("counter") }, ({ client: db }) => add(db));
            });
          })(),
    );
    await Promise.all(all);
    expect(counted()).toBe(20);
  });

  test("what is wrong is refused", () => {
    const lock = key("counter");
    expect(() => hf.transactionSync({ lock: shared(lock) }, () => {})).toThrow(UnsupportedError);
    expect(() => hf.transactionSync({ lock: key.hashtext("counter") }, () => {})).toThrow(UnsupportedError);
    expect(() => hf.transactionSync({ lock, deadline: 1 } as never, () => {})).toThrow(UsageError);
    expect(() => hf.transactionSync(undefined as never)).toThrow(UsageError);
  });

  test("4 processes lose no update", { timeout: 120_000 }, async () => {
    const program = join(import.meta.dirname, "workers", "sqlite-sync.ts");
    const workers = Array.from({ length: 4 }, () =>
      fork(program, [client, file, "500"], { execArgv: ["--conditions=holdfast-source"] }),
    );
    // All at once, or the first would be done before the last begins.
    await Promise.all(workers.map((worker) => once(worker, "message")));
    const exits = workers.map(async (worker) => ((await once(worker, "exit")) as [number])[0]);
    for (const worker of workers) worker.send("go");
    const codes = await Promise.all(exits);
    expect(codes).toEqual([0, 0, 0, 0]);
    expect(counted()).toBe(2000);
  });

  test("another process is waited for, and named", { timeout: 60_000 }, async () => {
    const holder = fork(join(import.meta.dirname, "workers", "sqlite-sync.ts"), [client, file, "hold"], {
      execArgv: ["--conditions=holdfast-source"],
    });
    try {
      await once(holder, "message");
      const asked = (name: string, wait: number | "nowait") => () =>
        hf.transactionSync({ lock: key(name), wait }, () => {});
      expect(asked("counter", 50)).toThrow(LockTimeoutError);
      expect(asked("counter", "nowait")).toThrow(LockNotAvailableError);
      expect(asked("another", 50)).toThrow(FileBusyError);
      expect(hf.transactionSync({ readOnly: true }, (tx) => tx.query(sql`SELECT n FROM counter`))).toEqual([
        { n: 0 },
      ]);
      // It dies in the middle of its transaction.
      holder.kill("SIGKILL");
      await once(holder, "exit");
      hf.transactionSync({ lock: key("counter") }, ({ client: db }) => add(db));
      expect(counted()).toBe(1);
    } finally {
      holder.kill("SIGKILL");
    }
  });
});

test("a client whose calls are answered later refuses it", async () => {
  const pool = new Pool();
  const hf = holdfast(fromPg(pool));
  expect(() => hf.transactionSync(() => {})).toThrow(UnsupportedError);
  await hf.close();
  expect(() => hf.transactionSync(() => {})).toThrow(UnsupportedError);
  await pool.end();
});
