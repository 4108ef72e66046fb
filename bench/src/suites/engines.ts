/** A locked check-then-write on each engine, next to what its own textbook says. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import Database from "better-sqlite3";
import { holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { type Pool, createPool } from "mysql2/promise";
import {
  type Body,
  bytes,
  fillMysql,
  historyPerUser,
  manyUsers,
  mysqlDriver,
  mysqlTables,
  quota,
  userOf,
} from "../../../packages/cli/src/bench/locks.ts";
import { startMariadb } from "../../../test/harness/mariadb.ts";
import { startMysql } from "../../../test/harness/mysql.ts";
import { alternate } from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";

const callers = 4;

/** One engine, and the same operation on it in two ways. */
interface Ground {
  readonly name: string;
  /** The name of its ratio. */
  readonly ratio: string;
  readonly version: string;
  ours(user: number): Promise<void>;
  textbook(user: number): Promise<void>;
  /** Ours on a client whose calls are over when they return. Its ratio has `_sync` at its end. */
  sync?(user: number): Promise<void>;
  reset(): Promise<void>;
  close(): Promise<void>;
}

const insert = `INSERT INTO image (user_id, bytes) SELECT ?, ? FROM (SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE user_id = ?) s
  WHERE s.used + ? <= ?`;
const values = (user: number) => [user, bytes, user, bytes, quota];

async function mysqlGround(
  name: string,
  ratio: string,
  start: () => Promise<{ url: string; stop(): Promise<unknown> }>,
): Promise<Ground> {
  const server = await start();
  const admin = createPool({ uri: server.url, connectionLimit: 1 });
  await admin.query("CREATE DATABASE IF NOT EXISTS bench");
  const url = new URL(server.url);
  url.pathname = "/bench";
  const pool: Pool = createPool({ uri: url.href, connectionLimit: callers });
  for (const statement of mysqlTables) await pool.query(statement);
  const [[row]] = (await pool.query("SELECT VERSION() AS version")) as unknown as [[{ version: string }]];
  const driver = await mysqlDriver(pool);
  const body: Body = async (send, user) => void (await send(insert, values(user)));
  return {
    name,
    ratio,
    version: row.version,
    ours: (user) => driver.ours(user, body),
    textbook: (user) => driver.textbook(user, body),
    reset: () => fillMysql(pool, manyUsers),
    async close() {
      await driver.close();
      await admin.end();
      await server.stop();
    },
  };
}

async function sqliteGround(): Promise<Ground> {
  const folder = await mkdtemp(join(tmpdir(), "holdfast-bench-"));
  const file = join(folder, "bench.db");
  const opened: Database.Database[] = [];
  const open = (): Database.Database => {
    const db = new Database(file);
    db.pragma("journal_mode = WAL");
    opened.push(db);
    return db;
  };
  const own = open();
  own.exec(
    "CREATE TABLE image (user_id integer NOT NULL, bytes integer NOT NULL); CREATE INDEX image_user ON image (user_id)",
  );
  const hf = holdfast(fromBetterSqlite3(open));
  await hf.migrate();
  const prepared = new WeakMap<Database.Database, Database.Statement>();
  /** Prepared once per handle, as its documentation advises. */
  const write = (db: Database.Database, user: number) => {
    let statement = prepared.get(db);
    if (!statement) prepared.set(db, (statement = db.prepare(insert)));
    statement.run(...values(user));
  };
  const byHand = own.transaction((user: number) => write(own, user));
  return {
    name: "SQLite, better-sqlite3",
    ratio: "sqlite_lock",
    version: String(own.prepare("SELECT sqlite_version() AS v").pluck().get()),
    ours: (user) => hf.transaction({ lock: key("upload", user) }, async (tx) => write(tx.client, user)),
    async sync(user) {
      hf.transactionSync({ lock: key("upload", user) }, (tx) => write(tx.client, user));
    },
    async textbook(user) {
      byHand.immediate(user);
    },
    async reset() {
      own.exec("DELETE FROM image");
      const fill = own.prepare("INSERT INTO image VALUES (?, ?)");
      own.transaction(() => {
        for (let i = 0; i < manyUsers * historyPerUser; i++) fill.run(1 + (i % manyUsers), bytes);
      })();
    },
    async close() {
      await hf.close();
      for (const db of opened) db.close();
      await rm(folder, { recursive: true, force: true });
    },
  };
}

const grounds: readonly (() => Promise<Ground>)[] = [
  () => mysqlGround("MySQL, mysql2", "mysql_lock", startMysql),
  () => mysqlGround("MariaDB, mysql2", "mariadb_lock", startMariadb),
  sqliteGround,
];

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  const notes: string[] = [];
  for (const make of grounds) {
    const ground = await make();
    try {
      note(`${ground.name} …`);
      const sync = ground.sync?.bind(ground);
      const measured = await alternate({
        contestants: [
          { name: "holdfast", call: (turn) => ground.ours(userOf(turn, manyUsers)) },
          { name: "textbook", call: (turn) => ground.textbook(userOf(turn, manyUsers)) },
          ...(sync
            ? [{ name: "transactionSync", call: (turn: number) => sync(userOf(turn, manyUsers)) }]
            : []),
        ],
        callers,
        seconds,
        reset: () => ground.reset(),
      });
      for (const { name: contestant, ...figures } of measured)
        rows.push({ cell: ground.name, contestant, ...figures });
      const [ours, textbook, atOnce] = measured.map(({ opsPerSecond }) => opsPerSecond);
      const over = (ops = Number.NaN) => Number((ops / (textbook ?? Number.NaN)).toFixed(3));
      ratios[ground.ratio] = over(ours);
      if (sync) ratios[`${ground.ratio}_sync`] = over(atOnce);
      notes.push(`${ground.name}: ${ground.version}`);
    } finally {
      await ground.close();
    }
  }
  return { suite: "engines", machine: machine("none"), rows, ratios, notes };
}
