/** A→B and B→A at the same time: the deadlock of every bank example. */
import { holdfast, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { Client } from "pg";
import { describe, expect, inject, test } from "vitest";
import { type Backend, backendNamed, backends, plainCampaigns } from "./backends.ts";
import { serverUrl } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";
import { runWorkers } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { TransferArg, TransferResult } from "./workers/transfer.ts";

const worker = new URL("./workers/transfer.ts", import.meta.url);
const accounts = 6;
const processes = 4;

interface Outcome {
  done: number;
  /** What callers were told. */
  deadlocks: number;
  errors: string[];
  money: number;
  /** What the server counted. */
  onServer: number;
}

async function run(backend: Backend, how: TransferArg["how"], transfers: number): Promise<Outcome> {
  const place = await placeFor(backend);
  try {
    const site = await backend.open(place.url);
    const hf = holdfast(site.database);
    try {
      await hf.migrate();
      await execute(
        site,
        sql`CREATE TABLE account (id integer NOT NULL PRIMARY KEY, balance integer NOT NULL)`,
      );
      for (let id = 1; id <= accounts; id++)
        await execute(site, sql`INSERT INTO account (id, balance) VALUES (${id}, ${100})`);
      const arg: TransferArg = {
        backend: backend.name,
        url: place.url,
        how,
        calls: transfers / processes,
        callers: 4,
        accounts,
        seed: inject("seed"),
      };
      const results = await runWorkers<TransferResult>(worker, processes, arg);
      const [row] = await hf.transaction((tx) => tx.query(sql`SELECT sum(balance) AS money FROM account`));
      const told = results.reduce((sum, { deadlocks }) => sum + deadlocks, 0);
      return {
        done: results.reduce((sum, { done }) => sum + done, 0),
        deadlocks: told,
        errors: results.flatMap(({ errors }) => errors),
        money: Number(row?.money),
        onServer: await serverDeadlocks(backend, place.url, told),
      };
    } finally {
      await site.close();
    }
  } finally {
    await place.drop();
  }
}

/** A session's counts reach the statistics when it ends, or a little later: `atLeast` must come. */
async function serverDeadlocks({ server }: Backend, url: string, atLeast: number): Promise<number> {
  // A file has one writer and nothing that could be counted; MySQL counts for all databases together.
  if (server === "file" || server === "mariadb" || server === "mysql") return 0;
  const admin = new Client({
    connectionString: serverUrl(server === "postgresOld" ? "postgresOld" : "postgres"),
  });
  await admin.connect();
  try {
    const name = new URL(url).pathname.slice(1);
    return await eventually(async () => {
      const { rows } = await admin.query("SELECT deadlocks FROM pg_stat_database WHERE datname = $1", [name]);
      const count = Number(rows[0].deadlocks);
      return count >= atLeast && { count };
    }).then((found) => (found ? found.count : -1));
  } finally {
    await admin.end();
  }
}

/** They have pools of their own. One is enough for every day. */
const ormsOnFiles = backends.filter(
  ({ name, orm, server }) =>
    orm && server === "file" && (name === "Kysely on SQLite" || process.env["HOLDFAST_LONG"] === "1"),
);

describe("transfers in all directions, 16 callers in 4 processes", () => {
  test.for([...plainCampaigns, ...ormsOnFiles])(
    "no deadlock, no money lost: $name",
    { timeout: 300_000 },
    async (backend, { skip }) => {
      skip(missing(backend) !== undefined, missing(backend));
      const transfers = backend.name === "pg" ? 5000 : 400;
      expect(await run(backend, "rows", transfers)).toEqual({
        done: transfers,
        deadlocks: 0,
        errors: [],
        money: accounts * 100,
        onServer: 0,
      });
    },
  );

  test("the same through lockAll", async () => {
    const { deadlocks, onServer, money, errors } = await run(backendNamed("pg"), "lockAll", 1000);
    expect({ deadlocks, onServer, money, errors }).toEqual({
      deadlocks: 0,
      onServer: 0,
      money: accounts * 100,
      errors: [],
    });
  });

  test.for(["mysql2 on MySQL", "mysql2 on MariaDB"].map(backendNamed))(
    "deadlocks one by one: $name",
    async (backend, { skip }) => {
      skip(missing(backend) !== undefined, missing(backend));
      const { deadlocks, money, errors } = await run(backend, "one by one", 400);
      expect({ money, errors }).toEqual({ money: accounts * 100, errors: [] });
      expect(deadlocks).toBeGreaterThan(0);
    },
  );

  // The same without the order must show the bug, or the above would prove nothing.
  test("deadlocks in the order in which accounts come", async () => {
    const { deadlocks, onServer, money } = await run(backendNamed("pg"), "naive", 400);
    expect(money).toBe(accounts * 100);
    expect(deadlocks).toBeGreaterThan(0);
    expect(onServer).toBeGreaterThan(0);
  });
});
