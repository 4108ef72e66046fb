/** Thousands of locks, many of which end badly: nothing of them may stay behind on the server or in the pool. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Database, type Holdfast, fenced, holdfast, key, sql } from "holdfast";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import * as mariadb from "mariadb";
import { createPool } from "mysql2/promise";
import { describe, expect, inject, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";

const cycles = 10_000;
const size = 12;
const callers = 10;

class OnPurpose extends Error {}

interface Lent {
  query(text: string): Promise<unknown>;
  release(): unknown;
}

interface Client {
  readonly database: Database<any, any>;
  connect(): Promise<Lent>;
  rows(outcome: unknown): Record<string, unknown>[];
  end(): Promise<void>;
}

const clients: Record<string, (url: string) => Client> = {
  mysql2(uri) {
    const pool = createPool({ uri, connectionLimit: size });
    return {
      database: fromMysql2(pool),
      connect: () => pool.getConnection(),
      rows: (outcome) => (outcome as [Record<string, unknown>[]])[0],
      end: () => pool.end(),
    };
  },
  mariadb(url) {
    const { hostname, port, username, password, pathname } = new URL(url);
    const pool = mariadb.createPool({
      host: hostname,
      port: Number(port),
      user: username,
      password,
      database: pathname.slice(1),
      connectionLimit: size,
      allowPublicKeyRetrieval: true,
    });
    return {
      database: fromMariadb(pool),
      connect: () => pool.getConnection(),
      rows: (outcome) => outcome as Record<string, unknown>[],
      end: () => pool.end(),
    };
  },
};

const cells = [
  { server: "mysql", client: "mysql2", share: 0.4 },
  { server: "mariadb", client: "mysql2", share: 0.4 },
  { server: "mariadb", client: "mariadb", share: 0.1 },
  { server: "mysql", client: "mariadb", share: 0.1 },
] as const;

const keys = Array.from({ length: 5 }, (_, i) => key("leak", i));
const ids = [1, 2, 3, 4, 5];

/** One lock of some kind, taken and ended in some way. Resolves to whether it was to be counted. */
async function cycle(
  hf: Holdfast<unknown>,
  next: () => number,
  kill: (id: number) => Promise<unknown>,
): Promise<boolean> {
  const pick = <T>(list: readonly T[]) => list[Math.floor(next() * list.length)] as T;
  const signal = next() < 0.1 ? AbortSignal.timeout(Math.floor(next() * 30)) : undefined;
  const wait = pick(["nowait", 20, 5000, 5000] as const);
  const id = pick(ids);
  const mishap = async (die?: () => Promise<unknown>) => {
    if (next() < 0.2) await sleep(next() * 4);
    if (next() < 0.1) throw new OnPurpose();
    if (die && next() < 0.02) await die();
  };
  const count = async (tx: {
    query(statement: ReturnType<typeof sql>): Promise<Record<string, unknown>[]>;
  }) => {
    const die = async () => {
      const [row] = await tx.query(sql`SELECT CONNECTION_ID() AS id`);
      await kill(Number(row?.["id"]));
    };
    await mishap(die);
    await tx.query(sql`UPDATE item SET n = n + 1 WHERE id = ${id}`);
    await mishap(die);
  };
  switch (Math.floor(next() * 6)) {
    case 0: {
      const lock = next() < 0.3 ? [pick(keys), pick(keys)] : pick(keys);
      await hf.transaction({ lock, wait, signal, retry: false }, count);
      return true;
    }
    case 1: {
      await using _held = await hf.hold(pick(keys), { wait, signal });
      await mishap();
      return false;
    }
    case 2:
      await hf.transaction({ signal, retry: false }, async (tx) => {
        await tx.lock(pick(keys), { wait });
        await count(tx);
      });
      return true;
    case 3:
      await hf.transaction({ retry: false }, async (tx) => {
        await tx.rows("item", [id, pick(ids)], { wait: pick([wait, "skip"] as const), signal });
        await count(tx);
      });
      return true;
    case 4:
      await hf.transaction({ retry: false }, async (tx) => {
        await tx
          .transaction(async (inner) => {
            await inner.rows("item", { n: id }, { limit: 2, wait, orderBy: { n: "desc" } });
            await mishap();
          })
          .catch((error: unknown) => {
            if (!(error instanceof OnPurpose)) throw error;
          });
        await count(tx);
      });
      return true;
    default: {
      await using lease = await hf.lease(pick(keys), { ttl: 3000, wait, signal });
      await hf.transaction({ retry: false, signal }, async (tx) => {
        await fenced(tx, lease);
        await count(tx);
      });
      return true;
    }
  }
}

/** Errors that are what was asked for. */
const expected = new Set([
  "HF_LOCK_TIMEOUT",
  "HF_LOCK_NOT_AVAILABLE",
  "HF_CONNECTION_LOST",
  "HF_LOCK_LOST",
  "HF_LEASE_LOST",
  "HF_DEADLOCK",
]);

