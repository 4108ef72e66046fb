import assert from "node:assert/strict";
import type { Sql } from "postgres";
import { retrying } from "./app.ts";
import { type Race, number, postgresOnly } from "./race.ts";

interface Event {
  id: string;
  player: string;
  points: number;
}

const addPoints = (sql: Sql, { player, points }: Event) =>
  sql.begin("isolation level repeatable read", async (tx) => {
    const [row] = await tx<{ score: number }[]>`SELECT score FROM player WHERE name = ${player}`;
    await tx`UPDATE player SET score = ${(row?.score ?? 0) + points} WHERE name = ${player}`;
  });

/** The server refuses to lose an update, and ends the transaction. By then the event counts as seen. */
async function naive(sql: Sql, event: Event): Promise<void> {
  const seen = await sql`INSERT INTO seen_event (id, points) VALUES (${event.id}, ${event.points})
    ON CONFLICT DO NOTHING RETURNING id`;
  if (seen.length > 0) await addPoints(sql, event);
}

async function fixed(sql: Sql, event: Event): Promise<void> {
  const seen = await sql`INSERT INTO seen_event (id, points) VALUES (${event.id}, ${event.points})
    ON CONFLICT DO NOTHING RETURNING id`;
  if (seen.length > 0) await retrying(() => addPoints(sql, event));
}

const won = { id: "e1", player: "ada", points: 3 };
const bonus = { id: "e2", player: "ada", points: 5 };

export const lostEvent: Race = {
  title: "a serialization failure that nobody tries again",
  client: "postgres",
  engines: postgresOnly,
  tables: {
    player: "name text PRIMARY KEY, score int NOT NULL",
    seen_event: "id text PRIMARY KEY, points int NOT NULL",
  },
  rows: ["INSERT INTO player VALUES ('ada', 0)"],
  naive: { actors: ({ sql }) => ({ A: () => naive(sql, won), B: () => naive(sql, bonus) }) },
  fixed: { actors: ({ sql }) => ({ A: () => fixed(sql, won), B: () => fixed(sql, bonus) }) },
  async invariant(clients) {
    const points = await number(clients, "SELECT sum(points) FROM seen_event");
    assert.equal(await number(clients, "SELECT score FROM player"), points, "points of the events seen");
  },
};
