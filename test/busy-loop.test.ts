/**
 * Sessions that the server ends while the process has no time to look: their connection, their answer and their end are read
 * in one breath. What nobody listens to at that moment ends the process.
 */
import { execFileSync } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { holdfast, key } from "holdfast";
import mysql from "mysql2/promise";
import { Client } from "pg";
import { beforeEach, describe, expect, test } from "vitest";
import { type Backend, backendNamed } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { BusyArg } from "./workers/busy-loop.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const rounds = long ? 300 : 30;

const onPostgres = [
  "pg",
  "postgres.js",
  "Drizzle",
  "Kysely",
  "Kysely with its pool",
  "Knex",
  "TypeORM",
  "Prisma",
  "MikroORM",
  "Sequelize",
].map(backendNamed);

const drivers = ["mysql2 on MariaDB", "mariadb on MariaDB", "mysql2 on MySQL"];
// They are on one of these, and drop its connections in ways of their own.
const orms = ["Drizzle", "Kysely", "Knex", "TypeORM", "Prisma", "MikroORM", "Sequelize"].map(
  (name) => `${name} on MariaDB`,
);
const onMysql = [...drivers, ...(long ? orms : ["TypeORM on MariaDB"])].map(backendNamed);

/** Ends all sessions of a database before it returns: nothing else happens in this process meanwhile. */
function killAtOnce(backend: Backend, url: string): void {
  const script =
    backend.server === "postgres"
      ? `import pg from "pg"; const c = new pg.Client(${JSON.stringify(url)}); await c.connect();
         await c.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()");
         await c.end();`
      : `import mysql from "mysql2/promise"; const c = await mysql.createConnection(${JSON.stringify(url)});
         const [rows] = await c.query("SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()");
         for (const { id } of rows) await c.query("KILL " + id).catch(() => {});
         await c.end();`;
  execFileSync(process.execPath, ["--input-type=module", "--eval", script], {
    cwd: fileURLToPath(new URL(".", import.meta.url)),
  });
}

/** Ends all sessions of a database but this one. Resolves to how many. */
async function killer(
  backend: Backend,
  url: string,
): Promise<{ kill(): Promise<number>; end(): Promise<void> }> {
  if (backend.server === "postgres") {
    const client = new Client({ connectionString: url });
    await client.connect();
    return {
      async kill() {
        const { rowCount } = await client.query(
          "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
        return rowCount ?? 0;
      },
      end: () => client.end(),
    };
  }
  const connection = await mysql.createConnection(url);
  return {
    async kill() {
      const [rows] = await connection.query(
        "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
      );
      const ids = (rows as { id: number }[]).map(({ id }) => id);
      for (const id of ids) await connection.query(`KILL ${id}`).catch(() => {});
      return ids.length;
    },
    end: () => connection.end(),
  };
}

describe.each([...onPostgres, ...onMysql])("$name", (backend) => {
  beforeEach(({ skip }) => {
    skip(missing(backend) !== undefined, missing(backend));
  });

  test("lives, and goes on", async () => {
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    await holdfast(site.database).migrate();
    await site.close();
    const arg: BusyArg = { backend: backend.name, url: place.url, patterns: backend.server === "postgres" };
    const worker = startWorker<Record<string, number>>(
      new URL("./workers/busy-loop.ts", import.meta.url),
      arg,
    );
    const end = await killer(backend, place.url);
    try {
      await worker.message("ready");
      let killed = 0;
      for (let i = 0; i < rounds; i++) {
        killed += await end.kill();
        // Not in step with the loop.
        await sleep(7 * (i % 17));
      }
      expect(killed).toBeGreaterThan(rounds / 4);
      worker.send("calm");
      const done = await worker.result;
      for (const times of Object.values(done)) expect(times).toBeGreaterThan(0);
    } finally {
      worker.sigkill();
      await end.end();
      await place.drop();
    }
  });

  test("a lock whose session ends as it is given back: the call ends, and others get it", async () => {
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database, { wait: 20_000 });
    try {
      await hf.migrate();
      const { sessionLocks } = await hf.capabilities();
      if (typeof sessionLocks !== "string") {
        await expect(hf.hold(key("first"))).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
        return;
      }
      for (let i = 0; i < 3; i++) {
        const [held, other] = await Promise.all([hf.hold(key("first")), hf.hold(key("second"))]);
        killAtOnce(backend, place.url);
        // Sent, or not, on what has ended without our having read of it.
        const third = hf.hold(key("third"), { wait: 1000 }).then((it) => it.release());
        await Promise.allSettled([held.release(), other.release(), third]);
        await eventually(async () => {
          await using _ = await hf.hold([key("first"), key("second"), key("third")]);
        });
      }
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  });
});
