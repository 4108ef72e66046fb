/** One instance of the service. */
import { once } from "node:events";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { reports } from "./index.ts";

const pool = new Pool({ connectionString: process.env["DATABASE_URL"] });
const hf = holdfast(fromPg(pool));
process.send?.("up");
const [cron] = (await once(process, "message")) as [string];

const nightly = reports(hf, cron, async (night, signal, attempt) => {
  process.send?.("begun");
  // The first one takes so long that it is killed meanwhile.
  const ms = attempt === 1 ? 60_000 : 10;
  await new Promise<void>((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()));
  });
  return `All orders until ${night.toISOString()}`;
});
await nightly.start();

// Shuts down when it is told to, or when whoever started it is gone.
await Promise.race([once(process, "SIGTERM"), once(process, "disconnect")]);
await nightly.stop({ grace: 1000 });
await hf.close();
await pool.end();
process.disconnect?.();
