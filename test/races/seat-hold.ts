import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Race, number, postgresOnly } from "./race.ts";

/** A seat that is sold can no longer be held. */
async function hold(pool: Pool, seat: string, guest: string): Promise<number> {
  const { rows } = await pool.query(
    `INSERT INTO seat_hold (seat, guest) SELECT $1, $2
     WHERE EXISTS (SELECT 1 FROM seat WHERE name = $1 AND sold_to IS NULL) RETURNING id`,
    [seat, guest],
  );
  if (rows.length === 0) throw new Error("The seat is sold");
  return rows[0].id;
}

async function giveUp(pool: Pool, id: number): Promise<never> {
  await pool.query("DELETE FROM seat_hold WHERE id = $1", [id]);
  throw new Error("Somebody else was faster");
}

/**
 * Who held it first gets it. That stands against one switch at any place: it takes a second one, to a guest who held it
 * as the second and looks when the first has bought and gone.
 */
async function naive(pool: Pool, seat: string, guest: string): Promise<void> {
  const id = await hold(pool, seat, guest);
  const { rows } = await pool.query("SELECT min(id) AS first FROM seat_hold WHERE seat = $1", [seat]);
  if (rows[0].first !== id) return giveUp(pool, id);
  await pool.query("INSERT INTO seat_ticket (seat, guest) VALUES ($1, $2)", [seat, guest]);
  await pool.query("UPDATE seat SET sold_to = $2 WHERE name = $1", [seat, guest]);
  await pool.query("DELETE FROM seat_hold WHERE id = $1", [id]);
}

async function fixed(pool: Pool, seat: string, guest: string): Promise<void> {
  const id = await hold(pool, seat, guest);
  const sold = await pool.query("UPDATE seat SET sold_to = $2 WHERE name = $1 AND sold_to IS NULL", [
    seat,
    guest,
  ]);
  if (sold.rowCount === 0) return giveUp(pool, id);
  await pool.query("INSERT INTO seat_ticket (seat, guest) VALUES ($1, $2)", [seat, guest]);
  await pool.query("DELETE FROM seat_hold WHERE id = $1", [id]);
}

export const seatHold: Race = {
  title: "the first hold of a seat wins",
  client: "pg",
  engines: postgresOnly,
  tables: {
    seat: "name text PRIMARY KEY, sold_to text",
    seat_hold: "id serial PRIMARY KEY, seat text NOT NULL, guest text NOT NULL",
    seat_ticket: "seat text NOT NULL, guest text NOT NULL",
  },
  rows: ["INSERT INTO seat VALUES ('4C', NULL)"],
  naive: { actors: ({ pool }) => ({ A: () => naive(pool, "4C", "ada"), B: () => naive(pool, "4C", "bob") }) },
  fixed: { actors: ({ pool }) => ({ A: () => fixed(pool, "4C", "ada"), B: () => fixed(pool, "4C", "bob") }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM seat_ticket"), 1, "tickets for the seat");
    assert.equal(await number(clients, "SELECT count(*) FROM seat_hold"), 0, "holds that nobody gave back");
  },
};
