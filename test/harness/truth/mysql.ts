/** Where programs run on MySQL and MariaDB. */
import { fromMysql2 } from "holdfast/mysql2";
import mysql, { type Connection, type PoolConnection, type ResultSetHeader } from "mysql2/promise";
import { createDatabase } from "../databases.ts";
import { leftOut } from "./generate.ts";
import { type Ground, resetText, rowsText, valuesOf } from "./ground.ts";
import { type Answer, type RefusalKind, Refused, act } from "./program.ts";

const tables = [
  "CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL)",
  "CREATE TABLE u (id int PRIMARY KEY, n int NOT NULL)",
  "CREATE TABLE l (v int NOT NULL)",
  "CREATE TABLE f (t int NOT NULL, FOREIGN KEY (t) REFERENCES t (id))",
  "CREATE TABLE e (id int AUTO_INCREMENT PRIMARY KEY, b int NOT NULL)",
  "CREATE TABLE g (v int NOT NULL)",
  "CREATE VIEW w AS SELECT coalesce(sum(n), 0) AS s FROM t",
  "CREATE FUNCTION line_count() RETURNS int READS SQL DATA RETURN (SELECT count(*) FROM l)",
  `CREATE FUNCTION book() RETURNS int MODIFIES SQL DATA BEGIN
    IF (SELECT count(*) FROM l) >= 1 THEN RETURN 0; END IF;
    INSERT INTO l VALUES (1); RETURN 1; END`,
  "CREATE TRIGGER note AFTER INSERT ON g FOR EACH ROW INSERT INTO l SELECT count(*) FROM l",
];

const kinds: Readonly<Record<number, RefusalKind>> = {
  1020: "serialization",
  1213: "deadlock",
  // NOWAIT of MariaDB.
  1205: "locked",
  3572: "locked",
  3058: "deadlock",
  1062: "duplicate",
  1451: "violation",
  1452: "violation",
};

function refused(error: unknown): Refused {
  const { errno = 0, message } = error as { errno?: number; message: string };
  const known = kinds[errno];
  if (known) return new Refused(known, message);
  if (/closed|ECONN|lost|ended/i.test(message)) return new Refused("lost", message);
  return new Refused("other", `${errno} ${message}`);
}

async function send(client: Connection | PoolConnection, text: string, prepared = false): Promise<Answer> {
  try {
    const how = { sql: text, rowsAsArray: true };
    // The others cannot be prepared.
    const can = prepared && /^(select|insert|update|delete)\b/i.test(text);
    const [rows] = await (can ? client.execute(how) : client.query(how));
    if (Array.isArray(rows)) return { rows: valuesOf(rows as unknown as unknown[][]), changed: 0 };
    return { rows: [], changed: (rows as ResultSetHeader).affectedRows };
  } catch (error) {
    throw refused(error);
  }
}

const ignored = () => {};

export async function onMysql(server: "mysql" | "mariadb"): Promise<Ground> {
  const database = await createDatabase(server);
  const owner = mysql.createPool({ uri: database.url, connectionLimit: 3, multipleStatements: true });
  for (const text of tables) await owner.query(text);
  const pool = mysql.createPool({ uri: database.url, connectionLimit: 6 });
  const level = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
  const column = (rows: unknown) => (rows as unknown[][]).map(([id]) => String(id));
  const sessions = async (ids: readonly string[]) => {
    const [rows] = await owner.query({
      sql: `SELECT id FROM information_schema.processlist WHERE id IN (${ids.join()})`,
      rowsAsArray: true,
    });
    return column(rows);
  };
  const waiting = {
    async mysql(ids: readonly string[]) {
      const [rows] = await owner.query({
        sql: `SELECT processlist_id FROM performance_schema.threads t WHERE processlist_id IN (${ids.join()}) AND (
          EXISTS (SELECT 1 FROM performance_schema.data_lock_waits w WHERE w.requesting_thread_id = t.thread_id) OR
          EXISTS (SELECT 1 FROM performance_schema.metadata_locks m
            WHERE m.owner_thread_id = t.thread_id AND m.lock_status = 'PENDING'))`,
        rowsAsArray: true,
      });
      return new Set(column(rows));
    },
    async mariadb(ids: readonly string[]) {
      const [[row]] = (await owner.query("SHOW ENGINE INNODB STATUS")) as unknown as [{ Status: string }[]];
      const all = row?.Status.split("LIST OF TRANSACTIONS FOR EACH SESSION")[1] ?? "";
      const found = all
        .split("---TRANSACTION")
        .filter((part) => part.includes("LOCK WAIT"))
        .flatMap((part) => /thread id (\d+)/.exec(part)?.[1] ?? []);
      const [rows] = await owner.query({
        sql: `SELECT id FROM information_schema.processlist WHERE id IN (${ids.join()})
          AND state IN ('User lock', 'Waiting for table metadata lock')`,
        rowsAsArray: true,
      });
      return new Set([...found, ...column(rows)]);
    },
  };
  return {
    // Not the actors' pool: their connections have other settings.
    db: fromMysql2(owner),
    actor: (program) => async () => {
      const client = await pool.getConnection();
      let broken = true;
      try {
        if (leftOut.gapLocks) await client.query(level);
        const value = await act(program, (text) => send(client, text, program.prepared));
        broken = false;
        return value;
      } catch (error) {
        broken = !(error instanceof Refused) || error.kind === "lost";
        throw error;
      } finally {
        if (broken) client.destroy();
        else client.release();
      }
    },
    autocommit: "may race",
    async connect() {
      const client = await mysql.createConnection({ uri: database.url });
      client.on("error", ignored);
      if (leftOut.gapLocks) await client.query(level);
      const id = String(client.threadId);
      return {
        id,
        send: (text) => send(client, text),
        async end() {
          client.destroy();
          while ((await sessions([id])).length > 0);
        },
      };
    },
    waiting: (ids) => waiting[server](ids),
    reset: (program) => owner.query(resetText(program)),
    async rows(program) {
      const [rows] = await owner.query({ sql: rowsText(program), rowsAsArray: true });
      return valuesOf(rows as unknown as unknown[][]);
    },
    async close() {
      await pool.end();
      await owner.end();
      await database.drop();
    },
  };
}
