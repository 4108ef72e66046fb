/** One instance of the service, as cron wakes it. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { nightly, reconcile } from "./index.ts";

const [job = "", name = ""] = process.argv.slice(2);
const pool = new Pool({ connectionString: process.env["DATABASE_URL"] });
const hf = holdfast(fromPg(pool));
const ran = await nightly(hf, job, (lease) => reconcile(hf, name, lease));
await hf.close();
await pool.end();
process.send?.(ran);
