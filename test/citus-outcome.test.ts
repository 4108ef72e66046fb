/**
 * A node of Citus commits, and its answer is lost on the way to the node that was asked: COMMIT is answered with an error. There is no Citus
 * here: a proxy puts the error in the place of the answer, after a plain server has committed.
 */
import { CommitUnknownError, holdfast, isUniqueViolation, key, once, sql, versioned } from "holdfast";
import { fromCitus } from "holdfast/citus";
import { fromDrizzle } from "holdfast/drizzle";
import { fromPg } from "holdfast/pg";
import { audited, trail } from "holdfast/audit";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { drizzle } from "drizzle-orm/node-postgres";
import { Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";

const committed = Buffer.from("C\0\0\0\u000bCOMMIT\0", "latin1");
const updated = Buffer.from("C\0\0\0\u000dUPDATE 1\0", "latin1");

function errorResponse(code: string, message: string): Buffer {
  const fields = Buffer.from(`SERROR\0VERROR\0C${code}\0M${message}\0\0`, "utf8");
  const head = Buffer.alloc(5);
  head.write("E");
  head.writeUInt32BE(fields.length + 4, 1);
  return Buffer.concat([head, fields]);
}

/** The next so many of these answers are errors. */
function spoil(proxy: Proxy, times: number, code: string, answer = committed): void {
  let left = times;
  proxy.rewrite((direction, chunk) => {
    const at = direction === "to-client" && left > 0 ? chunk.indexOf(answer) : -1;
    if (at < 0) return chunk;
    left--;
    const error = errorResponse(code, "connection to the remote node was lost");
    return Buffer.concat([chunk.subarray(0, at), error, chunk.subarray(at + answer.length)]);
  });
}

/** What is inserted from a SELECT of lists is copied to a node, and whatever goes wrong there has one code. */
function asCopied(proxy: Proxy): { readonly copied: number } {
  const seen = { copied: 0 };
  let copying = false;
  proxy.rewrite((direction, chunk) => {
    const text = chunk.toString("latin1");
    if (direction === "to-server") {
      const [last] =
        text.match(/(?:INSERT INTO [^ ]+ \([^)]*\) (?:VALUES|SELECT)|COMMIT|ROLLBACK)(?!.*INSERT INTO)/s) ??
        [];
      if (last !== undefined) copying = last.endsWith("SELECT");
      if (copying) seen.copied++;
      return chunk;
    }
    return copying ? Buffer.from(text.replaceAll("C23505\0", "CXX000\0"), "latin1") : chunk;
  });
  return seen;
}

const why = unavailable("postgres");
let database: TestDatabase;
let direct: Pool;
let proxy: Proxy;
let pool: Pool;

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("postgres");
  direct = new Pool({ connectionString: database.url, max: 4 });
  await holdfast(fromCitus(fromPg(direct))).migrate();
  await direct.query("CREATE TABLE effect (n int NOT NULL)");
  await direct.query(
    "CREATE TABLE account (id text PRIMARY KEY, n int NOT NULL CHECK (n < 100), version int NOT NULL)",
  );
  proxy = await startProxy({ port: Number(new URL(database.url).port) });
  pool = new Pool({ connectionString: proxy.url(database.url), max: 4 });
});
afterAll(async () => {
  await pool?.end();
  await proxy?.close();
  await direct?.end();
  await database?.drop();
});
beforeEach(async ({ skip }) => {
  skip(why !== undefined, why);
  proxy.rewrite(undefined);
  await direct.query("DELETE FROM effect");
});

