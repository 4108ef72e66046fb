/**
 * Who waits for whom: for a row that was written, which is locked by nobody until somebody comes to wait for it, and in
 * a statement that MySQL's information_schema cannot show.
 */
import { LockTimeoutError, holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { type PoolConnection, createPool } from "mysql2/promise";
import { expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

const idOf = async (connection: PoolConnection) => {
  const [rows] = await connection.query("SELECT CONNECTION_ID() AS id");
  return String((rows as { id: number }[])[0]?.id);
};

test.for(["mariadb", "mysql"] as const)("%s", async (server, { skip }) => {
  skip(unavailable(server) !== undefined, unavailable(server));
  const database = await createDatabase(server);
  const pool = createPool({ uri: database.url, connectionLimit: 6 });
  const hf = holdfast(fromMysql2(pool));
  try {
    await hf.migrate();
    await pool.query("CREATE TABLE item (id int PRIMARY KEY, n int NOT NULL)");
    await pool.query("INSERT INTO item VALUES (1, 0)");
    const [writer, waiter] = [await pool.getConnection(), await pool.getConnection()];
    try {
      await writer.query("BEGIN");
      await writer.query("INSERT INTO item VALUES (2, 0)");
      await waiter.query("BEGIN");
      const waiting = waiter.query("UPDATE item SET n = 1 WHERE id = 2 /* 😀 */");
      const [holds, waits] = [await idOf(writer), waiter.threadId];
      const seen = await eventually(async () => {
        const inspection = await hf.inspect();
        // Named locks of others are told too; and who is in the way is not known for a moment on MariaDB.
        const own = inspection.waiters.filter(({ session }) => session.id === String(waits));
        return own.length > 0 && own.every(({ blockedBy }) => blockedBy.length > 0) && own;
      });
      if (!seen) throw new Error("never seen");
      expect(seen).toHaveLength(1);
      const [found] = seen;
      expect(found?.blockedBy).toEqual([holds]);
      expect(found?.session.application).toMatch(/^holdfast@/);
      const late = await hf.transaction({ lock: key("k") }, () =>
        hf
          .transaction({ lock: key("k"), wait: 50, separate: true }, async () => {})
          .catch((error: unknown) => error),
      );
      expect(late).toBeInstanceOf(LockTimeoutError);
      expect((late as LockTimeoutError).holders).toMatchObject([
        { application: expect.stringMatching(/^holdfast@.*\[hf:k\]$/) as string },
      ]);
      await writer.query("COMMIT");
      await waiting;
      await waiter.query("COMMIT");
    } finally {
      writer.release();
      waiter.release();
    }
  } finally {
    await hf.close();
    await pool.end();
    await database.drop();
  }
});

test.for(["mariadb", "mysql"] as const)(
  "a key that nobody has yet has no holder, although a transaction without a session is open on %s",
  async (server, { skip }) => {
    skip(unavailable(server) !== undefined, unavailable(server));
    const database = await createDatabase(server);
    const pool = createPool({ uri: database.url, connectionLimit: 6 });
    const hf = holdfast(fromMysql2(pool));
    const xid = `'inspect-${process.pid}-${server}'`;
    try {
      await hf.migrate();
      await pool.query("CREATE TABLE item (id int PRIMARY KEY, n int NOT NULL)");
      // Once its session has ended, the server shows a prepared transaction with the thread id 0.
      const gone = await pool.getConnection();
      await gone.query(`XA START ${xid}`);
      await gone.query("INSERT INTO item VALUES (1, 0)");
      await gone.query(`XA END ${xid}`);
      await gone.query(`XA PREPARE ${xid}`);
      gone.destroy();
      await eventually(async () => {
        const [rows] = await pool.query(
          "SELECT 1 FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = 0",
        );
        return (rows as unknown[]).length > 0;
      });
      const first = await pool.getConnection();
      await first.query("BEGIN");
      await first.query("INSERT INTO holdfast_lock (id, name) VALUES ('first-use', 'first-use')");
      const { holders } = await hf.inspect();
      expect(holders.filter(({ session }) => session.id === "0")).toEqual([]);
      await first.query("ROLLBACK");
      first.release();
    } finally {
      await pool.query(`XA ROLLBACK ${xid}`).catch(() => {});
      await hf.close();
      await pool.end();
      await database.drop();
    }
  },
);

test.for(["mariadb", "mysql"] as const)(
  "a holder is seen at once, although others read the copy of the list of transactions on %s",
  async (server, { skip }) => {
    skip(unavailable(server) !== undefined, unavailable(server));
    const database = await createDatabase(server);
    const pool = createPool({ uri: database.url, connectionLimit: 6 });
    const hf = holdfast(fromMysql2(pool));
    let reads = true;
    // The copy is renewed only when nobody has read it for 100 ms.
    const reading = (async () => {
      while (reads) await pool.query("SELECT COUNT(*) FROM information_schema.innodb_trx");
    })();
    try {
      await hf.migrate();
      const holders = await hf.transaction({ lock: key("seen") }, () =>
        hf.outside(async () => (await hf.inspect()).holders),
      );
      expect(holders).toMatchObject([{ name: "seen", granted: true }]);
    } finally {
      reads = false;
      await reading;
      await hf.close();
      await pool.end();
      await database.drop();
    }
  },
);
