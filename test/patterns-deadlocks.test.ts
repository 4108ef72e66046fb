/** Of a server that counts deadlocks: everything at once, from several processes, and there is none. */
import { type Holdfast, LockTimeoutError, holdfast, key, sql } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { execute } from "holdfast/testing";
import mysql, { type RowDataPacket } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { startMysql } from "./harness/mysql.ts";
import { startWorker } from "./harness/processes.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { type Site, openNamed } from "./harness/sites.ts";
import type { StartedServer } from "./harness/started-server.ts";
import { eventually } from "./harness/wait.ts";
import { type MixedLoadArg, type MixedLoadResult } from "./workers/mixed-load.ts";
import { quotasOf, subjects } from "./workers/quota-random.ts";
import { shopOf } from "./workers/stock-random.ts";

const file = new URL("./workers/mixed-load.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const ms = long ? 600_000 : 6000;
const processes = 3;

describe.each(["mariadb", "mysql"] as const)("%s", (name) => {
  const why = unavailable(name);
  let server: StartedServer;
  let connection: mysql.Connection;
  // Of its own: others make deadlocks on purpose, and they are counted together.
  beforeAll(async () => {
    if (why !== undefined) return;
    server = await (name === "mariadb" ? startMariadb() : startMysql());
    connection = await mysql.createConnection(server.url);
    if (name === "mysql") await connection.query("SET GLOBAL innodb_monitor_enable = 'lock_deadlocks'");
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await connection?.end();
    await server?.stop();
  });

  async function deadlocks(): Promise<number> {
    const [[row]] = await connection.query<RowDataPacket[]>(
      name === "mariadb"
        ? "SELECT variable_value AS n FROM information_schema.global_status WHERE variable_name = 'Innodb_deadlocks'"
        : "SELECT count AS n FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'",
    );
    return Number(row?.["n"]);
  }

  /** What the server says of the newest one. */
  async function newest(): Promise<string> {
    const [[row]] = await connection.query<RowDataPacket[]>("SHOW ENGINE INNODB STATUS");
    return /LATEST DETECTED DEADLOCK[^]*?WE ROLL BACK[^\n]*/.exec(String(row?.["Status"]))?.[0] ?? "";
  }

  async function create(database: string): Promise<string> {
    await connection.query(`CREATE DATABASE ${database}`);
    const url = new URL(server.url);
    url.pathname = database;
    return url.href;
  }

  test("quotas, stock, queues and schedules at once", { timeout: 900_000 }, async () => {
    const seed = inject("seed");
    const backend = name === "mariadb" ? "mysql2 on MariaDB" : "mysql2 on MySQL";
    const url = await create("mixed");
    const site = await openNamed(backend, url);
    try {
      await site.hf.migrate();
      await execute(site, sql`CREATE TABLE effect (kind varchar(20) NOT NULL, name varchar(40) NOT NULL)`);
      const before = await deadlocks();
      const crew = Array.from({ length: processes }, (_, index) =>
        startWorker<MixedLoadResult>(file, { backend, url, seed, index, ms } satisfies MixedLoadArg),
      );
      let results: MixedLoadResult[];
      try {
        results = await Promise.all(crew.map(({ result }) => result));
      } finally {
        for (const each of crew) each.sigkill();
      }
      const found = (await deadlocks()) - before;
      expect(found, found > 0 ? await newest() : "").toBe(0);
      const of = (kind: keyof Omit<MixedLoadResult, "errors">) =>
        results.reduce((sum, each) => sum + each[kind], 0);
      const done = { quota: of("quota"), stock: of("stock"), enqueued: of("enqueued"), worked: of("worked") };
      console.log(`HOLDFAST_SEED=${seed} ${name}:`, done, `ticks ${of("ticks")}, deadlocks ${found}`);
      // It happened, or it was not shown.
      for (const each of [...Object.values(done), of("ticks")]) expect(each).toBeGreaterThan(0);
      expect(results.flatMap(({ errors }) => errors)).toEqual([]);
      // And nothing was lost on the way.
      const twice = await execute(
        site,
        sql`SELECT kind, name FROM effect WHERE kind NOT IN ('quota', 'stock', 'enqueued') GROUP BY kind, name HAVING count(*) > 1`,
      );
      expect(twice).toEqual([]);
      expect(await shopOf(site.hf).reconcile()).toMatchObject({ ok: true });
      for (const each of Object.values(quotasOf(site.hf)))
        for (const subject of subjects) expect(await each.reconcile(subject)).toMatchObject({ ok: true });
    } finally {
      await site.close();
    }
  });

  // What is made on the way has its place in the order of locks, too.
  test("orders of SKUs and uses of subjects that are new", { timeout: 300_000 }, async () => {
    const seed = inject("seed");
    const next = random(seed);
    const backend = name === "mariadb" ? "mysql2 on MariaDB" : "mysql2 on MySQL";
    const url = await create("fresh");
    const sites = await Promise.all([1, 2, 3].map(() => openNamed(backend, url)));
    try {
      await (sites[0] as Site).hf.migrate();
      const before = await deadlocks();
      const one = async ({ hf }: Site, round: number) => {
        const shop = stock(hf, { name: "fresh" });
        const quotas = ["a", "b", "c", "d"].map((each) => quota(hf, { name: each, limit: 1_000_000 }));
        const from = random(Math.floor(next() * 2 ** 31));
        const some = <T>(of: readonly T[], most: number) =>
          of
            .map((each) => ({ each, at: from() }))
            .toSorted((a, b) => a.at - b.at)
            .slice(0, most)
            .map(({ each }) => each);
        const skus = Array.from({ length: 8 }, (_, i) => `sku-${i}-${round - (i % 2)}`);
        const order = () => shop.apply(some(skus, 5).map((sku) => ({ sku, quantity: 1 })));
        const use = () =>
          quota.all(some(quotas, 3)).tryConsume(`subject ${round - Math.floor(from() * 2)}`, 1);
        const uses = () => Promise.all(some(quotas, 3).map((each) => each.consume(`subject ${round}`)));
        await Promise.all([order(), order(), hf.transaction(order), use(), uses(), hf.transaction(use)]);
      };
      // So many, and not for longer than that, whatever else the machine does.
      const end = performance.now() + 240_000;
      let round = 0;
      for (; round < (long ? 1000 : 25) && performance.now() < end; round++)
        await Promise.all(sites.flatMap((site) => [one(site, round), one(site, round)]));
      const found = (await deadlocks()) - before;
      if (long) console.log(`HOLDFAST_SEED=${seed} ${name}: ${round} rounds, deadlocks ${found}`);
      expect(found, found > 0 ? `HOLDFAST_SEED=${seed} ${await newest()}` : "").toBe(0);
      expect(await stock((sites[0] as Site).hf, { name: "fresh" }).reconcile()).toMatchObject({ ok: true });
    } finally {
      for (const site of sites) await site.close();
    }
  });

  async function waiting(): Promise<number> {
    const [[row]] = await connection.query<RowDataPacket[]>(
      "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'",
    );
    return Number(row?.["Value"]);
  }

  /** Several instances, each behind a proxy of its own. */
  async function proxied(database: string, waits: readonly number[]) {
    const url = await create(database);
    const sites = await Promise.all(
      waits.map(async (wait) => {
        const proxy = await startProxy({ port: Number(new URL(url).port) });
        const pool = mysql.createPool({ uri: proxy.url(url), connectionLimit: 3 });
        const hf: Holdfast<unknown> = holdfast(fromMysql2(pool), { wait });
        return { hf, proxy, pool };
      }),
    );
    await sites[0]?.hf.migrate();
    return {
      sites,
      async [Symbol.asyncDispose]() {
        for (const { hf, proxy, pool } of sites) {
          proxy.thaw();
          await hf.close();
          await pool.end();
          await proxy.close();
        }
      },
    };
  }

  /** Resolves when the next statement with this text has been held back. */
  function holdBack({ cutWhen }: Proxy, text: RegExp): Promise<void> {
    const { promise, resolve } = Promise.withResolvers<void>();
    cutWhen((direction, chunk) => {
      if (direction !== "to-server" || !text.test(chunk.toString("latin1"))) return "pass";
      cutWhen(undefined);
      resolve();
      return "hold";
    });
    return promise;
  }

  const shared = [
    {
      kind: "bucket",
      use: (hf: Holdfast<unknown>, names: readonly string[]) => {
        const quotas = names.map((each) => quota(hf, { name: each, limit: 100 }));
        return quota.all(quotas).tryConsume("somebody", 1);
      },
    },
    {
      kind: "level",
      use: (hf: Holdfast<unknown>, names: readonly string[]) =>
        stock(hf, { name: "shared" }).apply(names.map((sku) => ({ sku, quantity: 1 }))),
    },
  ];

  // InnoDB leaves the gap of a row that is taken back to everybody who waits for it with INSERT, and each waits for the others then.
  test.each(shared)(
    "a call that gives up leaves the new $kind that others wait for",
    { timeout: 60_000 },
    async ({ kind, use }) => {
      await using place = await proxied(`given_up_${kind}`, [3000, 30_000, 30_000, 30_000]);
      const [first, second, third, caller] = place.sites as [Place, Place, Place, Place];
      type Place = (typeof place.sites)[number];
      const insert = new RegExp(`INTO holdfast_\\w+_${kind}\\b`);
      // All have found that there is no row, and are about to make it.
      const giving = holdBack(first.proxy, insert);
      const givenUp = use(first.hf, ["a", "b"]).catch((error: unknown) => error);
      await giving;
      const others = [];
      for (const { hf, proxy } of [second, third]) {
        const held = holdBack(proxy, insert);
        others.push(use(hf, ["a"]));
        await held;
      }
      const [made, end] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
      const before = await deadlocks();
      const holding = caller.hf.transaction(async () => {
        await use(caller.hf, ["b"]);
        made.resolve();
        await end.promise;
      });
      await made.promise;
      first.proxy.thaw();
      await eventually(async () => (await waiting()) === 1, { timeout: 2500 });
      second.proxy.thaw();
      third.proxy.thaw();
      expect(await givenUp).toBeInstanceOf(LockTimeoutError);
      await Promise.all(others);
      end.resolve();
      await holding;
      const found = (await deadlocks()) - before;
      expect(found, found > 0 ? await newest() : "").toBe(0);
    },
  );

  test("a transaction that fails leaves no deadlock to those who wait for its new lock", async () => {
    await using place = await proxied("failed", [30_000, 30_000, 30_000]);
    const [first, ...others] = place.sites.map(({ hf }) => hf) as [Holdfast<unknown>, ...Holdfast<unknown>[]];
    const lock = key("new");
    const before = await deadlocks();
    const [held, end] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const failing = first.transaction({ lock }, async () => {
      held.resolve();
      await end.promise;
      throw new Error("on purpose");
    });
    await held.promise;
    const after = others.map((hf) => hf.transaction({ lock }, async () => {}));
    await eventually(async () => (await waiting()) === others.length);
    end.resolve();
    await expect(failing).rejects.toThrow("on purpose");
    await Promise.all(after);
    const found = (await deadlocks()) - before;
    expect(found, found > 0 ? await newest() : "").toBe(0);
  });

  // The same without us must have some, or the counter would prove nothing.
  test("orders that change their lines as they come are counted", async () => {
    const url = await create("naive");
    const next = random(inject("seed"));
    const pool = mysql.createPool({ uri: url, connectionLimit: 8 });
    try {
      await pool.query("CREATE TABLE level (sku int NOT NULL PRIMARY KEY, on_hand int NOT NULL)");
      await pool.query("INSERT INTO level VALUES (0, 0), (1, 0), (2, 0), (3, 0)");
      const before = await deadlocks();
      const order = async () => {
        const one = await pool.getConnection();
        try {
          await one.beginTransaction();
          for (let line = 0; line < 3; line++)
            await one.query("UPDATE level SET on_hand = on_hand + 1 WHERE sku = ?", [Math.floor(next() * 4)]);
          await one.commit();
        } catch {
          await one.rollback();
        } finally {
          one.release();
        }
      };
      for (let round = 0; round < 100 && (await deadlocks()) === before; round++)
        await Promise.all(Array.from({ length: 8 }, order));
      const found = (await deadlocks()) - before;
      if (long) console.log(`${name}, naive: deadlocks ${found}`);
      expect(found).toBeGreaterThan(0);
    } finally {
      await pool.end();
    }
  });
});
