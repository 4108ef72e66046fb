/** Takes two locks one after the other: `node lock-order.ts URL order|stock`, with HOLDFAST_ORDER in its environment. */
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

const [url = "", first] = process.argv.slice(2);
const pool = new Pool({ connectionString: url, max: 2 });
const hf = holdfast(fromPg(pool), { hazards: "count" });

await hf.transaction(async (tx) => {
  const order = () => tx.lock(key("order", 1));
  const stock = () => tx.client.query("UPDATE stock SET n = n - 1 WHERE id = 1");
  for (const take of first === "order" ? [order, stock] : [stock, order]) await take();
});
await hf.close();
await pool.end();
