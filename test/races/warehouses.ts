import assert from "node:assert/strict";
import type { IsolationLevel, Kysely } from "kysely";
import { retrying } from "./app.ts";
import type { Clients } from "./clients.ts";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

type Tables = {
  warehouse_stock: { warehouse: string; sku: string; qty: number };
};

const RESERVE = 10;
const database = ({ kysely }: Clients) => kysely.withTables<Tables>();

function take(
  db: Kysely<Tables>,
  level: IsolationLevel,
  warehouse: string,
  sku: string,
  qty: number,
): Promise<void> {
  return db
    .transaction()
    .setIsolationLevel(level)
    .execute(async (trx) => {
      const stock = await trx.selectFrom("warehouse_stock").select("qty").where("sku", "=", sku).execute();
      const total = stock.reduce((sum, row) => sum + row.qty, 0);
      if (total - qty < RESERVE) throw new Error("This would touch the reserve");
      await trx
        .updateTable("warehouse_stock")
        .set((eb) => ({ qty: eb("qty", "-", qty) }))
        .where("sku", "=", sku)
        .where("warehouse", "=", warehouse)
        .execute();
    });
}

/** A snapshot is not enough: each changes a row that the other one has only read. */
const naive = (db: Kysely<Tables>, warehouse: string): Promise<void> =>
  take(db, "repeatable read", warehouse, "lamp", 8);

const fixed = (db: Kysely<Tables>, warehouse: string): Promise<void> =>
  retrying(() => take(db, "serializable", warehouse, "lamp", 8));

export const warehouses: Race = {
  title: "the reserve is shared by two warehouses",
  client: "kysely",
  engines: postgresOnly,
  tables: {
    warehouse_stock:
      "warehouse text NOT NULL, sku text NOT NULL, qty int NOT NULL, PRIMARY KEY (sku, warehouse)",
  },
  rows: ["INSERT INTO warehouse_stock VALUES ('north', 'lamp', 12), ('south', 'lamp', 12)"],
  naive: {
    actors: (clients) => ({
      A: () => naive(database(clients), "north"),
      B: () => naive(database(clients), "south"),
    }),
  },
  fixed: {
    actors: (clients) => ({
      A: () => fixed(database(clients), "north"),
      B: () => fixed(database(clients), "south"),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT sum(qty) FROM warehouse_stock"), 16, "lamps in all");
    assert.equal(accepted(results), 1);
  },
  expects: "write skew",
};
