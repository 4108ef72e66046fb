/** A check, then a write: an upload with a quota of bytes. Without a lock, with one by hand, and with Holdfast. */
import { holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import type { Pool as MysqlPool, PoolConnection } from "mysql2/promise";
import type { ClientBase, Pool } from "pg";
import { scatter } from "./measure.ts";
import type { MysqlPlace, PostgresPlace } from "./place.ts";
import { Busy, type Opened, type Suite, alternating, byHand, naive, ours, scarce } from "./suite.ts";

export const manyUsers = 1000;
export const historyPerUser = 10;
export const bytes = 1000;
/** Never reached: every operation writes, so all contestants do the same work. */
export const quota = 1_000_000_000_000;

export type Send = (text: string, values: unknown[]) => Promise<readonly Record<string, unknown>[]>;
export type Body = (send: Send, user: number) => Promise<void>;

/** One client, and the same operation on it in two ways. */
export interface Driver {
  readonly name: string;
  ours(user: number, body: Body): Promise<void>;
  /**
   * What a careful programmer writes by hand: a lock that is not waited for forever, and whose timeout does not go
   * on to apply to the body's own waits.
   */
  textbook(user: number, body: Body): Promise<void>;
  close(): Promise<void>;
}

class QuotaReached extends Error {}

export const userOf = (turn: number, users: number): number => 1 + Math.floor(scatter(turn) * users);

export const sumOf = "SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE user_id = $1";

/** Check, decide in the application, write. */
export const twoStatements =
  (limit = quota, [sum, insert] = postgresTexts): Body =>
  async (send, user) => {
    const [row] = await send(sum, [user]);
    if (Number(row?.["used"]) + bytes > limit) throw new QuotaReached("The quota is reached");
    await send(insert, [user, bytes]);
  };

const postgresTexts: readonly [sum: string, insert: string] = [
  sumOf,
  "INSERT INTO image (user_id, bytes) VALUES ($1, $2)",
];
const mysqlTexts: typeof postgresTexts = [
  "SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE user_id = ?",
  "INSERT INTO image (user_id, bytes) VALUES (?, ?)",
];

export function byPg(client: Pick<ClientBase, "query">): Send {
  return async (text, values) => (await client.query<Record<string, unknown>>(text, values)).rows;
}

export function byMysql(connection: Pick<PoolConnection, "query">): Send {
  return async (text, values) => (await connection.query(text, values))[0] as Record<string, unknown>[];
}

/** A transaction on PostgreSQL, as it is written by hand. */
export async function transaction<T>(
  pool: Pool,
  body: (client: ClientBase) => Promise<T>,
  begin = "BEGIN",
): Promise<T> {
  const client = await pool.connect();
  try {
    await client.query(begin);
    const result = await body(client);
    await client.query("COMMIT");
    return result;
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

/** With one statement in the body, the textbook is six round trips. */
export function pgDriver(pool: Pool, namespace = "upload"): Driver {
  // Of a role without rights to the tables, too.
  const hf = holdfast(fromPg(pool), { oneShard: true });
  return {
    name: "pg",
    ours: (user, body) => hf.transaction({ lock: key(namespace, user) }, (tx) => body(byPg(tx.client), user)),
    textbook: (user, body) =>
      transaction(pool, async (client) => {
        await client.query("SET LOCAL lock_timeout = '5s'");
        await client.query("SELECT pg_advisory_xact_lock(hashtext($1))", [`${namespace}:${user}`]);
        await client.query("SET LOCAL lock_timeout = DEFAULT");
        await body(byPg(client), user);
      }),
    async close() {
      await hf.close();
      await pool.end();
    },
  };
}

/** The user's own row in place of an advisory lock. */
function forUpdate(pool: Pool): Driver["textbook"] {
  return (user, body) =>
    transaction(pool, async (client) => {
      await client.query("SET LOCAL lock_timeout = '5s'");
      await client.query("SELECT id FROM person WHERE id = $1 FOR UPDATE", [user]);
      await client.query("SET LOCAL lock_timeout = DEFAULT");
      await body(byPg(client), user);
    });
}

export const mysqlTables = [
  "CREATE TABLE IF NOT EXISTS image (id bigint AUTO_INCREMENT PRIMARY KEY, user_id bigint NOT NULL, bytes bigint NOT NULL, KEY (user_id))",
] as const;

/** The tables of Holdfast are made too: it keeps locks in rows there. */
export async function mysqlDriver(pool: MysqlPool, namespace = "upload"): Promise<Driver> {
  const hf = holdfast(fromMysql2(pool));
  await hf.migrate();
  return {
    name: "mysql2",
    ours: (user, body) =>
      hf.transaction({ lock: key(namespace, user) }, (tx) => body(byMysql(tx.client), user)),
    /** A named lock, kept until COMMIT is acknowledged: as its documentation has it, done right. */
    async textbook(user, body) {
      const connection = await pool.getConnection();
      const name = `${namespace}:${user}`;
      try {
        const [[lock]] = (await connection.query("SELECT GET_LOCK(?, 5) AS granted", [name])) as unknown as [
          [{ granted: number }],
        ];
        if (lock.granted !== 1) throw new Busy("The lock was not granted");
        try {
          await readCommitted(connection, (send) => body(send, user));
        } finally {
          await connection.query("SELECT RELEASE_LOCK(?)", [name]);
        }
      } finally {
        connection.release();
      }
    },
    async close() {
      await hf.close();
      await pool.end();
    },
  };
}

async function readCommitted<T>(connection: PoolConnection, body: (send: Send) => Promise<T>): Promise<T> {
  await connection.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED");
  await connection.query("START TRANSACTION");
  try {
    const result = await body(byMysql(connection));
    await connection.query("COMMIT");
    return result;
  } catch (error) {
    await connection.query("ROLLBACK");
    throw error;
  }
}

/** A transaction on MySQL or MariaDB, as it is written by hand. */
export async function mysqlTransaction<T>(pool: MysqlPool, body: (send: Send) => Promise<T>): Promise<T> {
  const connection = await pool.getConnection();
  try {
    return await readCommitted(connection, body);
  } finally {
    connection.release();
  }
}

function mysqlForUpdate(pool: MysqlPool): Driver["textbook"] {
  return (user, body) =>
    mysqlTransaction(pool, async (send) => {
      await send("SELECT id FROM person WHERE id = ? FOR UPDATE", [user]);
      await body(send, user);
    });
}

export async function fillMysql(pool: MysqlPool, users: number): Promise<void> {
  await pool.query("TRUNCATE image");
  const rows = Array.from({ length: users * historyPerUser }, (_, i) => [1 + (i % users), bytes]);
  await pool.query("INSERT INTO image (user_id, bytes) VALUES ?", [rows]);
}

export const postgresTables = [
  "CREATE TABLE image (user_id bigint NOT NULL, bytes bigint NOT NULL)",
  "CREATE INDEX ON image (user_id)",
] as const;

export async function fillPostgres(admin: Pick<ClientBase, "query">, users: number): Promise<void> {
  await admin.query("TRUNCATE image");
  await admin.query(
    "INSERT INTO image SELECT u, $3::int FROM generate_series(1, $1::int) u, generate_series(1, $2::int)",
    [users, historyPerUser, bytes],
  );
  await admin.query("ANALYZE image");
}

type Ways = Readonly<Record<string, (user: number, body: Body) => Promise<void>>>;

/** Uploads that each user may make in a trial. */
const few = 10;
/** Users of trials: a hundred for each contestant, whom nobody else has met. */
const inTrial = (contestant: number, nth: number): number => manyUsers + 100 * contestant + nth + 1;
const allUsers = manyUsers + 400;

interface Ground {
  readonly ways: Ways;
  readonly texts: typeof postgresTexts;
  readonly connections: number;
  fill(users: number): Promise<void>;
  close(): Promise<void>;
}

function open({ ways, texts, connections, fill, close }: Ground): Opened {
  const endless = twoStatements(quota, texts);
  const limited = twoStatements(few * bytes, texts);
  const cell = (name: string, users: number) =>
    alternating(name, {
      contestants: Object.entries(ways).map(([contestant, way]) => ({
        name: contestant,
        call: (turn) => way(userOf(turn, users), endless),
      })),
      callers: connections,
      reset: () => fill(users),
    });
  return {
    cells: [cell("1,000 users", manyUsers), cell("one hot user", 1)],
    trials: Object.fromEntries(
      Object.entries(ways).map(([contestant, way], i) => [
        contestant,
        (until) =>
          scarce(until, connections, few, async (nth) => {
            try {
              await way(inTrial(i, nth), limited);
              return true;
            } catch (error) {
              if (error instanceof QuotaReached) return false;
              throw error;
            }
          }),
      ]),
    ),
    [Symbol.asyncDispose]: close,
  };
}

async function onPostgres({ pool: make, name, connections }: PostgresPlace): Promise<Opened> {
  const pool = make();
  const driver = pgDriver(pool, name);
  for (const statement of postgresTables) await pool.query(statement);
  await pool.query("CREATE TABLE person (id bigint PRIMARY KEY)");
  await pool.query("INSERT INTO person SELECT generate_series(1, $1::int)", [allUsers]);
  return open({
    ways: {
      [naive]: (user, body) => body(byPg(pool), user),
      [byHand]: driver.textbook,
      [rowByHand]: forUpdate(pool),
      [ours]: driver.ours,
    },
    texts: postgresTexts,
    connections,
    fill: (users) => fillPostgres(pool, users),
    close: driver.close,
  });
}

async function onMysql({ pool: make, name, connections }: MysqlPlace): Promise<Opened> {
  const pool = make();
  const driver = await mysqlDriver(pool, name);
  for (const statement of mysqlTables) await pool.query(statement);
  await pool.query("CREATE TABLE person (id bigint PRIMARY KEY)");
  await pool.query("INSERT INTO person VALUES ?", [Array.from({ length: allUsers }, (_, i) => [i + 1])]);
  return open({
    ways: {
      [naive]: (user, body) => body(byMysql(pool), user),
      [byHand]: driver.textbook,
      [rowByHand]: mysqlForUpdate(pool),
      [ours]: driver.ours,
    },
    texts: mysqlTexts,
    connections,
    fill: (users) => fillMysql(pool, users),
    close: driver.close,
  });
}

const rowByHand = "FOR UPDATE";

export const locks: Suite = {
  name: "locks",
  about: "an upload with a quota: read the sum, decide, insert",
  contestants: {
    [naive]: "no lock",
    [byHand]: "a transaction with an advisory lock (MySQL, MariaDB: GET_LOCK) and a timeout",
    [rowByHand]: "by hand too: the row of the user, locked, in place of an advisory lock",
    [ours]: "hf.transaction({ lock: key(…) }, …)",
  },
  own: [ours],
  needsDatabase: false,
  measured: 8,
  // From the lock to COMMIT: 4, 4 and 3.
  inLine: (connections) => 11 * connections,
  postgres: onPostgres,
  mysql: onMysql,
};
