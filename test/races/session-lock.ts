import assert from "node:assert/strict";
import type { Kysely } from "kysely";
import type { Clients } from "./clients.ts";
import { type Race, accepted, everywhere, number } from "./race.ts";

type Tables = {
  shop_session: { token: string; customer: number };
  shop_loyalty: { customer: number; points: number };
  shop_reward: { token: string; points: number };
};

const database = ({ kysely }: Clients) => kysely.withTables<Tables>();

/** One request of a session at a time. But a customer may have two sessions. */
async function naive(db: Kysely<Tables>, token: string, points: number): Promise<void> {
  await db.transaction().execute(async (trx) => {
    const session = await trx
      .selectFrom("shop_session")
      .select("customer")
      .where("token", "=", token)
      .forUpdate()
      .executeTakeFirstOrThrow();
    const loyalty = await trx
      .selectFrom("shop_loyalty")
      .select("points")
      .where("customer", "=", session.customer)
      .executeTakeFirstOrThrow();
    if (loyalty.points < points) throw new Error("Not enough points");
    await trx.insertInto("shop_reward").values({ token, points }).execute();
    await trx
      .updateTable("shop_loyalty")
      .set({ points: loyalty.points - points })
      .where("customer", "=", session.customer)
      .execute();
  });
}

async function fixed(db: Kysely<Tables>, token: string, points: number): Promise<void> {
  await db.transaction().execute(async (trx) => {
    // The customer's row is the lock; the session is not looked at before, as MariaDB's snapshot would begin there.
    const loyalty = await trx
      .selectFrom("shop_loyalty")
      .innerJoin("shop_session", "shop_session.customer", "shop_loyalty.customer")
      .select(["shop_loyalty.customer", "points"])
      .where("token", "=", token)
      .forUpdate()
      .executeTakeFirstOrThrow();
    if (loyalty.points < points) throw new Error("Not enough points");
    await trx.insertInto("shop_reward").values({ token, points }).execute();
    await trx
      .updateTable("shop_loyalty")
      .set({ points: loyalty.points - points })
      .where("customer", "=", loyalty.customer)
      .execute();
  });
}

export const sessionLock: Race = {
  title: "the lock is the session's, the points are the customer's",
  source: "broadleaf 2483",
  client: "kysely",
  engines: everywhere,
  tables: {
    shop_session: "token varchar(20) PRIMARY KEY, customer int NOT NULL",
    shop_loyalty: "customer int PRIMARY KEY, points int NOT NULL",
    shop_reward: "token varchar(20) NOT NULL, points int NOT NULL",
  },
  rows: [
    "INSERT INTO shop_session VALUES ('phone', 1), ('desk', 1)",
    "INSERT INTO shop_loyalty VALUES (1, 100)",
  ],
  naive: {
    actors: (clients) => ({
      A: () => naive(database(clients), "phone", 80),
      B: () => naive(database(clients), "desk", 80),
    }),
  },
  fixed: {
    actors: (clients) => ({
      A: () => fixed(database(clients), "phone", 80),
      B: () => fixed(database(clients), "desk", 80),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT sum(points) FROM shop_reward"), 80, "points spent");
    assert.equal(await number(clients, "SELECT points FROM shop_loyalty"), 20, "points left");
    assert.equal(accepted(results), 1);
  },
  expects: "lost update",
};
