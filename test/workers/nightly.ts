/** One instance, at three o'clock: the example of docs/quick-start.md, word for word (test/nightly.test.ts compares). */
import { holdfast, once } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

const pool = new Pool({ connectionString: process.argv[2], max: 2 });
const hf = holdfast(fromPg(pool));

const day = new Date().toISOString().slice(0, 10);
const night = await once(hf, ["nightly-report", day], async (tx) => {
  await tx.client.query("INSERT INTO report (day) VALUES ($1)", [day]);
  return "written";
});
console.log(night.replayed ? "Another instance wrote it" : night.value);

await pool.end();
