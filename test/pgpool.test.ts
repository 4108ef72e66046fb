/**
 * pgpool-II in front of a primary and a hot standby that shows what was there a while ago. What is done through it is exact, or
 * refused in words that name it; never wrong.
 */
import { type Holdfast, UnsupportedError, fenced, holdfast, key, once, sql, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import type { ConformanceSite } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type EmbeddedPostgres, startPostgres } from "../packages/cli/src/embedded.ts";
import { backendNamed } from "./backends.ts";
import { command } from "./harness/command.ts";
import { noPgpool, startPgpool } from "./harness/pgpool.ts";
import { type Standby, primarySettings, startStandby } from "./harness/standby.ts";
import type { StartedServer } from "./harness/started-server.ts";

const reason = noPgpool();
beforeEach(({ skip }) => skip(reason !== undefined, reason));

let primary: EmbeddedPostgres;
let standby: Standby;
/** As it comes, but for its choice of who reads where: everybody on the standby. */
let balancing: StartedServer;
let plain: StartedServer;
/** On the primary. */
let direct: Pool;

beforeAll(async () => {
  if (reason !== undefined) return;
  primary = await startPostgres({ settings: primarySettings });
  direct = new Pool({ connectionString: primary.url() });
  await holdfast(fromPg(direct)).migrate();
  await direct.query(`CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL);
    CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, version int NOT NULL DEFAULT 1)`);
  standby = await startStandby(primary);
  const servers = { password: primary.password, primary: primary.port, standby: standby.port };
  [balancing, plain] = await Promise.all([
    startPgpool({ ...servers, weights: [0, 1] }),
    startPgpool({ ...servers, weights: [0, 1], more: ["load_balance_mode = off"] }),
  ]);
  await standby.caughtUp();
  await standby.pause();
});

afterAll(async () => {
  await direct?.end();
  await Promise.all([balancing?.stop(), plain?.stop()]);
  await standby?.stop();
  await primary?.stop();
});

beforeEach(async () => {
  await direct?.query("TRUNCATE upload, account");
  await direct?.query("INSERT INTO account VALUES (1, 0)");
});

const limit = 5;

/** Check, then write. */
function upload(hf: Holdfast<unknown>): Promise<boolean> {
  return hf.transaction({ lock: key("upload", 42) }, async (tx) => {
    const [found] = await tx.query(sql`SELECT count(*)::int AS used FROM upload WHERE user_id = '42'`);
    if (Number(found?.["used"]) >= limit) return false;
    await tx.query(sql`INSERT INTO upload (user_id) VALUES ('42')`);
    return true;
  });
}

/** A reader of its own, so that nobody could mistake a lost update for a late one. */
function count(hf: Holdfast<unknown>): Promise<void> {
  return hf.transaction({ lock: key("counter") }, async (tx) => {
    const [found] = await tx.query(sql`SELECT balance FROM account WHERE id = 1`);
    await tx.query(sql`UPDATE account SET balance = ${Number(found?.["balance"]) + 1} WHERE id = 1`);
  });
}

async function there(): Promise<{ uploads: number; balance: number }> {
  const { rows } = await direct.query(
    "SELECT (SELECT count(*)::int FROM upload) AS uploads, (SELECT balance FROM account) AS balance",
  );
  return rows[0];
}

const named = /^[^]*pgpool-II 4\.\d+[^]*load_balance_mode = on[^]*address that leads to the primary[^]*$/;

