/** One process of the shop: it is told of every second or third order, and of those of its neighbour. */
import { connect } from "../database.ts";
import { sell } from "./index.ts";

const [own = 0, shops = 1] = process.argv.slice(2).map(Number);
const database = connect(process.env["DATABASE_URL"] ?? "");
const orders = Array.from({ length: 30 }, (_, i) => i).filter((i) =>
  [own, (own + 1) % shops].includes(i % shops),
);
const answers = await Promise.all(
  orders.map((order) =>
    sell(database.hf, `order ${order}`, [
      { sku: "MUG", quantity: 1 },
      { sku: "CAP", quantity: 1 },
      // The same thing twice in one cart.
      { sku: "MUG", quantity: 1 },
    ]),
  ),
);
await database[Symbol.asyncDispose]();
process.send?.(answers);
process.disconnect?.();
