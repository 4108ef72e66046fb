/**
 * The first use of an instance, by many calls at once, on a pool that has fewer connections than there are calls. No call of ours
 * waits for another one while it holds a connection: so each of them completes, or is refused at once by name.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as delay } from "node:timers/promises";
import { DatabaseSync } from "node:sqlite";
import { createClient } from "@libsql/client";
import Sqlite from "better-sqlite3";
import { type Database, type Holdfast, type Transaction, holdfast, key, once, sharded } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromLibsql } from "holdfast/libsql";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { places } from "holdfast/citus";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { createPool as createMariadbPool } from "mariadb";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres from "postgres";
import { describe, expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";

interface Opened {
  readonly database: Database<unknown, never>;
  close(): Promise<void>;
}

type Open = (url: string, max: number) => Opened;

const opened = (database: unknown, close: () => unknown): Opened => ({
  database: database as Opened["database"],
  close: async () => void (await close()),
});

const clients: Readonly<
  Record<string, { readonly server: "postgres" | "mysql" | "mariadb" | undefined; readonly open: Open }>
> = {
  pg: {
    server: "postgres",
    open(connectionString, max) {
      const pool = new Pool({ connectionString, max });
      return opened(fromPg(pool), () => pool.end());
    },
  },
  "postgres.js": {
    server: "postgres",
    open(url, max) {
      const sql = postgres(url, { max, onnotice: () => {} });
      return opened(fromPostgres(sql), () => sql.end({ timeout: 5 }));
    },
  },
  mysql2: {
    server: "mysql",
    open(uri, connectionLimit) {
      const pool = createPool({ uri, connectionLimit });
      return opened(fromMysql2(pool), () => pool.end());
    },
  },
  mariadb: {
    server: "mariadb",
    open(url, connectionLimit) {
      const { hostname, port, username, password, pathname } = new URL(url);
      const pool = createMariadbPool({
        host: hostname,
        port: Number(port),
        user: username,
        password,
        database: pathname.slice(1),
        connectionLimit,
      });
      return opened(fromMariadb(pool), () => pool.end());
    },
  },
  "better-sqlite3": {
    server: undefined,
    open: (file) =>
      opened(
        fromBetterSqlite3(() => new Sqlite(file)),
        () => {},
      ),
  },
  "node:sqlite, one handle": {
    server: undefined,
    open(file) {
      const handle = new DatabaseSync(file);
      return opened(fromNodeSqlite(handle), () => handle.close());
    },
  },
  libsql: {
    server: undefined,
    open(file) {
      const client = createClient({ url: `file:${file}` });
      return opened(fromLibsql(client), () => client.close());
    },
  },
};

/** The calls of an application that has just started. */
function calls(hf: Holdfast<unknown>, max: number, patience: number): Promise<unknown>[] {
  const pause = () => hf.outside(() => delay(5));
  const uploads = quota(hf, { name: "uploads", limit: 1000 });
  const wait = patience;
  return [
    ...Array.from({ length: max + 1 }, (_, i) => hf.transaction({ lock: key("row", i), wait }, pause)),
    // After those that take all connections: it has none, and asks what the server can do.
    hf.lease(key("lease"), { wait }).then((lease) => lease.release()),
    hf.hold(key("session"), { wait }).then((held) => held.release()),
    hf.tryLock(key("try"), pause),
    hf.transaction(pause),
    hf.transaction({ lock: key("serial"), isolation: "serializable", wait }, pause),
    uploads.consume("ada", 1, { wait }),
    uploads.peek("ada"),
    stock(hf).levels(),
    queue(hf, "mails").enqueue({ to: "ada" }),
    queue(hf, "mails").counts(),
    once(hf, ["start"], pause),
    hf
      .semaphore(key("few"), { permits: 2 })
      .acquire({ wait })
      .then((permit) => permit.release()),
    hf.leases(),
    hf.capabilities(),
    hf.inspect(),
    hf.migrations(),
  ];
}

/** What is refused by name: where there are no such locks, and where a pool has one connection. */
const named = new Set(["HF_UNSUPPORTED", "HF_LOCK_NOT_AVAILABLE", "HF_ISOLATION"]);

async function settle(running: readonly Promise<unknown>[], also: readonly string[] = []): Promise<void> {
  const outcomes = await Promise.allSettled(running);
  const failed = outcomes.flatMap((outcome, i) => {
    if (outcome.status === "fulfilled") return [];
    const { code, message } = outcome.reason as { code?: string; message?: string };
    return named.has(String(code)) || also.includes(String(code)) ? [] : [`call ${i}: ${code}: ${message}`];
  });
  expect(failed).toEqual([]);
}

describe.each(Object.entries(clients))("%s", (name, { server, open }) => {
  // A pool of this package does not tell how many connections it may have: so that is found out by waiting for the second.
  const late = name === "mariadb" ? ["HF_NO_CONNECTION"] : [];
  const sizes = server ? [1, 2, 10] : [1];

  test.for(sizes)("a pool of %i: every call completes, or is refused by name", async (max, { skip }) => {
    const why = server && unavailable(server);
    skip(why !== undefined, why);
    const folder = mkdtempSync(join(tmpdir(), "holdfast-cold-"));
    const database = server && (await createDatabase(server));
    const url = database?.url ?? join(folder, "app.db");
    try {
      const first = open(url, 2);
      await holdfast(first.database).migrate();
      await first.close();
      for (let round = 1; round <= (max === 1 ? 1 : 3); round++) {
        const site = open(url, max);
        const hf = holdfast(site.database);
        await settle(calls(hf, max, 60_000), max === 1 ? late : []);
        await hf.close();
        await site.close();
      }
    } finally {
      await database?.drop();
      rmSync(folder, { recursive: true, force: true });
    }
  });
});

