/** What MySQL and MariaDB say when something goes wrong, provoked for real, and what Holdfast takes it for. */
import { type Holdfast, fenced, holdfast, isRetryable, isUniqueViolation, key, once, sql } from "holdfast";
import { type ConformanceSite, execute } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { backends } from "./backends.ts";
import { type Place, missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

/** What the connections of both clients have in common. */
interface Native {
  query(text: string): Promise<unknown>;
  readonly threadId: number;
}

// Those whose native handle is the driver's own.
const chosen = backends.filter(({ server, orm }) => !orm && (server === "mariadb" || server === "mysql"));

describe.each(chosen)("$name", (backend) => {
  const why = missing(backend);
  const maria = backend.server === "mariadb";
  let place: Place;
  let site: ConformanceSite;
  let hf: Holdfast<unknown>;

  beforeAll(async () => {
    if (why !== undefined) return;
    place = await placeFor(backend);
    site = await backend.open(place.url);
    hf = holdfast(site.database);
    const statements = [
      "CREATE TABLE item (id int NOT NULL PRIMARY KEY, n int NOT NULL, CONSTRAINT few CHECK (n < 1000)) ENGINE=InnoDB",
      "CREATE TABLE part (id int NOT NULL PRIMARY KEY, item int NOT NULL, FOREIGN KEY (item) REFERENCES item (id)) ENGINE=InnoDB",
      "INSERT INTO item VALUES (1, 0), (2, 0)",
      "INSERT INTO part VALUES (1, 1)",
    ];
    for (const text of statements) await execute(site, sql.raw(text));
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  afterAll(async () => {
    await site?.close();
    await place?.drop();
  });

  const on = <T>(body: (native: Native) => Promise<T>) => site.withIdle((native) => body(native as Native));

  /** What becomes of a statement, and of the transaction it was in. */
  async function failing(native: Native, ...texts: string[]): Promise<unknown> {
    try {
      for (const text of texts) await native.query(text);
    } catch (error) {
      return error;
    } finally {
      await native.query("ROLLBACK").catch(() => {});
    }
    throw new Error(`nothing went wrong: ${texts.join("; ")}`);
  }

  /** Runs a body while another connection holds row 1. */
  const whileLocked = <T>(body: (native: Native) => Promise<T>) =>
    on(async (holder) => {
      await holder.query("START TRANSACTION");
      await holder.query("SELECT * FROM item WHERE id = 1 FOR UPDATE");
      try {
        return await on(body);
      } finally {
        await holder.query("ROLLBACK");
      }
    });

  const waiting = (id: number) =>
    eventually(async () => {
      const state = await execute(
        site,
        sql`SELECT command AS command, time_ms AS ms, info AS info FROM (SELECT command, ${maria ? sql.raw("time_ms") : sql.raw("time * 1000 AS time_ms")}, info FROM information_schema.processlist WHERE id = ${id}) p`,
      );
      return /FOR UPDATE|GET_LOCK/.test(String(state[0]?.info));
    });

  test("a deadlock", async () => {
    const results = await on((a) =>
      on(async (b) => {
        for (const each of [a, b]) await each.query("START TRANSACTION");
        await a.query("UPDATE item SET n = n + 1 WHERE id = 1");
        await b.query("UPDATE item SET n = n + 1 WHERE id = 2");
        const both = await Promise.allSettled([
          a.query("UPDATE item SET n = n + 1 WHERE id = 2"),
          b.query("UPDATE item SET n = n + 1 WHERE id = 1"),
        ]);
        for (const each of [a, b]) await each.query("ROLLBACK");
        return both;
      }),
    );
    const [rejected] = results.filter(({ status }) => status === "rejected") as PromiseRejectedResult[];
    expect(hf.classify(rejected?.reason)).toBe("deadlock");
    expect(isRetryable(rejected?.reason)).toBe(true);
  });

  test("a deadlock among locks of sessions", async () => {
    const results = await on((a) =>
      on(async (b) => {
        const name = (which: string) => `'${which} ${backend.name}'`;
        await a.query(`SELECT GET_LOCK(${name("x")}, 0)`);
        await b.query(`SELECT GET_LOCK(${name("y")}, 0)`);
        // Whoever is refused lets go, so that the other one need not wait for long.
        const cross = async (native: Native, own: string, other: string) => {
          try {
            await native.query(`SELECT GET_LOCK(${name(other)}, 20)`);
            await native.query(`SELECT RELEASE_LOCK(${name(other)})`);
          } finally {
            await native.query(`SELECT RELEASE_LOCK(${name(own)})`);
          }
        };
        return Promise.allSettled([cross(a, "x", "y"), cross(b, "y", "x")]);
      }),
    );
    const rejected = results.filter(({ status }) => status === "rejected") as PromiseRejectedResult[];
    // Two that look for the cycle at the same instant may both give way.
    expect(new Set(rejected.map(({ reason }) => hf.classify(reason)))).toEqual(new Set(["deadlock"]));
  });

  test("a wait that is over, and one that was not to begin", async () => {
    const errors = await whileLocked(async (native) => {
      await native.query("SET SESSION innodb_lock_wait_timeout = 1");
      const lock = "SELECT * FROM item WHERE id = 1 FOR UPDATE";
      const found = [
        await failing(native, "START TRANSACTION", lock),
        await failing(native, "START TRANSACTION", `${lock} NOWAIT`),
      ];
      await native.query("SET SESSION innodb_lock_wait_timeout = 50");
      return found;
    });
    expect(errors.map((error) => hf.classify(error))).toEqual(["lock-timeout", "lock-timeout"]);
  });

  test("a statement that was ended", async () => {
    const error = await whileLocked(async (native) => {
      const failed = failing(native, "START TRANSACTION", "SELECT * FROM item WHERE id = 1 FOR UPDATE");
      await waiting(native.threadId);
      await execute(site, sql.raw(`KILL QUERY ${native.threadId}`));
      return failed;
    });
    expect(hf.classify(error)).toBe("canceled");
    const slow = maria
      ? "SET STATEMENT max_statement_time = 0.05 FOR SELECT SLEEP(20)"
      : "SELECT /*+ MAX_EXECUTION_TIME(50) */ count(*) FROM information_schema.columns a, information_schema.columns b, information_schema.columns c";
    expect(hf.classify(await on((native) => failing(native, slow)))).toBe("canceled");
  });

  test("a connection that was ended, and one that has ended", async () => {
    const errors = await whileLocked(async (native) => {
      const running = native.query("SELECT * FROM item WHERE id = 1 FOR UPDATE").catch((e: unknown) => e);
      await waiting(native.threadId);
      await execute(site, sql.raw(`KILL CONNECTION ${native.threadId}`));
      return [await running, await native.query("SELECT 1").catch((e: unknown) => e)];
    });
    expect(errors.map((error) => hf.classify(error))).toEqual(["lost", "lost"]);
  });

  test("violated constraints", async () => {
    const said = async (text: string) => hf.classify(await on((native) => failing(native, text)));
    expect(await said("INSERT INTO item VALUES (1, 1)")).toBe("unique");
    expect(await said("DELETE FROM item WHERE id = 1")).toBe("foreign-key");
    expect(await said("INSERT INTO part VALUES (9, 99)")).toBe("foreign-key");
    expect(await said("UPDATE item SET n = 1000 WHERE id = 1")).toBe("check");
    const duplicate = await on((native) => failing(native, "INSERT INTO item VALUES (1, 1)"));
    expect(isUniqueViolation(duplicate)).toBe(true);
  });

  test("a transaction that may not write, and a table that is not there", async () => {
    const write = await on((native) =>
      failing(native, "START TRANSACTION READ ONLY", "UPDATE item SET n = 1 WHERE id = 1"),
    );
    expect(hf.classify(write)).toBe("read-only");
    expect(hf.classify(await on((native) => failing(native, "SELECT * FROM nothing")))).toBe(
      "schema-missing",
    );
  });

  test("a row that has changed since the snapshot, where the server tells", async () => {
    const outcome = await on(async (native) => {
      if (maria) await native.query("SET SESSION innodb_snapshot_isolation = ON");
      await native.query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ");
      await native.query("START TRANSACTION");
      await native.query("SELECT * FROM item");
      await execute(site, sql`UPDATE item SET n = n + 1 WHERE id = 2`);
      const update = await native.query("UPDATE item SET n = n + 1 WHERE id = 2").catch((e: unknown) => e);
      await native.query("ROLLBACK");
      if (maria) await native.query("SET SESSION innodb_snapshot_isolation = OFF");
      return update instanceof Error ? hf.classify(update) : "nothing";
    });
    expect(outcome).toBe(maria ? "serialization" : "nothing");
  });

  test("tables of ours that are not there are named, with what to do", async () => {
    const missingSchema = { code: "HF_SCHEMA_MISSING", retryable: false };
    await expect(hf.transaction({ lock: key("a") }, async () => {})).rejects.toMatchObject(missingSchema);
    await expect(hf.lease(key("a"))).rejects.toMatchObject(missingSchema);
    await expect(once(hf, "a", async () => 1)).rejects.toMatchObject(missingSchema);
    await hf.migrate();
    const lease = await hf.lease(key("a"));
    await execute(site, sql`DROP TABLE holdfast_grip`);
    await expect(hf.transaction((tx) => fenced(tx, lease))).rejects.toMatchObject(missingSchema);
  });

  test("a COMMIT that finds no room, and one that cannot write", async () => {
    await hf.migrate();
    for (const [errno, code] of [
      [1021, "HF_SERVER_FULL"],
      [1114, "HF_SERVER_FULL"],
      [1026, "HF_STORAGE"],
    ] as const) {
      // Where a transaction with a lock writes down that it is committed.
      for (const event of ["INSERT", "UPDATE"])
        await execute(
          site,
          sql.raw(`CREATE TRIGGER no_${event} BEFORE ${event} ON holdfast_committed FOR EACH ROW
            SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = ${errno}, MESSAGE_TEXT = 'no room'`),
        );
      await expect(hf.transaction({ lock: key("room") }, async () => {})).rejects.toMatchObject({ code });
      for (const event of ["INSERT", "UPDATE"]) await execute(site, sql.raw(`DROP TRIGGER no_${event}`));
    }
  });
});
