import assert from "node:assert/strict";
import type { Kysely } from "kysely";
import type { Clients } from "./clients.ts";
import { type Race, number, postgresOnly } from "./race.ts";

type Tables = {
  post: { id: number; likes: number };
  post_like: { post_id: number; reader: string };
};

const database = ({ kysely }: Clients) => kysely.withTables<Tables>();

const count = (db: Kysely<Tables>, id: number, by: number) =>
  db
    .updateTable("post")
    .set((eb) => ({ likes: eb("likes", "+", by) }))
    .where("id", "=", id)
    .execute();

/** The like itself is unique; the counter does not ask whether there was one. */
async function naive(db: Kysely<Tables>, id: number, reader: string): Promise<void> {
  const liked = await db
    .selectFrom("post_like")
    .select("reader")
    .where("post_id", "=", id)
    .where("reader", "=", reader)
    .executeTakeFirst();
  if (liked) {
    await db.deleteFrom("post_like").where("post_id", "=", id).where("reader", "=", reader).execute();
    await count(db, id, -1);
  } else {
    await db
      .insertInto("post_like")
      .values({ post_id: id, reader })
      .onConflict((on) => on.doNothing())
      .execute();
    await count(db, id, 1);
  }
}

async function fixed(db: Kysely<Tables>, id: number, reader: string): Promise<void> {
  await db.transaction().execute(async (trx) => {
    const removed = await trx
      .deleteFrom("post_like")
      .where("post_id", "=", id)
      .where("reader", "=", reader)
      .executeTakeFirst();
    if (removed.numDeletedRows > 0n) {
      await count(trx, id, -1);
      return;
    }
    const added = await trx
      .insertInto("post_like")
      .values({ post_id: id, reader })
      .onConflict((on) => on.doNothing())
      .executeTakeFirst();
    if (added.numInsertedOrUpdatedRows === 1n) await count(trx, id, 1);
  });
}

export const likeCounter: Race = {
  title: "a double click on a like",
  client: "kysely",
  engines: postgresOnly,
  tables: {
    post: "id int PRIMARY KEY, likes int NOT NULL",
    post_like: "post_id int NOT NULL, reader text NOT NULL, PRIMARY KEY (post_id, reader)",
  },
  rows: ["INSERT INTO post VALUES (1, 0)"],
  naive: {
    actors: (clients) => ({
      A: () => naive(database(clients), 1, "ada"),
      B: () => naive(database(clients), 1, "ada"),
    }),
  },
  fixed: {
    actors: (clients) => ({
      A: () => fixed(database(clients), 1, "ada"),
      B: () => fixed(database(clients), 1, "ada"),
    }),
  },
  async invariant(clients) {
    const likes = await number(clients, "SELECT count(*) FROM post_like");
    assert.equal(await number(clients, "SELECT likes FROM post"), likes, "likes on the counter");
  },
  expects: "phantom",
};