/** 40001 too: the coordinator looks for conflicts after the node has committed. */
describe.each(["XX000", "08006", "58030", "57P01", "40001"])("%s", (code) => {
  test("what was applied is found again by its id, and never said not to be kept", async () => {
    await using hf = holdfast(fromCitus(fromPg(pool)));
    const uploads = quota(hf, { name: `uploads ${code}`, limit: 5 });
    const shop = stock(hf, { name: `shop ${code}` });
    await uploads.consume("ann");
    await shop.increase("CAP", 1);
    for (let i = 0; i < 3; i++) {
      spoil(proxy, 1, code);
      expect(await uploads.tryConsume("ann")).toMatchObject({ granted: true });
      spoil(proxy, 1, code);
      await shop.increase("CAP", 1);
    }
    proxy.rewrite(undefined);
    expect((await uploads.peek("ann")).used).toBe(4);
    expect((await shop.levels())[0]?.onHand).toBe(4);
  });

  test.each(["pg", "drizzle"])("a transaction through %s: nobody knows", async (client) => {
    const database = client === "pg" ? fromPg(pool) : fromDrizzle(drizzle(pool));
    await using hf = holdfast(fromCitus(database as ReturnType<typeof fromPg>));
    await hf.capabilities();
    spoil(proxy, 1, code);
    let runs = 0;
    const lost = hf.transaction({ lock: key("commit") }, async (tx) => {
      runs++;
      await tx.query(sql`INSERT INTO effect VALUES (1)`);
    });
    await expect(lost).rejects.toThrow(CommitUnknownError);
    // Nor that all was kept, or nothing: what is on the coordinator is undone if a node's answer is lost.
    await expect(lost).rejects.toThrow(/what it wrote on one node without what it wrote on another/);
    expect(runs).toBe(1);
    expect((await direct.query("SELECT n FROM effect")).rows).toHaveLength(1);
  });
});

describe.each(["XX000", "40001"])("%s in place of an answer to COMMIT", (code) => {
  const unknown = { code: expect.stringMatching(/^HF_(COMMIT|OUTCOME)_UNKNOWN$/) };

  test.each(["serializable", "repeatable read", "read committed"] as const)(
    "%s: nobody knows, and it does not run again",
    async (isolation) => {
      await using hf = holdfast(fromCitus(fromPg(pool)));
      await hf.capabilities();
      spoil(proxy, 1, code);
      let runs = 0;
      const lost = hf.transaction({ isolation }, async (tx) => {
        runs++;
        await tx.query(sql`INSERT INTO effect VALUES (1)`);
      });
      await expect(lost).rejects.toThrow(CommitUnknownError);
      expect(runs).toBe(1);
    },
  );

  test("once is done once", async () => {
    await using hf = holdfast(fromCitus(fromPg(pool)));
    await hf.capabilities();
    const call = () =>
      once(hf, ["once", code], async (tx) => {
        await tx.query(sql`INSERT INTO effect VALUES (1)`);
        return 1;
      });
    spoil(proxy, 1, code);
    await call().catch((error: unknown) => expect(error).toMatchObject(unknown));
    expect(await call()).toMatchObject({ value: 1, replayed: true });
    expect((await direct.query("SELECT n FROM effect")).rows).toHaveLength(1);
  });

  test("a job is there once, and whoever added it is told that nobody knows", async () => {
    await using hf = holdfast(fromCitus(fromPg(pool)));
    const mails = queue<string>(hf, `mails ${code}`);
    await mails.enqueue("warm");
    for (const [i, options] of [{}, { key: "k" }, { group: "g" }].entries()) {
      spoil(proxy, 1, code);
      await expect(mails.enqueue("x", options)).rejects.toMatchObject(unknown);
      expect((await mails.counts()).waiting).toBe(i + 2);
    }
  });

  test("a run is begun once", async () => {
    await using hf = holdfast(fromCitus(fromPg(pool)));
    let runs = 0;
    const nightly = schedule(hf, `nightly ${code}`, { every: "1 hour" }, () => void runs++);
    await nightly.runNow();
    spoil(proxy, 1, code);
    await nightly.runNow().catch((error: unknown) => expect(error).toMatchObject(unknown));
    expect(runs).toBeLessThanOrEqual(2);
    const { rows } = await direct.query("SELECT 1 FROM holdfast.schedule_run WHERE schedule = $1", [
      nightly.name,
    ]);
    expect(rows).toHaveLength(2);
  });

  test("an audited change is written down once", async () => {
    await using hf = holdfast(fromCitus(fromPg(pool)));
    await hf.capabilities();
    let runs = 0;
    spoil(proxy, 1, code);
    const what = { action: "fix", target: code, actor: "ann" };
    await expect(audited(hf, what, async () => void runs++)).rejects.toMatchObject(unknown);
    expect(runs).toBe(0);
    expect((await trail(hf, { target: code })).map(({ outcome }) => outcome)).toEqual(["begun"]);
  });
});

