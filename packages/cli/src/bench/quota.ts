/** One unit of a quota: a sum under a lock, by hand, and holdfast/quota. */
import { type Holdfast, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import type { ClientBase, Pool } from "pg";
import { type Send, byMysql, mysqlTransaction, transaction } from "./locks.ts";
import { scatter } from "./measure.ts";
import type { MysqlPlace, PostgresPlace } from "./place.ts";
import { type Opened, type Suite, alternating, byHand, naive, ours, perConnection, scarce } from "./suite.ts";

export const limit = 1_000_000_000;

/** So many users, with so many uses each. */
export async function makeUses(admin: Pool, users: number, rowsPerUser: number): Promise<void> {
  await admin.query("CREATE TABLE use (id bigserial PRIMARY KEY, user_id int NOT NULL, amount int NOT NULL)");
  await admin.query(
    "INSERT INTO use (user_id, amount) SELECT u, 1 FROM generate_series(0, $1::int - 1) u, generate_series(1, $2::int)",
    [users, rowsPerUser],
  );
  await admin.query("CREATE INDEX ON use (user_id) INCLUDE (amount)");
  await admin.query("VACUUM ANALYZE use");
}

class UsedUp extends Error {}

async function sumAndInsert(client: Pick<ClientBase, "query">, user: number, most: number): Promise<void> {
  const { rows } = await client.query("SELECT coalesce(sum(amount), 0) AS used FROM use WHERE user_id = $1", [
    user,
  ]);
  if (Number(rows[0].used) + 1 > most) throw new UsedUp("used up");
  await client.query("INSERT INTO use (user_id, amount) VALUES ($1, 1)", [user]);
}

/** The textbook: a lock and a SUM. */
export function lockAndSum(pool: Pool, user: number, most = limit): Promise<void> {
  return transaction(pool, async (client) => {
    await client.query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", [`use:${user}`]);
    await sumAndInsert(client, user, most);
  });
}

const users = 1000;
const rowsPerUser = 100;
const few = 10;

async function onPostgres({ pool: make, connections }: PostgresPlace): Promise<Opened> {
  const pool = make();
  await makeUses(pool, users, rowsPerUser);
  return open({
    hf: holdfast(fromPg(pool)),
    connections,
    unlocked: (user, most) => sumAndInsert(pool, user, most),
    locked: (user, most) => lockAndSum(pool, user, most),
    close: () => pool.end(),
  });
}

/** The user's row is the lock: a named lock would outlive a transaction that fails. */
async function onMysql({ pool: make, connections }: MysqlPlace): Promise<Opened> {
  const pool = make();
  await pool.query("CREATE TABLE consumer (id int PRIMARY KEY)");
  await pool.query(
    "CREATE TABLE use_of (id bigint AUTO_INCREMENT PRIMARY KEY, user_id int NOT NULL, amount int NOT NULL, KEY (user_id, amount))",
  );
  // Those of trials, too: whom nobody else of the contestants has met.
  const everybody = [0, 10_000, 20_000].flatMap((from) =>
    Array.from({ length: from === 0 ? users : 100 }, (_, i) => [from + i]),
  );
  await pool.query("INSERT INTO consumer VALUES ?", [everybody]);
  for (let n = 0; n < rowsPerUser; n += 10)
    await pool.query("INSERT INTO use_of (user_id, amount) VALUES ?", [
      Array.from({ length: users * 10 }, (_, i) => [i % users, 1]),
    ]);
  await pool.query("ANALYZE TABLE use_of");
  const sum = async (send: Send, user: number, most: number): Promise<void> => {
    const [row] = await send("SELECT coalesce(sum(amount), 0) AS used FROM use_of WHERE user_id = ?", [user]);
    if (Number(row?.["used"]) + 1 > most) throw new UsedUp("used up");
    await send("INSERT INTO use_of (user_id, amount) VALUES (?, 1)", [user]);
  };
  return open({
    hf: holdfast(fromMysql2(pool)),
    connections,
    unlocked: (user, most) => sum(byMysql(pool), user, most),
    locked: (user, most) =>
      mysqlTransaction(pool, async (send) => {
        await send("SELECT id FROM consumer WHERE id = ? FOR UPDATE", [user]);
        await sum(send, user, most);
      }),
    close: () => pool.end(),
  });
}

interface Ground {
  readonly hf: Holdfast<unknown>;
  readonly connections: number;
  /** One unit, unless so many are used. */
  unlocked(user: number, most: number): Promise<void>;
  locked(user: number, most: number): Promise<void>;
  close(): Promise<void>;
}

async function open({ hf, connections, unlocked, locked, close }: Ground): Promise<Opened> {
  await hf.migrate();
  const units = quota(hf, { name: "units", limit });
  const fewUnits = quota(hf, { name: "few", limit: few });
  let calls = 0;
  const consume = async (user: number): Promise<void> =>
    void (await units.consume(`user-${user}`, 1, { id: `request-${++calls}` }));
  const ways: Readonly<Record<string, (user: number) => Promise<void>>> = {
    [naive]: (user) => unlocked(user, limit),
    [byHand]: (user) => locked(user, limit),
    [ours]: consume,
  };
  const callers = connections * perConnection;
  const cell = (name: string, user: (turn: number) => number) =>
    alternating(name, {
      contestants: Object.entries(ways).map(([contestant, way]) => ({
        name: contestant,
        call: (turn) => way(user(turn)),
      })),
      callers,
      reset: async () => {},
    });
  /** Users whom nobody else of the contestants has met. */
  const granted =
    (from: number, take: (user: number) => Promise<void>) =>
    async (nth: number): Promise<boolean> => {
      try {
        await take(from + nth);
        return true;
      } catch (error) {
        if (error instanceof UsedUp) return false;
        throw error;
      }
    };
  return {
    cells: [cell("1,000 users", (turn) => Math.floor(scatter(turn) * users)), cell("one hot user", () => 1)],
    trials: {
      [naive]: (until) =>
        scarce(
          until,
          callers,
          few,
          granted(10_000, (user) => unlocked(user, few)),
        ),
      [byHand]: (until) =>
        scarce(
          until,
          callers,
          few,
          granted(20_000, (user) => locked(user, few)),
        ),
      [ours]: (until) =>
        scarce(until, callers, few, async (nth) => (await fewUnits.tryConsume(`user-${nth}`)).granted),
    },
    async [Symbol.asyncDispose]() {
      await hf.close();
      await close();
    },
  };
}

export const quotas: Suite = {
  name: "quota",
  about: "one unit of a quota, with 8 requests under way for each connection",
  contestants: {
    [naive]: "SELECT sum(…), then INSERT",
    [byHand]:
      "an advisory lock (MySQL, MariaDB: the user's row), SELECT sum(…), INSERT, COMMIT; 100 rows for each user at first",
    [ours]: "quota(hf, …).consume(user, 1, { id }), with a line in the ledger",
  },
  own: [ours],
  needsDatabase: true,
  measured: 6,
  // By hand 3, from the lock to COMMIT.
  inLine: (connections) => 3 * perConnection * connections,
  postgres: onPostgres,
  mysql: onMysql,
};