function fine(error: unknown): boolean {
  if (error instanceof OnPurpose) return true;
  const { code, name } = error as { code?: unknown; name?: unknown };
  return name === "TimeoutError" || expected.has(String(code));
}

describe(`${cycles} cycles in all`, () => {
  test.for(cells)(
    "leave nothing behind: $client on $server",
    { timeout: 300_000 },
    async (cell, { skip }) => {
      skip(unavailable(cell.server) !== undefined, unavailable(cell.server));
      const seed = inject("seed");
      const next = random(seed);
      const place = await createDatabase(cell.server);
      const client = (clients[cell.client] as (url: string) => Client)(place.url);
      const watcher = createPool({ uri: place.url, connectionLimit: 2 });
      const hf = holdfast<unknown, any>(client.database, { deadline: 20_000 });
      const ask = async (text: string) => (await watcher.query(text))[0] as Record<string, unknown>[];
      try {
        await hf.migrate();
        await watcher.query("CREATE TABLE item (id int PRIMARY KEY, n int NOT NULL) ENGINE=InnoDB");
        await watcher.query(`INSERT INTO item VALUES ${ids.map((id) => `(${id}, 0)`).join(", ")}`);

        const kill = (id: number) => watcher.query(`KILL CONNECTION ${id}`);
        let left = cycles * cell.share;
        let counted = 0;
        let unsure = 0;
        const ends = new Map<string, number>();
        const surprises: string[] = [];
        const caller = async () => {
          while (left-- > 0) {
            try {
              if (await cycle(hf, next, kill)) counted++;
            } catch (error) {
              const { code, name } = error as { code?: unknown; name?: unknown };
              const how = String(code ?? name);
              ends.set(how, (ends.get(how) ?? 0) + 1);
              // Killed at the very COMMIT: nobody can tell.
              if (code === "HF_COMMIT_UNKNOWN") unsure++;
              else if (!fine(error)) surprises.push(`${how}: ${String(error)}`);
            }
          }
        };
        await Promise.all(Array.from({ length: callers }, caller));
        const hint = `HOLDFAST_SEED=${seed} ${JSON.stringify([...ends])}`;
        expect(surprises, hint).toEqual([]);
        // It would prove little if nothing had gone wrong.
        for (const how of ["HF_LOCK_TIMEOUT", "HF_LOCK_NOT_AVAILABLE", "HF_CONNECTION_LOST", "Error"])
          expect(ends.get(how), `${how}: ${hint}`).toBeGreaterThan(0);

        const [sum] = await ask("SELECT SUM(n) AS n FROM item");
        expect(Number(sum?.["n"]), hint).toBeGreaterThanOrEqual(counted);
        expect(Number(sum?.["n"]), hint).toBeLessThanOrEqual(counted + unsure);

        // No lock, of whatever kind, for anybody else: and nobody is inside of a transaction.
        const other = holdfast(fromMysql2(watcher));
        await eventually(async () => (await hf.leases()).length === 0);
        for (const each of keys) await (await other.hold(each, { wait: "nowait" })).release();
        await other.transaction({ lock: keys, wait: "nowait" }, (tx) =>
          tx.rows("item", ids, { wait: "nowait" }),
        );
        const lists = "information_schema.innodb_trx t JOIN information_schema.processlist p";
        await eventually(
          async () =>
            (
              await ask(
                `SELECT t.trx_id AS id FROM ${lists} ON p.id = t.trx_mysql_thread_id WHERE p.db = DATABASE()`,
              )
            ).length === 0,
          { interval: 150 },
        );

        // The pool gives out as many as it has, and each is as it came.
        const [theirs] = await ask("SHOW VARIABLES LIKE 'innodb_lock_wait_timeout'");
        const isolation = `@@session.${cell.server === "mariadb" ? "tx" : "transaction"}_isolation`;
        const lent = await Promise.all(Array.from({ length: size }, () => client.connect()));
        for (const connection of lent) {
          const read = async (text: string) => client.rows(await connection.query(text))[0] ?? {};
          const settings = await read(
            `SELECT @@autocommit AS autocommit, @@session.innodb_lock_wait_timeout AS wait, ${isolation} AS isolation, CONNECTION_ID() AS id`,
          );
          expect([settings["autocommit"], settings["wait"], settings["isolation"]].map(String), hint).toEqual(
            ["1", String(theirs?.["Value"]), "REPEATABLE-READ"],
          );
          // A level that was chosen for one transaction and then not used would be that of the next one.
          await connection.query("START TRANSACTION");
          await connection.query("SELECT * FROM item");
          const [seen] =
            (await eventually(
              async () => {
                const found = await ask(
                  `SELECT trx_isolation_level AS level FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = ${String(settings["id"])}`,
                );
                return found.length > 0 && found;
              },
              { interval: 120 },
            )) || [];
          expect(seen?.["level"]).toBe("REPEATABLE READ");
          await connection.query("ROLLBACK");
        }
        for (const connection of lent) await connection.release();
        await other.close();
      } finally {
        await hf.close();
        await client.end();
        await watcher.end();
        await place.drop();
      }
    },
  );
});
