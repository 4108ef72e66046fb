import { Client } from "pg";
import { eventually } from "./wait.ts";

/**
 * Kills a backend of a PostgreSQL server, which makes the server crash. Resolves when it has recovered: not before a
 * bystander was ended by it, since for a moment the server goes on as if nothing had happened.
 */
export async function killBackend(connectionString: string): Promise<void> {
  const bystander = new Client({ connectionString });
  bystander.on("error", () => {});
  const ended = new Promise((resolve) => bystander.once("end", resolve));
  await bystander.connect();
  const victim = new Client({ connectionString });
  victim.on("error", () => {});
  await victim.connect();
  const { rows } = await victim.query<{ pid: number }>("SELECT pg_backend_pid() AS pid");
  process.kill(rows[0]?.pid as number, "SIGKILL");
  await ended;
  await eventually(async () => {
    const client = new Client({ connectionString });
    client.on("error", () => {});
    await client.connect();
    await client.end();
  });
}
