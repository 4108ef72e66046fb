/**
 * Bodies that end their transaction themselves: its locks are gone, and what follows is kept statement by statement. And transactions that
 * the server ends.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import BetterSqlite3 from "better-sqlite3";
import { createPool } from "mysql2/promise";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

interface Site {
  hf: Holdfast<never>;
  /** Begins a transaction of the caller's own, and has the server end its session. */
  cut?(body: (tx: object) => Promise<void>): Promise<object>;
  send(client: unknown, text: string): unknown;
  end(): Promise<void>;
}

async function onServer(server: "postgres" | "mariadb" | "mysql"): Promise<Site> {
  const database = await createDatabase(server);
  const pool =
    server === "postgres"
      ? new Pool({ connectionString: database.url }).on("error", () => {})
      : createPool({ uri: database.url });
  const hf = pool instanceof Pool ? holdfast(fromPg(pool)) : holdfast(fromMysql2(pool));
  return {
    hf: hf as Holdfast<never>,
    send: (client, text) => (client as Pool).query(text),
    async cut(body) {
      const own = pool instanceof Pool ? await pool.connect() : await pool.getConnection();
      const pid = "threadId" in own ? own.threadId : (own as PoolClient & { processID: number }).processID;
      await (own as { query(text: string): unknown }).query("BEGIN");
      await body(own);
      const ended = new Promise((resolve) => {
        const emitter = "connection" in own ? (own.connection as object) : own;
        for (const event of ["error", "end"]) (emitter as PoolClient).on(event as "end", () => resolve(true));
      });
      if (pool instanceof Pool) await pool.query("SELECT pg_terminate_backend($1)", [pid]);
      else await pool.query(`KILL ${pid}`);
      await ended;
      if ("destroy" in own) own.destroy();
      else own.release(true);
      return own;
    },
    async end() {
      await hf.close();
      await pool.end();
      await database.drop();
    },
  };
}

async function onFile(client: "better-sqlite3" | "node:sqlite"): Promise<Site> {
  const folder = mkdtempSync(join(tmpdir(), "holdfast-early-"));
  const file = join(folder, "a.db");
  const db = client === "node:sqlite" ? new DatabaseSync(file) : new BetterSqlite3(file);
  const hf = db instanceof DatabaseSync ? holdfast(fromNodeSqlite(db)) : holdfast(fromBetterSqlite3(db));
  return {
    hf: hf as Holdfast<never>,
    send: (own, text) => (own as DatabaseSync).exec(text),
    async end() {
      await hf.close();
      db.close();
      rmSync(folder, { recursive: true });
    },
  };
}

const sites = {
  pg: { why: unavailable("postgres"), open: () => onServer("postgres") },
  "mysql2 on MariaDB": { why: unavailable("mariadb"), open: () => onServer("mariadb") },
  "mysql2 on MySQL": { why: unavailable("mysql"), open: () => onServer("mysql") },
  "better-sqlite3": { why: undefined, open: () => onFile("better-sqlite3") },
  "node:sqlite": { why: undefined, open: () => onFile("node:sqlite") },
};

describe.each(Object.entries(sites))("%s", (name, { why, open }) => {
  let site: Site | undefined;
  beforeAll(async () => {
    if (why !== undefined) return;
    site = await open();
    await site.hf.migrate();
  });
  afterAll(() => site?.end());
  beforeEach(({ skip }) => skip(why !== undefined, why));

  test.each(["COMMIT", "ROLLBACK"])("%s in a body is no success", async (text) => {
    const { hf, send } = site as Site;
    for (const options of [{}, { lock: key("a") }]) {
      const call = hf.transaction(options, async ({ client }) => {
        await send(client, "SELECT 1");
        await send(client, text);
      });
      await expect(call).rejects.toMatchObject({ code: "HF_TRANSACTION_ABORTED" });
    }
    // What it has left behind is in nobody's way.
    await expect(hf.lock(key("a"), async () => "fine")).resolves.toBe("fine");
  });

  test("hf.join takes the client's own, and no `tx` of Holdfast's", async () => {
    const { hf } = site as Site;
    const joined = hf.transaction(async (tx) => hf.join(tx as never).lock(key("b")));
    await expect(joined).rejects.toMatchObject({ code: "HF_NOT_IN_TRANSACTION" });
  });

  // A file has no sessions.
  const cutting = name.includes("sqlite") ? [] : [name];
  test.each(cutting)(
    "a call in the caller's own transaction on %s says that its connection was lost",
    async () => {
      const { hf, cut } = site as Site;
      if (!cut) throw new Error("this site cannot cut a connection");
      const uploads = quota(hf, { name: "early", limit: 10 });
      const tx = await cut(async (open) => {
        await uploads.consume("ann", 1, { tx: open });
      });
      const lost = { code: "HF_CONNECTION_LOST" };
      await expect(uploads.consume("ann", 1, { tx })).rejects.toMatchObject(lost);
      await expect(hf.join(tx as never).lock(key("a"))).rejects.toMatchObject(lost);
      expect(await uploads.peek("ann")).toMatchObject({ used: 0 });
    },
  );

  test("a transactional job whose handler rolls back is not lost: it has failed", async () => {
    const { hf, send } = site as Site;
    const jobs = queue<object>(hf, "early", { retries: 1, backoff: () => 1 });
    const { id } = await jobs.enqueue({});
    const worker = jobs.work<never>((_job, { client }) => send(client, "ROLLBACK"), {
      transactional: true,
      onTrouble: () => {},
    });
    try {
      await eventually(async () => expect((await jobs.counts()).failed).toBe(1));
      expect(await jobs.inspect(id)).toMatchObject({ state: "failed", failures: 2 });
    } finally {
      await worker.stop();
    }
  });
});
