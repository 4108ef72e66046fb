/**
 * A session that the server ends as soon as it has begun: the greeting and the end come in one piece, before whoever waits
 * for the connection has run. A process that nobody kept from it ends with the error.
 */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, Pool } from "pg";
import { startProxy } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";

const [url = ""] = process.argv.slice(2);
const name = `one breath ${process.pid}`;
const direct = new Client({ connectionString: url });
await direct.connect();
const proxy = await startProxy({ port: Number(new URL(url).port) });
const pool = new Pool({ connectionString: proxy.url(url), application_name: name, max: 2 });
pool.on("error", () => {});
const hf = holdfast(fromPg(pool));

let greeted!: () => void;
const greeting = new Promise<void>((resolve) => (greeted = resolve));
// "Ready for query", which is the end of the greeting.
const ready = Buffer.from([0x5a, 0, 0, 0, 5, 0x49]);
let held = false;
proxy.cutWhen((direction, chunk) => {
  if (held || direction !== "to-client" || !chunk.includes(ready)) return "pass";
  held = true;
  greeted();
  return "hold";
});
const running = hf.transaction({ retry: false }, async () => {}).catch((error: unknown) => error);
await greeting;
await direct.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", [
  name,
]);
await eventually(async () => {
  const { rows } = await direct.query("SELECT FROM pg_stat_activity WHERE application_name = $1", [name]);
  return rows.length === 0;
});
// What the server has sent is with the proxy by then.
await new Promise((resolve) => setTimeout(resolve, 100));
proxy.thaw();
const error = await running;
await pool.end();
await direct.end();
await proxy.close();
console.log((error as { code?: string }).code);
