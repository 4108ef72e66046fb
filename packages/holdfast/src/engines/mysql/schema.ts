import { randomUUID } from "node:crypto";
import type { Migration, Migrations, SqlConnection } from "../../seam/database.ts";
import { UnsupportedError } from "../../seam/errors.ts";
import { recorded } from "../../seam/migrations.ts";
import { makeStale } from "../../seam/routine.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { sleep } from "../../waiting/wait.ts";
import { auditTables } from "../sql/audit.ts";
import { entryViews } from "../sql/entries.ts";
import { execTable } from "../sql/exec.ts";
import { queueTables } from "../sql/queue/tables.ts";
import { quotaTables } from "../sql/quota/tables.ts";
import { scheduleTables } from "../sql/schedule.ts";
import { stockTables } from "../sql/stock/tables.ts";
import type { Table } from "../sql/table.ts";
import { namesOf, render } from "./dialect.ts";
import { leaseTables } from "./leases.ts";
import { procedures } from "./routine-effects.ts";
import { outcomeTable } from "./outcome.ts";
import { replayTable } from "./replay.ts";
import { isCluster, refuseSettings } from "./probe.ts";
import { onPrimary } from "./primary.ts";
import { rightsIn } from "./rights.ts";
import { routinesOf } from "./routines.ts";
import { counters, storeDialect } from "./store-dialect.ts";
import { failureOf } from "./waits.ts";

const patternTables: readonly Table[] = [
  ...quotaTables,
  ...stockTables,
  ...queueTables,
  ...scheduleTables,
  ...auditTables,
];

/** Names are kept as bytes, so that each is another one; to be read they are texts, and still that. */
const views = entryViews({
  create: sql.raw("CREATE OR REPLACE SQL SECURITY INVOKER VIEW"),
  text: (column) => sql`CONVERT(${column} USING utf8mb4) COLLATE utf8mb4_bin`,
  moment: (column) => sql`TIMESTAMPADD(MICROSECOND, ${column}, CAST('1970-01-01' AS datetime(6)))`,
});

const migrationTable = sql`CREATE TABLE IF NOT EXISTS ${own("migration")} (
  id int NOT NULL PRIMARY KEY,
  name varchar(100) NOT NULL,
  applied_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE=InnoDB`;

const all: readonly Migration[] = [
  {
    id: 1,
    name: "lock rows",
    statements: [
      migrationTable,
      sql`CREATE TABLE IF NOT EXISTS ${own("lock")} (
  id varbinary(64) NOT NULL PRIMARY KEY,
  name varchar(200) CHARACTER SET utf8mb4 NOT NULL,
  turn bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB`,
    ],
  },
  {
    id: 2,
    name: "holders of lock rows",
    statements: [
      sql`ALTER TABLE ${own("lock")} ADD COLUMN holder bigint unsigned NOT NULL DEFAULT 0, ADD COLUMN since datetime(3) NULL`,
    ],
  },
  { id: 3, name: "leases", statements: leaseTables },
  { id: 4, name: "once", statements: replayTable },
  // It was made of procedures, which are no part of migrations any more.
  { id: 5, name: "transactions in fewer round trips", statements: [] },
  // Of what the generic stores describe, until it is released: then its text stays, and what is added comes by another one.
  {
    id: 6,
    name: "patterns",
    statements: [...counters, ...patternTables.flatMap((each) => storeDialect.create(each))],
  },
  { id: 7, name: "transactions whose COMMIT can be looked up", statements: outcomeTable },
  { id: 8, name: "entries", statements: views },
  {
    id: 9,
    name: "exec",
    statements: execTable({
      id: "varchar(64) CHARACTER SET ascii COLLATE ascii_bin",
      text: "varchar(255) CHARACTER SET utf8mb4",
      suffix: " ENGINE=InnoDB",
    }),
  },
];

/** "Duplicate column name": whoever ran this statement before us did not come to say so. */
const there = 1060;

/** DDL commits by itself here, so the lock is one of the session. */
const name = sql`CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':migrate'), 256), 40))`;

/** Seconds, and for MySQL's max_execution_time milliseconds. */
const limits: Readonly<Record<string, number>> = {
  lock_wait_timeout: 60,
  innodb_lock_wait_timeout: 60,
  max_statement_time: 300,
  max_execution_time: 300_000,
};

/** MySQL and MariaDB each skip what is for the other one. */
const limitsNow =
  sql.raw(`SELECT @@SESSION.lock_wait_timeout AS lock_wait_timeout, @@SESSION.innodb_lock_wait_timeout AS innodb_lock_wait_timeout
/*M! , @@SESSION.max_statement_time AS max_statement_time *//*!80000 , @@SESSION.max_execution_time AS max_execution_time */`);

/**
 * DDL takes longer than a statement of the application may, so lower limits of the session are raised. Returns what sets them
 * back: the connection is the pool's. 0 is no limit.
 */
async function raiseLimits(connection: SqlConnection): Promise<() => Promise<void>> {
  const [row = {}] = (await connection.query(limitsNow)).rows;
  const low = Object.entries(limits)
    .map(([setting, least]) => ({ setting, least, was: Number(row[setting] ?? 0) }))
    .filter(({ was, least }) => was > 0 && was < least);
  const set = async (value: (limit: (typeof low)[number]) => number) => {
    if (low.length === 0) return;
    const all = low.map((each) => `SESSION ${each.setting} = ${value(each)}`);
    await connection.query(sql.raw(`SET ${all.join(", ")}`));
  };
  await set(({ least }) => least);
  return () => set(({ was }) => was);
}

