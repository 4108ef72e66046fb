/** Flows without a race, on bare drivers. */
import assert from "node:assert/strict";
import type { Pool } from "pg";
import type { Sql } from "postgres";
import { retrying, sqlState, withTransaction } from "./app.ts";
import { type Exact, accepted, number, postgresOnly, values } from "./race.ts";

async function reserveCourt(pool: Pool, from: number, to: number): Promise<void> {
  try {
    await pool.query("INSERT INTO court_slot (during) VALUES (int4range($1, $2))", [from, to]);
  } catch (error) {
    if (sqlState(error) === "23P01") throw new Error("The court is taken", { cause: error });
    throw error;
  }
}

const excludeConstraint: Exact = {
  title: "an EXCLUDE constraint",
  client: "pg",
  engines: postgresOnly,
  tables: { court_slot: "during int4range NOT NULL, EXCLUDE USING gist (during WITH &&)" },
  rows: ["INSERT INTO court_slot VALUES (int4range(1, 3))"],
  correct: {
    actors: ({ pool }) => ({
      A: () => reserveCourt(pool, 9, 11),
      B: () => reserveCourt(pool, 10, 12),
      C: () => reserveCourt(pool, 3, 5),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM court_slot"), 3);
    assert.equal(accepted(results), 2);
  },
};

const joinClub = (pool: Pool, name: string): Promise<void> =>
  withTransaction(pool, async (client) => {
    await client.query("LOCK TABLE club_member IN SHARE ROW EXCLUSIVE MODE");
    const { rows } = await client.query("SELECT count(*)::int AS n FROM club_member");
    if (rows[0].n >= 2) throw new Error("The club is full");
    await client.query("INSERT INTO club_member (name) VALUES ($1)", [name]);
  });

const lockTable: Exact = {
  title: "LOCK TABLE, then count",
  client: "pg",
  engines: postgresOnly,
  tables: { club_member: "name text NOT NULL" },
  rows: ["INSERT INTO club_member VALUES ('cy')"],
  correct: { actors: ({ pool }) => ({ A: () => joinClub(pool, "ada"), B: () => joinClub(pool, "bob") }) },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM club_member"), 2, "members");
    assert.equal(accepted(results), 1);
  },
};

async function claimPrint(pool: Pool, printer: string): Promise<number | undefined> {
  const { rows } = await pool.query(
    `WITH next AS (
       SELECT id FROM print_job WHERE printer IS NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
     )
     UPDATE print_job SET printer = $1 FROM next WHERE print_job.id = next.id RETURNING print_job.id`,
    [printer],
  );
  return rows[0]?.id;
}

const cteClaim: Exact = {
  title: "a CTE that claims",
  client: "pg",
  engines: postgresOnly,
  tables: { print_job: "id int PRIMARY KEY, printer text" },
  rows: ["INSERT INTO print_job VALUES (1, NULL), (2, NULL)"],
  correct: {
    actors: ({ pool }) => ({ A: () => claimPrint(pool, "A"), B: () => claimPrint(pool, "B") }),
  },
  async invariant(clients, results) {
    assert.equal(new Set(values(results)).size, 2, "each has a job of its own");
    assert.equal(await number(clients, "SELECT count(DISTINCT printer) FROM print_job"), 2);
  },
};

/** NOT EXISTS spares an error in the usual case; the constraint decides in the other. */
async function subscribe(pool: Pool, address: string): Promise<boolean> {
  try {
    const { rowCount } = await pool.query(
      `INSERT INTO newsletter (address) SELECT $1
       WHERE NOT EXISTS (SELECT 1 FROM newsletter WHERE address = $1)`,
      [address],
    );
    return rowCount === 1;
  } catch (error) {
    if (sqlState(error) === "23505") return false;
    throw error;
  }
}

const notExistsAndUnique: Exact = {
  title: "INSERT … WHERE NOT EXISTS, and UNIQUE",
  client: "pg",
  engines: postgresOnly,
  tables: { newsletter: "address text NOT NULL UNIQUE" },
  rows: [],
  correct: {
    actors: ({ pool }) => ({
      A: () => subscribe(pool, "ada@example.com"),
      B: () => subscribe(pool, "ada@example.com"),
      C: () => subscribe(pool, "bob@example.com"),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM newsletter"), 2);
    assert.equal(values(results).filter((added) => added === true).length, 2);
  },
};

/** The last place goes to one of them: both write the row of the course before they look. */
const enrol = (pool: Pool, course: number, student: string): Promise<void> =>
  withTransaction(pool, async (client) => {
    await client.query("UPDATE course SET changes = changes + 1 WHERE id = $1", [course]);
    const { rows } = await client.query("SELECT count(*)::int AS n FROM enrolment WHERE course = $1", [
      course,
    ]);
    if (rows[0].n >= 1) throw new Error("The course is full");
    await client.query("INSERT INTO enrolment (course, student) VALUES ($1, $2)", [course, student]);
  });

const writeFirst: Exact = {
  title: "a row is written first, so that others wait",
  client: "pg",
  engines: postgresOnly,
  tables: {
    course: "id int PRIMARY KEY, changes int NOT NULL",
    enrolment: "course int NOT NULL, student text NOT NULL",
  },
  rows: ["INSERT INTO course VALUES (1, 0)"],
  correct: { actors: ({ pool }) => ({ A: () => enrol(pool, 1, "ada"), B: () => enrol(pool, 1, "bob") }) },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM enrolment"), 1);
    assert.equal(accepted(results), 1);
  },
};

const nextRound = (sql: Sql, game: number, limit: number) =>
  sql.begin(async (tx) => {
    await tx`SELECT pg_advisory_xact_lock(${game})`;
    const [found] = await tx<{ n: number }[]>`SELECT count(*)::int AS n FROM game_round WHERE game = ${game}`;
    const round = (found?.n ?? 0) + 1;
    if (round > limit) throw new Error("The game is over");
    await tx`INSERT INTO game_round (game, round) VALUES (${game}, ${round})`;
    return round;
  });

const advisoryLock: Exact = {
  title: "an advisory lock of the transaction",
  client: "postgres",
  engines: postgresOnly,
  tables: { game_round: "game int NOT NULL, round int NOT NULL" },
  rows: [],
  correct: { actors: ({ sql }) => ({ A: () => nextRound(sql, 7, 2), B: () => nextRound(sql, 7, 2) }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(DISTINCT round) FROM game_round"), 2);
    assert.equal(await number(clients, "SELECT count(*) FROM game_round"), 2);
  },
};

async function takeToken(sql: Sql, owner: string): Promise<boolean> {
  const taken = await sql`DELETE FROM login_token WHERE owner = ${owner} RETURNING token`;
  if (taken.length === 0) return false;
  await sql`INSERT INTO login_session (owner) VALUES (${owner})`;
  return true;
}

const deleteReturning: Exact = {
  title: "DELETE … RETURNING as a claim",
  client: "postgres",
  engines: postgresOnly,
  tables: {
    login_token: "owner text PRIMARY KEY, token text NOT NULL",
    login_session: "owner text NOT NULL",
  },
  rows: ["INSERT INTO login_token VALUES ('ada', 'secret')"],
  correct: { actors: ({ sql }) => ({ A: () => takeToken(sql, "ada"), B: () => takeToken(sql, "ada") }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM login_session"), 1, "logins with one link");
  },
};

/** On call: at least one doctor. Whoever is ended for the sake of the other looks again. */
const goOffCall = (sql: Sql, doctor: string) =>
  retrying(() =>
    sql.begin("isolation level serializable", async (tx) => {
      const [found] = await tx<{ n: number }[]>`SELECT count(*)::int AS n FROM doctor WHERE on_call`;
      if ((found?.n ?? 0) < 2) throw new Error("Somebody has to stay");
      await tx`UPDATE doctor SET on_call = false WHERE name = ${doctor}`;
    }),
  );

const serializable: Exact = {
  title: "SERIALIZABLE, tried again",
  client: "postgres",
  engines: postgresOnly,
  tables: { doctor: "name text PRIMARY KEY, on_call boolean NOT NULL" },
  rows: ["INSERT INTO doctor VALUES ('ada', true), ('bob', true)"],
  correct: { actors: ({ sql }) => ({ A: () => goOffCall(sql, "ada"), B: () => goOffCall(sql, "bob") }) },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM doctor WHERE on_call"), 1, "doctors on call");
    assert.equal(accepted(results), 1);
  },
};

/** They share a table and nothing else. */
const rename = (pool: Pool, id: number, suffix: string): Promise<void> =>
  withTransaction(pool, async (client) => {
    const { rows } = await client.query("SELECT name FROM profile WHERE id = $1", [id]);
    await client.query("UPDATE profile SET name = $1 WHERE id = $2", [rows[0].name + suffix, id]);
  });

const apart: Exact = {
  title: "read and written, but each its own row",
  client: "pg",
  engines: postgresOnly,
  tables: { profile: "id int PRIMARY KEY, name text NOT NULL" },
  rows: ["INSERT INTO profile VALUES (1, 'ada'), (2, 'bob')"],
  correct: { actors: ({ pool }) => ({ A: () => rename(pool, 1, "!"), B: () => rename(pool, 2, "?") }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM profile WHERE name IN ('ada!', 'bob?')"), 2);
  },
};

/** BEGIN and COMMIT travel with what is between them. */
async function moveStock(pool: Pool, from: string, to: string): Promise<void> {
  await pool.query(`BEGIN;
    UPDATE depot SET crates = crates - 1 WHERE name = '${from}';
    UPDATE depot SET crates = crates + 1 WHERE name = '${to}';
    COMMIT`);
}

const inOneMessage: Exact = {
  title: "a transaction in one message",
  client: "pg",
  engines: postgresOnly,
  tables: { depot: "name text PRIMARY KEY, crates int NOT NULL" },
  rows: ["INSERT INTO depot VALUES ('north', 5), ('south', 5)"],
  correct: {
    actors: ({ pool }) => ({
      A: () => moveStock(pool, "north", "south"),
      B: () => moveStock(pool, "north", "south"),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT crates FROM depot WHERE name = 'north'"), 3);
    assert.equal(await number(clients, "SELECT crates FROM depot WHERE name = 'south'"), 7);
  },
};

export const exactDrivers: readonly Exact[] = [
  excludeConstraint,
  lockTable,
  cteClaim,
  notExistsAndUnique,
  writeFirst,
  advisoryLock,
  deleteReturning,
  serializable,
  apart,
  inOneMessage,
];
