/** One worker. It ends when there is nothing left; or, if it is doomed, in the middle of its work. */
import { setTimeout as sleep } from "node:timers/promises";
import { sql } from "holdfast";
import { connect } from "../database.ts";
import { claim, complete } from "./index.ts";

const doomed = process.argv.includes("doomed");
await using database = connect(process.env["DATABASE_URL"] ?? "");
for (;;) {
  const jobs = await claim(database, 5, 1500);
  for (const [i, job] of jobs.entries()) {
    if (doomed && i === 1) process.kill(process.pid, "SIGKILL");
    await complete(database.hf, job, (tx) =>
      tx.query(sql`INSERT INTO holdfast_example_effect (job) VALUES (${job.id})`),
    );
  }
  const [left] = await database.query<{ n: number }>(
    sql`SELECT count(*) AS n FROM holdfast_example_job WHERE state <> 'failed'`,
  );
  if (Number(left?.n) === 0) break;
  // Others have it; or had it, and are dead.
  if (jobs.length === 0) await sleep(50);
}
