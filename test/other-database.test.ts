/** Transactions of the client's own on another database than the instance's: what is decided there excludes nobody here. */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, NotInTransactionError, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromMariadb } from "holdfast/mariadb";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import BetterSqlite3 from "better-sqlite3";
import { createPool as createMariadbPool } from "mariadb";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import { describe, expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";

type Any = Holdfast<any>;

interface Place {
  hf: Any;
  /** A transaction of the caller's own, on a session of another pool to the same database: by another name of the host, if it has one. */
  own(body: (tx: object) => Promise<void>): Promise<void>;
  end(): Promise<void>;
}

async function onServer(client: "pg" | "mysql2" | "mariadb"): Promise<Place> {
  const database = await createDatabase(
    client === "pg" ? "postgres" : client === "mysql2" ? "mysql" : "mariadb",
  );
  const pools = [database.url, database.url.replace("127.0.0.1", "localhost")].map((url) =>
    client === "pg"
      ? new Pool({ connectionString: url }).on("error", () => {})
      : client === "mysql2"
        ? createPool({ uri: url })
        : createMariadbPool(url.replace("mysql:", "mariadb:")),
  );
  const [ours, others] = pools as [Pool, Pool];
  const from = { pg: fromPg, mysql2: fromMysql2, mariadb: fromMariadb }[client] as unknown as (
    pool: never,
  ) => never;
  const hf: Any = holdfast(from(ours as never));
  return {
    hf,
    async own(body) {
      const tx = await (
        "connect" in others ? others : { connect: () => (others as any).getConnection() }
      ).connect();
      try {
        await tx.query("BEGIN");
        await body(tx);
        await tx.query("COMMIT");
      } catch (error) {
        await tx.query("ROLLBACK");
        throw error;
      } finally {
        await tx.release();
      }
    },
    async end() {
      await hf.close();
      for (const pool of pools) await pool.end();
      await database.drop();
    },
  };
}

async function onFile(client: "better-sqlite3" | "node:sqlite", made: "handle" | "opener"): Promise<Place> {
  const folder = mkdtempSync(join(tmpdir(), "holdfast-other-"));
  const file = join(folder, "a.db");
  const open = () => (client === "node:sqlite" ? new DatabaseSync(file) : new BetterSqlite3(file));
  const db = open();
  const given = (made === "handle" ? db : open) as never;
  const hf: Any = holdfast(client === "node:sqlite" ? fromNodeSqlite(given) : fromBetterSqlite3(given));
  return {
    hf,
    async own(body) {
      const other = open();
      other.exec("BEGIN IMMEDIATE");
      try {
        await body(other);
        other.exec("COMMIT");
      } catch (error) {
        other.exec("ROLLBACK");
        throw error;
      } finally {
        other.close();
      }
    },
    async end() {
      await hf.close();
      db.close();
      rmSync(folder, { recursive: true });
    },
  };
}

const sites: readonly [
  name: string,
  server: "postgres" | "mysql" | "mariadb" | undefined,
  make: () => Promise<Place>,
][] = [
  ["pg", "postgres", () => onServer("pg")],
  ["mysql2", "mysql", () => onServer("mysql2")],
  ["mariadb", "mariadb", () => onServer("mariadb")],
  ...(["better-sqlite3", "node:sqlite"] as const).flatMap((client) =>
    (["handle", "opener"] as const).map(
      (made) => [`${client}, ${made}`, undefined, () => onFile(client, made)] as (typeof sites)[number],
    ),
  ),
];

describe.each(sites)("%s", (_, server, make) => {
  test("a transaction on another database is refused, and one by another road is not", async ({ skip }) => {
    const why = server && unavailable(server);
    skip(why !== undefined, why);
    const [here, there] = await Promise.all([make(), make()]);
    try {
      for (const { hf } of [here, there]) await hf.migrate();
      const uploads = quota(here.hf, { name: "uploads", limit: 5 });
      // Also as the first use of the instance.
      const calls: readonly ((tx: never) => Promise<unknown>)[] = [
        (tx) => uploads.consume("ann", 1, { tx }),
        async (tx) => here.hf.join(tx).lock(key("ann")),
        async (tx) => here.hf.join(tx).transaction(async () => {}),
      ];
      for (const call of calls)
        await there.own(async (tx) => {
          await expect(call(tx as never)).rejects.toBeInstanceOf(NotInTransactionError);
        });
      const elsewhere = quota(there.hf, { name: "uploads", limit: 5 });
      expect((await elsewhere.peek("ann")).used).toBe(0);
      await here.own(async (tx) => {
        await uploads.consume("ann", 2, { tx });
        await here.hf.join(tx).lock(key("ann"));
      });
      expect((await uploads.peek("ann")).used).toBe(2);
    } finally {
      await here.end();
      await there.end();
    }
  });
});

test("two databases in memory are two", async () => {
  const [here, there] = [new BetterSqlite3(":memory:"), new BetterSqlite3(":memory:")];
  const hf = holdfast(fromBetterSqlite3(here));
  await hf.migrate();
  await holdfast(fromBetterSqlite3(there)).migrate();
  there.exec("BEGIN");
  await expect(quota(hf, { name: "u", limit: 1 }).consume("ann", 1, { tx: there })).rejects.toThrow(
    /another database \(in memory\)/,
  );
});
