/** One trial, in a process of its own: `node one.ts NAME URL`. Says on the last line what became of it. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { Broken, Ground } from "./ground.ts";
import { trials } from "./trials.ts";

const [, , name, url = ""] = process.argv;
const trial = trials.find((each) => each.name === name);
if (!trial) throw new Error(`There is no trial "${name}"`);

const pool = new Pool({ connectionString: url, max: 1 });
await holdfast(fromPg(pool)).migrate();
await pool.end();
const ground = new Ground(url);
let said: { verdict: "kept" | "broken" | "failed"; why?: string } = { verdict: "kept" };
try {
  await trial.run(ground);
} catch (error) {
  const why = error instanceof Error ? (error.stack ?? error.message) : String(error);
  said = {
    verdict: error instanceof Broken ? "broken" : "failed",
    why: error instanceof Broken ? error.message : why,
  };
}
console.log(JSON.stringify(said));
// What a mutant has left open is nobody's concern.
await Promise.race([ground.close(), new Promise((resolve) => setTimeout(resolve, 3000))]);
process.exit(0);
