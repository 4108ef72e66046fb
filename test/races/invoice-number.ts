import assert from "node:assert/strict";
import type { Knex } from "knex";
import { type Race, everywhere, number } from "./race.ts";

async function naive(knex: Knex, customer: string): Promise<number> {
  const last = await knex("invoice").max({ number: "number" }).first();
  const next = (last?.["number"] ?? 0) + 1;
  await knex("invoice").insert({ number: next, customer });
  return next;
}

/** The number is taken from a row of its own, which stays locked until the invoice is there: no gap either. */
async function fixed(knex: Knex, customer: string): Promise<number> {
  return knex.transaction(async (trx) => {
    await trx("invoice_series").where({ name: "2026" }).increment("last", 1);
    const series = await trx("invoice_series").where({ name: "2026" }).first("last");
    await trx("invoice").insert({ number: series.last, customer });
    return series.last;
  });
}

export const invoiceNumber: Race = {
  title: "an invoice number is the highest plus one",
  client: "knex",
  engines: everywhere,
  tables: {
    invoice: "number int NOT NULL, customer varchar(20) NOT NULL",
    invoice_series: "name varchar(10) PRIMARY KEY, last int NOT NULL",
  },
  rows: ["INSERT INTO invoice VALUES (1, 'cy')", "INSERT INTO invoice_series VALUES ('2026', 1)"],
  naive: { actors: ({ knex }) => ({ A: () => naive(knex, "ada"), B: () => naive(knex, "bob") }) },
  fixed: { actors: ({ knex }) => ({ A: () => fixed(knex, "ada"), B: () => fixed(knex, "bob") }) },
  async invariant(clients) {
    const rows = await clients.query("SELECT number FROM invoice ORDER BY number");
    assert.deepEqual(
      rows.map((row) => Number(row["number"])),
      [1, 2, 3],
    );
    assert.equal(await number(clients, "SELECT count(DISTINCT customer) FROM invoice"), 3);
  },
  expects: "phantom",
};
