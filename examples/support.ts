/** What examples need and none is about: a pool, tables that are dropped again, and a way to be started. */
import process from "node:process";
import { fileURLToPath } from "node:url";
import { type HazardError, type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool, type PoolClient } from "pg";

export interface Place extends AsyncDisposable {
  readonly pool: Pool;
  readonly hf: Holdfast<PoolClient>;
}

/** Makes the tables, given as names and columns, and drops them at the end of the scope. */
export async function open(url: string, tables: Readonly<Record<string, string>>): Promise<Place> {
  const pool = new Pool({ connectionString: url });
  const hf = holdfast(fromPg(pool));
  const names = Object.keys(tables);
  const drop = async () => {
    for (const name of names) await pool.query(`DROP TABLE IF EXISTS ${name}`);
  };
  // A run that was killed has left them.
  await drop();
  for (const [name, columns] of Object.entries(tables)) await pool.query(`CREATE TABLE ${name} (${columns})`);
  return {
    pool,
    hf,
    async [Symbol.asyncDispose]() {
      await hf.close();
      await drop();
      await pool.end();
    },
  };
}

/** `fetch at index.ts:42`. */
export function hazardOf({ kind, place }: HazardError): string {
  return `${kind} at ${/[^/\\]+:\d+(?=:\d+$)/.exec(place ?? "")?.[0] ?? "?"}`;
}

/** Runs `main` if this file is the one that was started. With `--json` its result follows as the last line. */
export async function command<R>(
  file: string,
  main: (databaseUrl: string) => Promise<R>,
  say: (result: R) => string,
): Promise<void> {
  if (process.argv[1] !== fileURLToPath(file)) return;
  const url = process.env["DATABASE_URL"];
  if (!url) {
    console.error(
      "DATABASE_URL is not set, e.g. postgres://postgres:secret@localhost/postgres, or file:app.db",
    );
    process.exit(1);
  }
  const result = await main(url);
  console.log(say(result));
  if (process.argv.includes("--json")) console.log(JSON.stringify(result));
}
