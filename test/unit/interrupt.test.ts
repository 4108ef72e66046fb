/** Requests to cancel that find nothing to cancel yet: the server forgets them, and whoever waits must not. */
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { boundedBy, interruptible } from "../../packages/holdfast/src/waiting/interrupt.ts";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";

let database: TestDatabase;
let pool: Pool;
let client: PoolClient;
let pid: number | undefined;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url });
  client = await pool.connect();
  pid = (await client.query<{ pid: number }>("SELECT pg_backend_pid() AS pid")).rows[0]?.pid;
});
afterAll(async () => {
  client?.release();
  await pool?.end();
  await database?.drop();
});

/** The first request is lost on its way. */
function losing() {
  let requests = 0;
  return {
    lost: new AbortController().signal,
    requests: () => requests,
    async cancel() {
      if (++requests > 1) await pool.query("SELECT pg_cancel_backend($1)", [pid]);
    },
  };
}

const long = () => client.query("SELECT pg_sleep(60)");

/** What comes next on the connection is not hit. */
async function isClean(): Promise<void> {
  for (let i = 0; i < 20; i++) await client.query("SELECT pg_sleep(0.01)");
}

test("an abort asks again", async () => {
  const connection = losing();
  const abort = new AbortController();
  let silent = false;
  const running = interruptible(connection, abort.signal, long, () => (silent = true));
  setTimeout(() => abort.abort(new Error("no more")), 100);
  await expect(running).rejects.toThrow("no more");
  expect(silent).toBe(false);
  expect(connection.requests()).toBeGreaterThan(1);
  await isClean();
});

test("so does the end of a wait", async () => {
  const connection = losing();
  expect(await boundedBy(connection, 100, long)).toBe(undefined);
  expect(connection.requests()).toBeGreaterThan(1);
  await isClean();
});