describe("on pg", () => {
  const open = (url: string, max: number): Opened =>
    (clients["pg"] as { readonly open: Open }).open(url, max);

  test.for([1, 2, 10])(
    "two shards, pools of %i: the map is written while all connections are wanted",
    async (max) => {
      const databases = await Promise.all([createDatabase("postgres"), createDatabase("postgres")]);
      const sites = databases.map(({ url }) => open(url, max));
      try {
        for (const site of sites) await holdfast(site.database).migrate();
        const shards = sharded(
          sites.map((site) => site.database),
          ({ parts }) => Number(parts[1] ?? 0) % 2,
        );
        const uploads = quota(shards, { name: "uploads", limit: 1000 });
        await settle(
          Array.from({ length: 2 * max + 2 }, (_, i) => [
            shards.transaction({ lock: key("user", i), wait: 60_000 }, () =>
              shards.on(key("user", i)).outside(() => delay(5)),
            ),
            uploads.consume(String(i), 1, { wait: 60_000 }),
          ]).flat(),
        );
        await shards.close();
      } finally {
        for (const site of sites) await site.close();
        for (const database of databases) await database.drop();
      }
    },
  );

  test.for([
    ["six schemas of one server, a pool of 10", 1, 10, 6],
    ["three databases, on two servers where there are two, pools of 4", 3, 4, 1],
  ] as const)("%s: 60 calls at once, the first of all", async ([, count, max, schemas]) => {
    const second = unavailable("postgresOld") ? "postgres" : "postgresOld";
    const databases = await Promise.all(
      Array.from({ length: count }, (_, i) => createDatabase(i === 1 ? second : "postgres")),
    );
    const pools = databases.map(({ url }) => new Pool({ connectionString: url, max }));
    const all = pools.flatMap((pool) => (schemas === 1 ? [fromPg(pool)] : places(fromPg(pool), schemas)));
    try {
      for (const each of all) await holdfast(each).migrate();
      for (let round = 1; round <= 2; round++) {
        const shards = sharded(all, ({ parts }) => Number(parts[1] ?? 0) % all.length);
        const uploads = quota(shards, { name: "uploads", limit: 1000 });
        await settle(
          Array.from({ length: 60 }, (_, i) =>
            i % 2 === 0
              ? uploads.consume(String(i), 1, { wait: 60_000 })
              : shards.transaction({ lock: key("user", i), wait: 60_000 }, () =>
                  shards.on(key("user", i)).outside(() => delay(5)),
                ),
          ),
        );
        await shards.close();
      }
    } finally {
      await Promise.all(pools.map((pool) => pool.end()));
      for (const database of databases) await database.drop();
    }
  });

  test("a list that was changed, pools of 6: twelve transactions that use quotas and once", async () => {
    const databases = await Promise.all([1, 2, 3].map(() => createDatabase("postgres")));
    const sites = databases.map(({ url }) => open(url, 6));
    const all = sites.map((site) => site.database);
    try {
      for (const site of sites) await holdfast(site.database).migrate();
      const before = sharded(all.slice(0, 2));
      await quota(before, { name: "uploads", limit: 3 }).consume("ada");
      const shards = sharded(all);
      await shards.renumber();
      const hf = shards.on(key("uploads", "ada"));
      const names = Array.from({ length: 100 }, (_, i) => `user ${i}`);
      const users = names.filter((name) => shards.on(key("uploads", name)) === hf).slice(0, 12);
      expect(users).toHaveLength(12);
      const uploads = quota(shards, { name: "uploads", limit: 3 });
      const exports = quota(shards, { name: "exports", limit: 3 });
      // Each of them, in a process of its own, has all connections when it asks.
      const calls: ((user: string, tx: Transaction<unknown>) => Promise<unknown>)[] = [
        (user, tx) => uploads.consume(user, 1, { tx }),
        (user) => quota.all([uploads, exports]).consume(user),
        (user, tx) => uploads.hold(user, 1, { tx }),
        (user, tx) => once(shards, ["uploads", user], async () => 1, { tx }),
        (user) => shards.home("uploads", user),
        (user) => shards.move(user, { to: 0 }),
        (user) => uploads.reconcile(user),
      ];
      for (const call of calls) {
        const barrier = Promise.withResolvers<void>();
        let inside = 0;
        const running = users.map((user) =>
          hf.transaction(async (tx) => {
            if (++inside === 6) barrier.resolve();
            await barrier.promise;
            return call(user, tx);
          }),
        );
        const outcomes = await Promise.allSettled(running);
        const codes = outcomes.map((each) =>
          each.status === "fulfilled" ? "done" : String((each.reason as { code?: string }).code),
        );
        expect.soft(codes.filter((code) => !["HF_SHARD_MAP", "HF_SHARDS"].includes(code))).toEqual([]);
      }
      // As the error says.
      for (const user of users) await shards.home("uploads", user);
      await settle(users.map((user) => hf.transaction(async (tx) => uploads.consume(user, 1, { tx }))));
      await shards.settle();
      await shards.close();
      await before.close();
    } finally {
      for (const site of sites) await site.close();
      for (const database of databases) await database.drop();
    }
  });

  test("two instances on a pool of two find out about session locks", async () => {
    const database = await createDatabase("postgres");
    const site = open(database.url, 2);
    try {
      const instances = [1, 2, 3, 4].map(() => holdfast(site.database));
      await settle(
        instances.map((hf, i) => hf.hold(key("session", i), { wait: 60_000 }).then((held) => held.release())),
      );
      await Promise.all(instances.map((hf) => hf.close()));
    } finally {
      await site.close();
      await database.drop();
    }
  });
});
