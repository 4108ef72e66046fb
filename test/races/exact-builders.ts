/** Flows without a race, on query builders: Drizzle, Kysely, Knex. */
import assert from "node:assert/strict";
import { and, eq, isNull, sql } from "drizzle-orm";
import type { NodePgDatabase } from "drizzle-orm/node-postgres";
import { integer, pgTable, text } from "drizzle-orm/pg-core";
import type { Knex } from "knex";
import type { Kysely } from "kysely";
import { retrying, sqlState } from "./app.ts";
import type { Clients } from "./clients.ts";
import { type Exact, accepted, everywhere, number, postgresOnly, values } from "./race.ts";

const budget = pgTable("dept_budget", { dept: text().primaryKey(), remaining: integer().notNull() });

async function spend(db: NodePgDatabase, dept: string, amount: number): Promise<void> {
  await db.transaction(async (tx) => {
    const [row] = await tx.select().from(budget).where(eq(budget.dept, dept)).for("no key update");
    if (!row || row.remaining < amount) throw new Error("Over budget");
    await tx
      .update(budget)
      .set({ remaining: row.remaining - amount })
      .where(eq(budget.dept, dept));
  });
}

const noKeyUpdate: Exact = {
  title: "FOR NO KEY UPDATE",
  client: "drizzle",
  engines: postgresOnly,
  tables: { dept_budget: "dept text PRIMARY KEY, remaining int NOT NULL" },
  rows: ["INSERT INTO dept_budget VALUES ('lab', 100)"],
  correct: {
    actors: ({ drizzle: db }) => ({ A: () => spend(db, "lab", 60), B: () => spend(db, "lab", 60) }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT remaining FROM dept_budget"), 40);
    assert.equal(accepted(results), 1);
  },
};

const ride = pgTable("ride", { id: integer().primaryKey(), driver: text() });

async function acceptRide(db: NodePgDatabase, id: number, driver: string): Promise<boolean> {
  const won = await db
    .update(ride)
    .set({ driver })
    .where(and(eq(ride.id, id), isNull(ride.driver)))
    .returning({ id: ride.id });
  return won.length === 1;
}

const conditionalReturning: Exact = {
  title: "a conditional UPDATE … RETURNING",
  client: "drizzle",
  engines: postgresOnly,
  tables: { ride: "id int PRIMARY KEY, driver text" },
  rows: ["INSERT INTO ride VALUES (1, NULL)"],
  correct: {
    actors: ({ drizzle: db }) => ({ A: () => acceptRide(db, 1, "ada"), B: () => acceptRide(db, 1, "bob") }),
  },
  async invariant(_clients, results) {
    assert.equal(values(results).filter((won) => won === true).length, 1, "drivers who got the ride");
  },
};

const visits = pgTable("page_visits", { page: text().primaryKey(), n: integer().notNull() });

async function visit(db: NodePgDatabase, page: string): Promise<void> {
  await db
    .insert(visits)
    .values({ page, n: 1 })
    .onConflictDoUpdate({ target: visits.page, set: { n: sql`${visits.n} + 1` } });
}

const upsertCounter: Exact = {
  title: "a counter that is upserted",
  client: "drizzle",
  engines: postgresOnly,
  tables: { page_visits: "page text PRIMARY KEY, n int NOT NULL" },
  rows: [],
  correct: {
    actors: ({ drizzle: db }) => ({
      A: () => visit(db, "home"),
      B: () => visit(db, "home"),
      C: () => visit(db, "home"),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT n FROM page_visits"), 3, "visits");
  },
};

const tag = pgTable("tag", { name: text().primaryKey() });
const tagging = pgTable("tagging", { photo: integer().notNull(), tag: text().notNull() });

/** What fails is undone up to the savepoint; the rest of the transaction goes on. */
async function tagPhoto(db: NodePgDatabase, photo: number, name: string): Promise<void> {
  await db.transaction(async (tx) => {
    await tx
      .transaction(async (nested) => {
        await nested.insert(tag).values({ name });
      })
      .catch((error: unknown) => {
        if (sqlState(error) !== "23505") throw error;
      });
    await tx.insert(tagging).values({ photo, tag: name });
  });
}

const savepoint: Exact = {
  title: "a unique violation inside of a savepoint",
  client: "drizzle",
  engines: postgresOnly,
  tables: {
    tag: "name text PRIMARY KEY",
    tagging: "photo int NOT NULL, tag text NOT NULL REFERENCES tag (name)",
  },
  rows: [],
  correct: {
    actors: ({ drizzle: db }) => ({ A: () => tagPhoto(db, 1, "sea"), B: () => tagPhoto(db, 2, "sea") }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM tagging"), 2);
    assert.equal(accepted(results), 2);
  },
};

type Tables = {
  invitation: { code: string; guest: string };
  party: { id: number; places: number };
  score_board: { player: string; best: number };
};

const database = ({ kysely }: Clients) => kysely.withTables<Tables>();

async function acceptInvitation(db: Kysely<Tables>, code: string, guest: string): Promise<boolean> {
  return db.transaction().execute(async (trx) => {
    const { numInsertedOrUpdatedRows } = await trx
      .insertInto("invitation")
      .values({ code, guest })
      .onConflict((on) => on.column("code").doNothing())
      .executeTakeFirst();
    if (numInsertedOrUpdatedRows !== 1n) return false;
    await trx
      .updateTable("party")
      .set((eb) => ({ places: eb("places", "-", 1) }))
      .where("id", "=", 1)
      .execute();
    return true;
  });
}

const onConflictNothing: Exact = {
  title: "INSERT … ON CONFLICT DO NOTHING decides",
  client: "kysely",
  engines: postgresOnly,
  tables: {
    invitation: "code text PRIMARY KEY, guest text NOT NULL",
    party: "id int PRIMARY KEY, places int NOT NULL",
  },
  rows: ["INSERT INTO party VALUES (1, 5)"],
  correct: {
    actors: (clients) => ({
      A: () => acceptInvitation(database(clients), "c1", "ada"),
      B: () => acceptInvitation(database(clients), "c1", "eve"),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT places FROM party"), 4);
    assert.equal(values(results).filter((in_) => in_ === true).length, 1);
  },
};

const improve = (db: Kysely<Tables>, player: string, by: number): Promise<void> =>
  retrying(() =>
    db
      .transaction()
      .setIsolationLevel("repeatable read")
      .execute(async (trx) => {
        const { best } = await trx
          .selectFrom("score_board")
          .select("best")
          .where("player", "=", player)
          .executeTakeFirstOrThrow();
        await trx
          .updateTable("score_board")
          .set({ best: best + by })
          .where("player", "=", player)
          .execute();
      }),
  );

const repeatableRead: Exact = {
  title: "REPEATABLE READ, tried again",
  client: "kysely",
  engines: postgresOnly,
  tables: { score_board: "player text PRIMARY KEY, best int NOT NULL" },
  rows: ["INSERT INTO score_board VALUES ('ada', 10)"],
  correct: {
    actors: (clients) => ({
      A: () => improve(database(clients), "ada", 1),
      B: () => improve(database(clients), "ada", 2),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT best FROM score_board"), 13);
  },
};

async function claimTask(knex: Knex, worker: string): Promise<number | undefined> {
  return knex.transaction(async (trx) => {
    const task = await trx("queue_task")
      .where({ state: "new" })
      .orderBy("id")
      .forUpdate()
      .skipLocked()
      .first();
    if (!task) return undefined;
    await trx("queue_task").where({ id: task.id }).update({ state: "done", worker });
    return task.id;
  });
}

const skipLocked: Exact = {
  title: "FOR UPDATE SKIP LOCKED",
  client: "knex",
  engines: everywhere,
  tables: { queue_task: "id int PRIMARY KEY, state varchar(20) NOT NULL, worker varchar(20)" },
  rows: ["INSERT INTO queue_task VALUES (1, 'new', NULL), (2, 'new', NULL)"],
  correct: { actors: ({ knex }) => ({ A: () => claimTask(knex, "A"), B: () => claimTask(knex, "B") }) },
  async invariant(clients, results) {
    assert.equal(new Set(values(results)).size, 2);
    assert.equal(await number(clients, "SELECT count(DISTINCT worker) FROM queue_task"), 2);
  },
};

class Busy extends Error {}

async function editDocument(knex: Knex, id: number, line: string): Promise<void> {
  await knex.transaction(async (trx) => {
    const document = await trx("shared_document")
      .where({ id })
      .forUpdate()
      .noWait()
      .first("body")
      .catch((error: unknown) => {
        throw sqlState(error) === "55P03" ? new Busy() : error;
      });
    await trx("shared_document")
      .where({ id })
      .update({ body: `${document.body}\n${line}` });
  });
}

const noWait: Exact = {
  title: "FOR UPDATE NOWAIT, refused cleanly",
  client: "knex",
  engines: postgresOnly,
  tables: { shared_document: "id int PRIMARY KEY, body text NOT NULL" },
  rows: ["INSERT INTO shared_document VALUES (1, 'title')"],
  correct: {
    actors: ({ knex }) => ({
      A: () => editDocument(knex, 1, "by ada"),
      B: () => editDocument(knex, 1, "by bob"),
    }),
  },
  async invariant(clients, results) {
    const [document] = await clients.query("SELECT body FROM shared_document");
    assert.equal(String(document?.["body"]).split("\n").length, 1 + accepted(results), "lines");
    const errors = Object.values(results).flatMap((r) => (r.status === "rejected" ? [r.reason] : []));
    assert.ok(errors.length <= 1 && errors.every((error) => error instanceof Busy));
  },
};

async function openTab(knex: Knex, guest: string): Promise<boolean> {
  try {
    await knex("bar_tab").insert({ guest, total: 0 });
    return true;
  } catch (error) {
    if (["23505", "ER_DUP_ENTRY"].includes(sqlState(error) ?? "")) return false;
    throw error;
  }
}

const uniqueAndCatch: Exact = {
  title: "a unique constraint, and the refusal caught",
  client: "knex",
  engines: everywhere,
  tables: { bar_tab: "guest varchar(20) PRIMARY KEY, total int NOT NULL" },
  rows: [],
  correct: { actors: ({ knex }) => ({ A: () => openTab(knex, "ada"), B: () => openTab(knex, "ada") }) },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM bar_tab"), 1);
    assert.equal(values(results).filter((opened) => opened === true).length, 1);
  },
};

export const exactBuilders: readonly Exact[] = [
  noKeyUpdate,
  conditionalReturning,
  upsertCounter,
  savepoint,
  onConflictNothing,
  repeatableRead,
  skipLocked,
  noWait,
  uniqueAndCatch,
];
