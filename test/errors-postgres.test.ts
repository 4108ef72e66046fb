/** What `hf.classify` makes of PostgreSQL's errors, each provoked on the server, through each client. */
import { type Failure, type Holdfast, HoldfastError, holdfast, sql } from "holdfast";
import { type ConformanceSite, execute } from "holdfast/testing";
import { Client } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { backends } from "./backends.ts";
import { type Place, missing, placeFor } from "./harness/places.ts";

const chosen = backends.filter(({ name }) =>
  ["pg", "pg on an older PostgreSQL", "postgres.js", "Prisma"].includes(name),
);

describe.each(chosen)("$name", (backend) => {
  const why = missing(backend);
  let place: Place;
  let site: ConformanceSite;
  let hf: Holdfast<unknown>;
  /** Somebody else. */
  let psql: Client;

  beforeAll(async () => {
    if (why !== undefined) return;
    place = await placeFor(backend);
    site = await backend.open(place.url);
    hf = holdfast(site.database, { retry: false });
    psql = new Client({ connectionString: place.url });
    await psql.connect();
    await execute(
      site,
      sql`CREATE TABLE parent (id integer PRIMARY KEY, n integer NOT NULL CHECK (n < 100))`,
    );
    await execute(
      site,
      sql`CREATE TABLE child (id integer PRIMARY KEY, parent_id integer NOT NULL REFERENCES parent (id))`,
    );
    await execute(site, sql`INSERT INTO parent VALUES (1, 1), (2, 2)`);
  });
  afterAll(async () => {
    await psql?.end();
    await site?.close();
    await place?.drop();
  });

  type Tx = Parameters<Parameters<Holdfast<unknown>["transaction"]>[1]>[0];

  /** What the client throws for a statement, before Holdfast makes an error of its own of it. */
  async function failure(
    body: (tx: Tx) => Promise<unknown>,
    options: object = {},
  ): Promise<Failure | undefined> {
    let thrown: unknown = "nothing was thrown";
    await hf
      .transaction(options, async (tx) => {
        try {
          await body(tx);
        } catch (error) {
          thrown = error;
          throw error;
        }
      })
      .catch(() => {});
    return hf.classify(thrown);
  }

  const provoked: Record<string, [Failure, (tx: Tx) => Promise<unknown>, object?]> = {
    "a second row with the same key": ["unique", (tx) => tx.query(sql`INSERT INTO parent VALUES (1, 1)`)],
    "a child without a parent": ["foreign-key", (tx) => tx.query(sql`INSERT INTO child VALUES (1, 77)`)],
    "a value that a CHECK forbids": ["check", (tx) => tx.query(sql`INSERT INTO parent VALUES (3, 100)`)],
    "a table that is not there": ["schema-missing", (tx) => tx.query(sql`SELECT 1 FROM nothing_here`)],
    "a write in a read-only transaction": [
      "read-only",
      (tx) => tx.query(sql`UPDATE parent SET n = 1`),
      { readOnly: true },
    ],
    "a statement after one that failed": [
      "aborted",
      async (tx) => {
        await tx.query(sql`SELECT 1 / 0`).catch(() => {});
        await tx.query(sql`SELECT 1`);
      },
    ],
    "a statement that took too long": [
      "canceled",
      async (tx) => {
        await tx.query(sql`SET LOCAL statement_timeout = 20`);
        await tx.query(sql`SELECT pg_sleep(5)::text`);
      },
    ],
    "a row that somebody else has locked": [
      "lock-timeout",
      async (tx) => {
        await psql.query("BEGIN; SELECT FROM parent WHERE id = 1 FOR UPDATE");
        try {
          await tx.query(sql`SELECT 1 FROM parent WHERE id = 1 FOR UPDATE NOWAIT`);
        } finally {
          await psql.query("ROLLBACK");
        }
      },
    ],
    "a row that has changed since the snapshot": [
      "serialization",
      async (tx) => {
        await tx.query(sql`SELECT 1 FROM parent`);
        await psql.query("UPDATE parent SET n = n + 1 WHERE id = 2");
        await tx.query(sql`UPDATE parent SET n = 0 WHERE id = 2`);
      },
      { isolation: "repeatable read" },
    ],
    "a session that was ended": [
      "lost",
      (tx) => tx.query(sql`SELECT pg_terminate_backend(pg_backend_pid())`),
    ],
  };

  test.for(Object.entries(provoked))("%s", async ([, [expected, body, options]], { skip }) => {
    skip(why !== undefined, why);
    expect(await failure(body, options)).toBe(expected);
  });

  test.for([
    ["53100", "HF_SERVER_FULL"],
    ["58030", "HF_STORAGE"],
    ["25006", "HF_REPLICA"],
    // A rule of the caller's own.
    ["23514", undefined],
  ])("COMMIT says %s: %s", async ([state, code], { skip }) => {
    skip(why !== undefined, why);
    await psql.query(`CREATE TABLE IF NOT EXISTS late (state text);
      CREATE OR REPLACE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'too late' USING ERRCODE = NEW.state; END $$;
      DROP TRIGGER IF EXISTS late ON late;
      CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()`);
    const call = hf.transaction((tx) => tx.query(sql`INSERT INTO late VALUES (${state})`));
    const error: unknown = await call.catch((e: unknown) => e);
    expect((error as Error).message).toContain("too late");
    expect(error instanceof HoldfastError ? error.code : undefined).toBe(code);
  });

  test("a deadline that interrupts a statement is told as the deadline", async ({ skip }) => {
    skip(why !== undefined, why);
    const call = hf.transaction({ deadline: 100 }, (tx) => tx.query(sql`SELECT pg_sleep(5)::text`));
    const error: unknown = await call.catch((e: unknown) => e);
    // Prisma ends the transaction by itself, at the same time. The server ends the session if our cancel request is 250 ms late.
    const byServer = ["deadline", "lost"].includes(hf.classify((error as Error).cause) ?? "");
    const state =
      backend.name === "Prisma" || byServer ? "" : "a statement that was still running was interrupted";
    expect(error).toMatchObject({ code: "HF_DEADLINE", message: expect.stringContaining(state) });
    expect((error as Error).message).toContain("did not end within its deadline of 100 ms");
    expect((error as Error).message).not.toMatch(/cancel/i);
  });

  test.for([
    ["a lock_timeout of the body's own is retried", "SET LOCAL lock_timeout = 20", "", 3],
    ["NOWAIT is not, though its code is the same", "SELECT 1", "NOWAIT", 1],
  ] as const)("%s", async ([, before, word, runs], { skip }) => {
    skip(why !== undefined, why);
    let attempts = 0;
    await psql.query("BEGIN; SELECT FROM parent WHERE id = 1 FOR UPDATE");
    try {
      const running = hf.transaction(
        { retry: { attempts: 3, baseMs: 1, on: ["lock-timeout"] } },
        async (tx) => {
          attempts++;
          await tx.query(sql.raw(before));
          await tx.query(sql.raw(`SELECT 1 FROM parent WHERE id = 1 FOR UPDATE ${word}`));
        },
      );
      expect(hf.classify(await running.catch((error: unknown) => error))).toBe("lock-timeout");
    } finally {
      await psql.query("ROLLBACK");
    }
    expect(attempts).toBe(runs);
  });

  test("two that wait for each other", async ({ skip }) => {
    skip(why !== undefined, why);
    const found: (Failure | undefined)[] = [];
    const inside = { one: false, two: false };
    const both = async () => {
      while (!inside.one || !inside.two) await new Promise((resolve) => setTimeout(resolve, 5));
    };
    const lock = async (which: keyof typeof inside, first: number, second: number) => {
      found.push(
        await failure(async (tx) => {
          await tx.query(sql`SELECT 1 FROM parent WHERE id = ${first}::text::int FOR UPDATE`);
          inside[which] = true;
          await both();
          await tx.query(sql`SELECT 1 FROM parent WHERE id = ${second}::text::int FOR UPDATE`);
        }),
      );
    };
    await Promise.all([lock("one", 1, 2), lock("two", 2, 1)]);
    expect(found).toContain("deadlock");
  });
});
