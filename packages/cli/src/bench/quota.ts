/** One unit of a quota: a sum under a lock, by hand, and holdfast/quota. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import type { ClientBase, Pool } from "pg";
import { transaction } from "./locks.ts";
import { scatter } from "./measure.ts";
import type { PostgresPlace } from "./place.ts";
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

async function open({ pool: make, connections }: PostgresPlace): Promise<Opened> {
  const pool = make();
  const hf = holdfast(fromPg(pool));
  await hf.migrate();
  await makeUses(pool, users, rowsPerUser);
  const units = quota(hf, { name: "units", limit });
  const fewUnits = quota(hf, { name: "few", limit: few });
  let calls = 0;
  const consume = async (user: number): Promise<void> =>
    void (await units.consume(`user-${user}`, 1, { id: `request-${++calls}` }));
  const ways: Readonly<Record<string, (user: number) => Promise<void>>> = {
    [naive]: (user) => sumAndInsert(pool, user, limit),
    [byHand]: (user) => lockAndSum(pool, user),
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
          granted(10_000, (user) => sumAndInsert(pool, user, few)),
        ),
      [byHand]: (until) =>
        scarce(
          until,
          callers,
          few,
          granted(20_000, (user) => lockAndSum(pool, user, few)),
        ),
      [ours]: (until) =>
        scarce(until, callers, few, async (nth) => (await fewUnits.tryConsume(`user-${nth}`)).granted),
    },
    async [Symbol.asyncDispose]() {
      await hf.close();
      await pool.end();
    },
  };
}

export const quotas: Suite = {
  name: "quota",
  about: "one unit of a quota, with 8 requests under way for each connection",
  contestants: {
    [naive]: "SELECT sum(…), then INSERT",
    [byHand]: "an advisory lock, SELECT sum(…), INSERT, COMMIT; 100 rows for each user at first",
    [ours]: "quota(hf, …).consume(user, 1, { id }), with a line in the ledger",
  },
  own: [ours],
  needsDatabase: true,
  measured: 6,
  // By hand 3, from the lock to COMMIT.
  inLine: (connections) => 3 * perConnection * connections,
  postgres: open,
};