describe("a row with a version, which is written by itself", () => {
  beforeEach(async () => {
    await direct.query("DELETE FROM account");
    await direct.query("INSERT INTO account VALUES ('ann', 1, 0)");
  });
  const open = () => versioned<{ n: number }>(holdfast(fromCitus(fromPg(pool))), "account");

  test.each(["XX000", "08006", "58030", "53200", "57P01"])("%s: nobody knows", async (code) => {
    const accounts = open();
    await accounts.read("ann");
    spoil(proxy, 1, code, updated);
    await expect(accounts.update("ann", ({ n }) => ({ n: n + 1 }))).rejects.toThrow(CommitUnknownError);
    expect((await direct.query("SELECT n FROM account")).rows).toEqual([{ n: 2 }]);
  });

  test("what the server refuses is told as it is", async () => {
    const accounts = open();
    await expect(accounts.update("ann", () => ({ n: 100 }))).rejects.toMatchObject({ code: "23514" });
    await expect(accounts.update("ann", () => ({ n: "many" as never }))).rejects.toMatchObject({
      code: "22P02",
    });
  });

  test("without nodes, an error that the server answers with is its own", async () => {
    const accounts = versioned<{ n: number }>(holdfast(fromPg(pool)), "account");
    await accounts.read("ann");
    spoil(proxy, 1, "XX000", updated);
    await expect(accounts.update("ann", ({ n }) => ({ n: n + 1 }))).rejects.toMatchObject({ code: "XX000" });
  });
});

test("an order of several SKUs that comes twice is found by its id", async () => {
  await using hf = holdfast(fromCitus(fromPg(pool)));
  // Another process, which has not met the id.
  await using twin = holdfast(fromCitus(fromPg(pool)));
  const shops = [hf, twin].map((each) => stock(each, { name: "twice" }));
  const [shop, other] = shops as [(typeof shops)[0], (typeof shops)[0]];
  for (const sku of ["CAP", "TEE"]) await shop.increase(sku, 10);
  const order = [
    { sku: "CAP", quantity: -1 },
    { sku: "TEE", quantity: -1 },
  ];
  const seen = asCopied(proxy);
  expect(await shop.apply(order, { externalId: "o-1" })).toMatchObject({ replayed: false });
  expect(await other.apply(order, { externalId: "o-1" })).toMatchObject({ replayed: true });
  expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([9, 9]);
  expect(seen.copied).toBe(0);
  // The proxy does what it is for.
  const again = pool.query(
    "INSERT INTO account (id, n, version) SELECT 'bob', g, 0 FROM generate_series(1, 2) g",
  );
  const error: unknown = await again.catch((e: unknown) => e);
  expect(error).toMatchObject({ code: "XX000" });
  expect(isUniqueViolation(error)).toBe(false);
});

test("an error that says that nothing was kept is believed, and the transaction is run again", async () => {
  await using hf = holdfast(fromCitus(fromPg(pool)));
  await hf.capabilities();
  // Of a transaction that has nothing to keep.
  spoil(proxy, 1, "40P01");
  let runs = 0;
  await hf.transaction({ lock: key("again") }, async () => void runs++);
  expect(runs).toBe(2);
});