async function refused(work: Promise<unknown>, as = named): Promise<void> {
  const error = await work.then(
    (value) => new Error(`it was not refused: ${JSON.stringify(value)}`),
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(UnsupportedError);
  expect((error as Error).message).toMatch(as);
}

describe.for([
  "pg",
  "postgres.js",
  "Prisma",
  "Prisma 6",
  "Drizzle",
  "Drizzle on postgres.js",
  "Kysely",
  "Kysely with its pool",
  "Knex",
  "TypeORM",
  "MikroORM",
  "Sequelize",
])("%s", (name) => {
  let sites: ConformanceSite[];
  const opened = async (server: StartedServer): Promise<[Holdfast<unknown>, Holdfast<unknown>]> => {
    const { open } = backendNamed(name);
    sites = [await open(server.url), await open(server.url)];
    const [a, b] = sites as [ConformanceSite, ConformanceSite];
    // Many wait for each other, and the machine may be busy.
    const patience = { wait: 60_000 };
    return [holdfast(a.database, patience), holdfast(b.database, patience)];
  };
  afterEach(async () => {
    for (const site of sites ?? []) await site.close();
  });

  test("that reads from the standby is refused", async () => {
    const [hf, other] = await opened(balancing);
    await refused(hf.capabilities());
    await Promise.all([hf, other, hf, other].map((each) => refused(upload(each))));
    await refused(count(hf));
    await refused(hf.tryLock(key("refresh"), async () => 1));
    await refused(hf.hold(key("report")));
    await refused(hf.lease(key("report")));
    await refused(once(hf, "event", async () => 1));
    await refused(versioned(hf, "account").update(1, (row) => row));
    await refused(quota(hf, { name: "uploads", limit: 1, per: "day" }).consume("42"));
    await refused(
      (sites[0] as ConformanceSite).ownTransaction((native) => hf.join(native).lock(key("upload", 42))),
      // Of a transaction of its own Prisma cannot read what pgpool-II says of its settings.
      /^[^]*pgpool-II[^]*load_balance_mode = (?:on|\(not told\))/,
    );
    expect(await there()).toEqual({ uploads: 0, balance: 0 });
    await hf.close();
    await other.close();
  });

  test("that does not balance is exact", async () => {
    const [hf, other] = await opened(plain);
    expect((await hf.capabilities()).details).toMatchObject({
      pooler: expect.stringMatching(/^pgpool-II 4\.\d/),
      direct: false,
    });
    const all = Array.from({ length: 8 }, (_, i) => (i % 2 === 0 ? hf : other));
    const accepted = await Promise.all(all.map(upload));
    await Promise.all(all.map(count));
    expect(accepted.filter(Boolean)).toHaveLength(limit);
    expect(await there()).toEqual({ uploads: limit, balance: all.length });
    await hf.close();
    await other.close();
  });
});

test("locks of a session, leases and fences hold through one that does not balance", async () => {
  const pools = [1, 2].map(() => new Pool({ connectionString: plain.url, max: 4 }));
  const [hf, other] = pools.map((pool) => holdfast(fromPg(pool))) as [Holdfast<unknown>, Holdfast<unknown>];
  try {
    {
      await using _held = await hf.hold(key("report"));
      expect(await other.hold(key("report"), { wait: "skip" })).toBeUndefined();
    }
    await using held = await other.hold(key("report"));
    expect(held.keys).toHaveLength(1);

    const lease = await hf.lease(key("indexer"));
    expect(await other.lease(key("indexer"), { wait: "skip" })).toBeUndefined();
    const write = () =>
      other.transaction(async (tx) => {
        await fenced(tx, lease);
        await tx.query(sql`UPDATE account SET balance = balance + 1 WHERE id = 1`);
      });
    await write();
    await lease.release();
    await using next = await other.lease(key("indexer"));
    expect(next.fence).toBeGreaterThan(lease.fence);
    await expect(write()).rejects.toMatchObject({ code: "HF_STALE_FENCE" });
    expect(await there()).toMatchObject({ balance: 1 });
  } finally {
    await hf.close();
    await other.close();
    await Promise.all(pools.map((pool) => pool.end()));
  }
});

test("the doctor names it, and says what to do", async () => {
  const examine = async (url: string) => {
    const { code, out, err } = await command(["doctor", "--json", "--only", "pgpool", "--url", url]);
    expect(out, err).toMatch(/^\{/);
    return { code, findings: (JSON.parse(out) as { findings: object[] }).findings };
  };
  const found = await examine(balancing.url);
  expect(found.code).toBe(1);
  expect(found.findings).toMatchObject([
    {
      check: "pgpool",
      severity: "error",
      what: expect.stringMatching(/pgpool-II 4\.\d.*load_balance_mode = on/),
      fix: expect.stringContaining("load_balance_mode = off"),
    },
  ]);
  expect(await examine(plain.url)).toEqual({ code: 0, findings: [] });
  expect(await examine(primary.url())).toEqual({ code: 0, findings: [] });
});
