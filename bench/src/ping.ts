import { Client } from "pg";
import { median } from "./measure.ts";

/** What a round trip takes, in milliseconds, as SELECT 1 takes it. */
export async function ping(url: string): Promise<number> {
  const client = new Client({ connectionString: url });
  await client.connect();
  const times: number[] = [];
  for (let i = 0; i < 300; i++) {
    const since = performance.now();
    await client.query("SELECT 1");
    times.push(performance.now() - since);
  }
  await client.end();
  return median(times);
}