/** A procedure has semicolons of its own: the mysql command, and tools like it, must be told which one is its end. */
function printed(text: string): string {
  return text.startsWith("CREATE PROCEDURE") ? `DELIMITER //\n${text}//\nDELIMITER ;` : `${text};`;
}

async function read(connection: SqlConnection): Promise<Pick<Migration, "id" | "name">[]> {
  const found = await recorded(
    connection,
    all,
    namesOf(connection).own("migration"),
    (error) => ((connection.unwrap?.(error) ?? error) as { errno?: unknown } | undefined)?.errno === 1054,
    onPrimary,
  );
  return found.filter(({ id }) => id !== underWay);
}

/** In place of a migration: somebody is at it, on one of the nodes of a cluster. */
const underWay = 0;
/** Who has said nothing for so long is dead. */
const silenceSeconds = 60;

/**
 * One node at a time. Several that make the same view stand still for ever, with all who write (MariaDB 10.11 does): who waits for its
 * turn to run DDL on the whole cluster has locked the view already, and whoever's turn it is waits for that. What is committed on one
 * node keeps out the others, which the lock of a session does not.
 */
async function oneNode<T>(
  connection: SqlConnection,
  run: (sayAlive: () => Promise<unknown>) => Promise<T>,
): Promise<T> {
  if (!(await isCluster(connection))) return run(async () => {});
  const id = sql.raw(String(underWay));
  // Who was taken for dead, and is not, must not end another one's turn.
  const mine = `under way: ${randomUUID()}`;
  const until = performance.now() + 2 * silenceSeconds * 1000;
  for (;;)
    try {
      await connection.query(
        sql`DELETE FROM ${own("migration")} WHERE id = ${id} AND applied_at < CURRENT_TIMESTAMP - INTERVAL ${sql.raw(String(silenceSeconds))} SECOND`,
      );
      await connection.query(sql`INSERT INTO ${own("migration")} (id, name) VALUES (${id}, ${mine})`);
      break;
    } catch (error) {
      const failure = failureOf(connection, error);
      if (failure !== "unique" && failure !== "deadlock" && failure !== "serialization") throw error;
      if (performance.now() > until) throw busy();
      await sleep(100 + 100 * Math.random());
    }
  const sayAlive = () =>
    agreed(connection, () =>
      connection.query(
        sql`UPDATE ${own("migration")} SET applied_at = CURRENT_TIMESTAMP WHERE id = ${id} AND name = ${mine} AND applied_at < CURRENT_TIMESTAMP`,
      ),
    );
  try {
    return await run(sayAlive);
  } finally {
    if (!connection.lost.aborted)
      await agreed(connection, () =>
        connection.query(sql`DELETE FROM ${own("migration")} WHERE id = ${id} AND name = ${mine}`),
      );
  }
}

const busy = () =>
  new UnsupportedError("hf.migrate: another process has been migrating for more than a minute");

/** The lock is one of this node: on a cluster somebody may be at the same on another one, and all but one are undone. */
async function agreed<T>(connection: SqlConnection, run: () => Promise<T>): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await run();
    } catch (error) {
      const failure = failureOf(connection, error);
      if (attempt === 10 || (failure !== "deadlock" && failure !== "serialization")) throw error;
    }
  }
}

function unlessThere(error: unknown): void {
  if ((error as { errno?: unknown }).errno !== there) throw error;
}

function record({ id, name: title }: Pick<Migration, "id" | "name">): Statement {
  return sql`INSERT IGNORE INTO ${own("migration")} (id, name) VALUES (${sql.raw(`${id}, '${title}'`)})`;
}

export const migrationsIn = (names: Names): Migrations<SqlConnection> => ({
  all,
  routines: routinesOf(procedures, names),
  rights: rightsIn(names, procedures),
  print: (statement) => printed(render(statement, names).text),
  record,
  async applied(connection) {
    await refuseSettings(connection);
    const { rows: tables } = await connection.query(
      sql`SELECT 1 AS there FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ${own.text("migration")} AND ${onPrimary}`,
    );
    return tables.length === 0 ? [] : read(connection);
  },
  async apply(connection, begun) {
    if (begun)
      throw new UnsupportedError("hf.migrate: DDL would commit the transaction that this client has opened");
    await refuseSettings(connection);
    const restoreLimits = await raiseLimits(connection);
    let locked = false;
    try {
      const [row] = (
        await connection.query(sql`SELECT GET_LOCK(${name}, 60) AS granted FROM DUAL WHERE ${onPrimary}`)
      ).rows;
      locked = String(row?.granted) === "1";
      if (!locked) throw busy();
      await agreed(connection, () => connection.query(migrationTable));
      return await oneNode(connection, async (sayAlive) => {
        const applied = new Set((await read(connection)).map(({ id }) => id));
        const missing = all.filter(({ id }) => !applied.has(id));
        for (const migration of missing) {
          for (const statement of [...migration.statements, record(migration)]) {
            await agreed(connection, () => connection.query(statement)).catch(unlessThere);
            await sayAlive();
          }
        }
        return [...missing, ...(await makeStale(connection, routinesOf(procedures, names)))];
      });
    } finally {
      if (locked && !connection.lost.aborted) await connection.query(sql`SELECT RELEASE_LOCK(${name})`);
      if (!connection.lost.aborted) await restoreLimits();
    }
  },
});
