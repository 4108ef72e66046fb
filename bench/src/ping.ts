import { Client } from "pg";
import { roundTrip } from "../../packages/cli/src/bench/measure.ts";

/** What a round trip takes, in milliseconds, as SELECT 1 takes it. */
export async function ping(url: string): Promise<number> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    return await roundTrip(() => client.query("SELECT 1"));
  } finally {
    await client.end();
  }
}
