import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import type { Pool } from "pg";
import { command, open } from "../support.ts";

/**
 * What an instance's container runs before its server, as a line of shell:
 *
 *   holdfast exec --lock migrations --follow -- npx prisma migrate deploy && node server.js
 *
 * Five instances are deployed at once. The first one runs the migration; the others wait until it has ended, do not run
 * it, and go on. Without --follow they would run it one after the other, and with --skip they would start their servers
 * before the tables are there.
 */
const line = ["exec", "--lock", "migrations", "--follow", "--", process.execPath, file("./migrate.ts")];

function file(path: string): string {
  return fileURLToPath(new URL(path, import.meta.url));
}

/** In a project of yours this is `npx holdfast`. */
const holdfast = [process.execPath, "--conditions=holdfast-source", file("../../packages/cli/src/bin.ts")];

async function instance(url: string, pool: Pool): Promise<{ followed: boolean; credit: number }> {
  const [program = "", ...args] = [...holdfast, ...line];
  const child = spawn(program, args, {
    env: { ...process.env, DATABASE_URL: url, HOLDFAST_URL: url },
    stdio: ["ignore", "inherit", "pipe"],
  });
  let said = "";
  child.stderr.on("data", (chunk: Buffer) => (said += chunk.toString()));
  const code = await new Promise<number | null>((resolve) => child.once("close", resolve));
  if (code !== 0) throw new Error(`The migration ended with ${code}: ${said}`);
  // The server starts, and needs the new column.
  const { rows } = await pool.query<{ credit: number }>("SELECT credit FROM holdfast_example_account");
  return { followed: said.includes("waiting until it has ended"), credit: rows[0]?.credit ?? -1 };
}

export interface Result {
  readonly instances: number;
  /** How often the migration was run, as its table has it. */
  readonly ran: number;
  readonly followed: number;
  /** Instances that went on, and found the column. */
  readonly wentOn: number;
}

export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    holdfast_example_account: "id integer PRIMARY KEY",
    holdfast_example_migration: "name text NOT NULL",
  });
  const { pool } = place;
  // How a run ended is written down in a table of Holdfast's: those who follow it end in the same way.
  await place.hf.migrate();
  await pool.query("INSERT INTO holdfast_example_account VALUES (1)");
  const started = await Promise.all(Array.from({ length: 5 }, () => instance(url, pool)));
  const { rows } = await pool.query<{ count: number }>(
    "SELECT count(*)::int FROM holdfast_example_migration",
  );
  return {
    instances: started.length,
    ran: rows[0]?.count ?? 0,
    followed: started.filter(({ followed }) => followed).length,
    wentOn: started.filter(({ credit }) => credit === 0).length,
  };
}

await command(
  import.meta.url,
  main,
  ({ instances, ran, followed, wentOn }) =>
    `Of ${instances} instances ${ran} ran the migration and ${followed} waited for it; ${wentOn} went on afterwards`,
);
