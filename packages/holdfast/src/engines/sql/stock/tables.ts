/** The tables of stock. */
import { table } from "../table.ts";

export const stockLevel = table({
  name: "stock_level",
  columns: {
    id: "serial",
    book: "text",
    sku: "text",
    location: "text",
    on_hand: "integer",
    reserved: "integer",
    min_level: "integer",
    version: "integer",
    elsewhere: "boolean",
  },
  key: ["book", "sku", "location"],
});

/** Only ever added to. */
export const stockMovement = table({
  name: "stock_movement",
  columns: {
    level: "integer",
    version: "integer",
    quantity: "integer",
    balance: "integer",
    at: "moment",
    line: "integer",
    parts: "integer",
    kind: "text",
    source: "text",
    external_id: "text",
    reference_type: "text?",
    reference_id: "text?",
    user_id: "text?",
    note: "text?",
    origin: "text?",
  },
  key: ["level", "version"],
  unique: [["external_id", "level"]],
  indexes: [["level", "at"], ["origin", "level"], ["reference_id"], ["at"]],
});

export const stockReservation = table({
  name: "stock_reservation",
  columns: {
    book: "text",
    id: "text",
    state: "text",
    until: "moment",
    made_at: "moment",
    levels: "integers",
    quantities: "integers",
    source: "text",
    reference_type: "text?",
    reference_id: "text?",
    user_id: "text?",
    note: "text?",
  },
  key: ["book", "id"],
});

/** Of those that are open: what a level's `reserved` is the sum of. */
export const stockReserved = table({
  name: "stock_reserved",
  columns: { level: "integer", reservation: "text", quantity: "integer", until: "moment" },
  key: ["level", "reservation"],
});

export const stockTables = [stockLevel, stockMovement, stockReservation, stockReserved] as const;
