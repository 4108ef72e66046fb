/** Poolers lend sessions out in their own ways: a lock of a session is refused behind each of them, every time. */
import { UnsupportedError, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { startPgbouncer } from "./harness/pgbouncer.ts";
import type { StartedServer } from "./harness/started-server.ts";

const reason = unavailable("pgbouncer");

describe.each<[string, string[], number?]>([
  ["in turn", ["server_round_robin = 1"]],
  ["in turn, two of them", ["server_round_robin = 1", "default_pool_size = 2"]],
  ["in turn, three of them", ["server_round_robin = 1", "default_pool_size = 3"]],
  ["the last one first", []],
  ["the last one first, two of them", ["default_pool_size = 2"]],
  // Who waits for one gives up after a while.
  ["one for all", ["default_pool_size = 1"], 2],
])("lends sessions %s", (_, settings, tries = 20) => {
  let database: TestDatabase;
  let pooler: StartedServer;
  let url: string;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase("postgres");
    const { port, password } = new URL(serverUrl("postgres"));
    pooler = await startPgbouncer(
      { port: Number(port), password: decodeURIComponent(password) },
      "transaction",
      settings,
    );
    url = Object.assign(new URL(pooler.url), { pathname: `/${database.name}` }).href;
  });

  afterAll(async () => {
    await pooler?.stop();
    await database?.drop();
  });

  // Each finds out by itself.
  test("and nobody believes to have one of its own, busy or not", async ({ skip }) => {
    skip(reason !== undefined, reason);
    const believed: number[] = [];
    for (let i = 0; i < tries; i++) {
      const pool = new Pool({ connectionString: url, max: 4 });
      const others = new Pool({ connectionString: url, max: 2 });
      const hf = holdfast(fromPg(pool));
      // So many sessions are there to be lent.
      const warm = Array.from({ length: (i % 3) + 1 }, () => pool.query("SELECT pg_sleep(0.01)"));
      await Promise.all(warm);
      const busy = i % 2 === 1 ? [others.query("SELECT pg_sleep(0.05)"), others.query("SELECT 1")] : [];
      try {
        const held = await hf.hold(key("report"), { wait: 5000 });
        believed.push(i);
        await held.release();
      } catch (error) {
        expect(error).toBeInstanceOf(UnsupportedError);
      } finally {
        await Promise.all(busy);
        await hf.close();
        await pool.end();
        await others.end();
      }
    }
    expect(believed).toEqual([]);
  });
});
