/** What a body prepares is prepared once for its handle, and seems to be prepared anew in each transaction. */
import { mkdtemp, rm } from "node:fs/promises";
import { DatabaseSync } from "node:sqlite";
import { tmpdir } from "node:os";
import { join } from "node:path";
import Sqlite from "better-sqlite3";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import type { SqliteHandle as Handle } from "./harness/sqlite-handle.ts";

const clients = {
  "better-sqlite3": (file: string) => {
    const open = () => counted(new Sqlite(file)) as unknown as Sqlite.Database;
    return holdfast(fromBetterSqlite3(open)) as unknown as Holdfast<Handle>;
  },
  "node:sqlite": (file: string) => {
    const open = () => counted(new DatabaseSync(file)) as unknown as DatabaseSync;
    return holdfast(fromNodeSqlite(open)) as unknown as Holdfast<Handle>;
  },
};

/** Texts that were prepared. */
let prepared: string[] = [];

function counted(handle: Handle): Handle {
  const { prepare } = handle;
  handle.prepare = (text) => {
    prepared.push(text);
    return prepare.call(handle, text);
  };
  return handle;
}

const text = "SELECT count(*) AS n FROM item WHERE id < ?";

describe.each(Object.keys(clients) as (keyof typeof clients)[])("%s", (client) => {
  let folder: string;
  let hf: Holdfast<Handle>;
  /** One after the other, on one handle. */
  const inside = <T>(body: (db: Handle) => T): Promise<T> =>
    hf.transaction({ lock: key("one") }, async ({ client: db }) => body(db));

  beforeEach(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-statements-"));
    hf = clients[client](join(folder, "test.db"));
    await inside((db) => {
      db.exec("CREATE TABLE item (id integer NOT NULL UNIQUE)");
      for (const id of [1, 2, 3]) db.prepare("INSERT INTO item VALUES (?)").run(id);
    });
    prepared = [];
  });

  afterEach(async () => {
    await hf.close();
    await rm(folder, { recursive: true });
  });

  const times = () => prepared.filter((each) => each === text).length;

  test("once for many transactions", async () => {
    for (let i = 0; i < 5; i++) expect(await inside((db) => db.prepare(text).get(3))).toEqual({ n: 2 });
    expect(times()).toBe(1);
  });

  test("two of one text in one transaction are two", async () => {
    await inside((db) => {
      const [one, other] = ["SELECT id FROM item ORDER BY id", "SELECT id FROM item ORDER BY id"].map(
        (each) => db.prepare(each),
      );
      const rows = one?.iterate();
      expect(rows?.next().value).toEqual({ id: 1 });
      expect(other?.get()).toEqual({ id: 1 });
      expect(rows?.next().value).toEqual({ id: 2 });
      rows?.return?.();
    });
  });

  test("one that was left in the middle of its rows, or that failed, is no other's", async () => {
    for (const n of [1, 2]) {
      await inside((db) => {
        const rows = db.prepare("SELECT id FROM item ORDER BY id").iterate();
        expect(rows.next().value).toEqual({ id: 1 });
        rows.return?.();
      });
      await expect(
        inside((db) => {
          db.prepare("INSERT INTO item VALUES (?)").run(10 * n);
          db.prepare("INSERT INTO item VALUES (?)").run(1);
        }),
      ).rejects.toThrow(/UNIQUE/);
      expect(await inside((db) => db.prepare(text).get(1000))).toEqual({ n: 3 });
    }
  });

  test("how its rows come is not passed on", async () => {
    type Odd = { raw?(): Odd; setReturnArrays?(on: boolean): void; get(value: number): unknown };
    await inside((db) => {
      const statement = db.prepare(text) as unknown as Odd;
      statement.raw?.();
      statement.setReturnArrays?.(true);
      expect(statement.get(3)).toEqual([2]);
    });
    expect(await inside((db) => db.prepare(text).get(3))).toEqual({ n: 2 });
  });

  test("a table that was changed meanwhile is seen as it is", async () => {
    const all = "SELECT * FROM item WHERE id = 1";
    expect(await inside((db) => db.prepare(all).get())).toEqual({ id: 1 });
    await inside((db) => db.exec("ALTER TABLE item ADD COLUMN name text DEFAULT 'x'"));
    expect(await inside((db) => db.prepare(all).get())).toEqual({ id: 1, name: "x" });
  });

  test("one that a body has kept is refused in the next transaction, which has it by then", async () => {
    let kept: ReturnType<Handle["prepare"]> | undefined;
    await inside((db) => {
      kept = db.prepare(text);
      kept.get(3);
    });
    await inside((db) => {
      expect(db.prepare(text).get(3)).toEqual({ n: 2 });
      expect(() => kept?.get(3)).toThrow(/transaction is over/);
    });
    expect(times()).toBe(1);
  });
});

test("what a handle was told meanwhile counts", async () => {
  const hf = holdfast(fromBetterSqlite3(new Sqlite(":memory:")));
  const large = "SELECT 9007199254740993 AS n";
  const asked = () => hf.transaction(async ({ client: db }) => db.prepare(large).get());
  await asked();
  await hf.transaction(async ({ client: db }) => void db.defaultSafeIntegers(true));
  expect(await asked()).toEqual({ n: 9007199254740993n });
  await hf.close();
});
