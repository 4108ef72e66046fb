/** The upload quota of the examples, through every ORM: many processes, one user, and others beside. */
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, Pool } from "pg";
import { expect, test } from "vitest";
import { type Uploads, table } from "../examples/uploads.ts";
import { createDatabase } from "./harness/databases.ts";
import { runWorkers } from "./harness/processes.ts";
import type { UploadArg } from "./workers/upload.ts";

const orms = ["prisma", "drizzle", "kysely", "knex", "typeorm", "mikro-orm", "sequelize"];
const worker = new URL("./workers/upload.ts", import.meta.url);

async function onDatabase<T>(body: (url: string, client: Client) => Promise<T>): Promise<T> {
  const database = await createDatabase("postgres");
  const client = new Client({ connectionString: database.url });
  try {
    await client.connect();
    await client.query(table);
    return await body(database.url, client);
  } finally {
    await client.end();
    await database.drop();
  }
}

/** Each loads its ORM, which takes longer than the calls. */
const processes = process.env["HOLDFAST_LONG"] === "1" ? 8 : 4;

test.for(orms)(
  `%s: ${processes} processes × 50 uploads of one user, quota for 37`,
  { timeout: 300_000 },
  (orm) =>
    onDatabase(async (url, client) => {
      const arg: UploadArg = { orm, url, user: "ada", uploads: 50 };
      const granted = await runWorkers<number>(worker, processes, arg);
      const { rows } = await client.query(
        "SELECT count(*)::int AS n, sum(bytes)::int AS bytes FROM user_image",
      );
      expect({ granted: granted.reduce((a, b) => a + b), ...rows[0] }).toEqual({
        granted: 37,
        n: 37,
        bytes: 3700,
      });
    }),
);

test.for(orms)("%s: another user is not blocked by one whose lock is held", (orm) =>
  onDatabase(async (url, client) => {
    const { open }: { open(url: string): Promise<Uploads> } = await import(`../examples/${orm}/index.ts`);
    const pool = new Pool({ connectionString: url });
    const hf = holdfast(fromPg(pool));
    const app = await open(url);
    try {
      await hf
        .transaction({ lock: key("upload", "ada") }, async () => {
          expect(await app.upload("bob", 100)).toBe(true);
          // It would wait for as long as the lock is held: until the database shows that it does.
          const waiting = app.upload("ada", 100);
          const blocked =
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
          await expect.poll(async () => (await client.query(blocked)).rowCount, { timeout: 20_000 }).toBe(1);
          expect(await app.upload("cy", 100)).toBe(true);
          return { waiting };
        })
        .then(({ waiting }) => waiting);
    } finally {
      await app.close();
      await hf.close();
      await pool.end();
    }
  }),
);
