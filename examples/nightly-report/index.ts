import { type ChildProcess, fork } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import type { Holdfast } from "holdfast";
import { type Schedule, schedule } from "holdfast/schedule";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const table = "holdfast_example_report";

/**
 * Every instance of the service has this line. At each time of the pattern one of them runs the report: the time
 * itself is what is unique in the database, so there is no leader that could be gone. If the instance dies in the middle
 * of it, another one runs the report of the same night. `run.complete(tx)` is part of the transaction that stores the
 * report, so that there is one, however often it was begun.
 */
export function reports(
  hf: Holdfast<ClientBase>,
  cron: string,
  collect: (night: Date, signal: AbortSignal, attempt: number) => Promise<string>,
): Schedule {
  const options = { cron, timeZone: "Europe/Madrid", ttl: 2000 } as const;
  return schedule(hf, "report", options, async (run) => {
    const text = await collect(run.tick, run.signal, run.attempt);
    await hf.transaction({ signal: run.signal }, async (tx) => {
      await tx.client.query(`INSERT INTO ${table} (night, body) VALUES ($1, $2)`, [run.tick, text]);
      await run.complete(tx);
    });
  });
}

export interface Result {
  readonly instances: number;
  /** One of them in vain: it was killed. */
  readonly begun: number;
  readonly reports: number;
  readonly state: string | undefined;
}

/** Five processes. The one that begins the report is killed in the middle of it. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, { [table]: "night timestamptz NOT NULL, body text NOT NULL" });
  const { pool, hf } = place;
  await hf.migrate();
  // The example may have been run before.
  await pool.query("DELETE FROM holdfast.schedule_run WHERE schedule = 'report'");
  await pool.query("DELETE FROM holdfast.schedule WHERE name = 'report'");
  const file = fileURLToPath(new URL("./instance.ts", import.meta.url));
  const crew = Array.from({ length: 5 }, () => fork(file, { env: { ...process.env, DATABASE_URL: url } }));
  try {
    await Promise.all(crew.map((child) => once(child, "message")));
    // Nobody wants to wait for 3 o'clock: the "night" is three seconds from now.
    const cron = await inThreeSeconds(pool);
    const first = firstToBegin(crew);
    for (const child of crew) child.send(cron);
    (await first).kill("SIGKILL");
    await firstToBegin(crew);
    const watch = reports(hf, cron, async () => "");
    for (;;) {
      const { lastRun } = await watch.status();
      const { rows } = await pool.query<{ count: number }>(`SELECT count(*)::int FROM ${table}`);
      if (lastRun)
        return {
          instances: crew.length,
          begun: lastRun.attempt,
          reports: rows[0]?.count ?? 0,
          state: lastRun.state,
        };
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  } finally {
    const ending = crew.filter(({ exitCode, signalCode }) => exitCode === null && signalCode === null);
    for (const child of ending) child.kill("SIGTERM");
    await Promise.all(ending.map((child) => once(child, "exit")));
  }
}

async function firstToBegin(crew: readonly ChildProcess[]): Promise<ChildProcess> {
  return Promise.race(
    crew.filter(({ killed }) => !killed).map(async (child) => (await once(child, "message"), child)),
  );
}

/** By the clock that decides, which is the database's. */
async function inThreeSeconds(client: Pick<ClientBase, "query">): Promise<string> {
  const { rows } = await client.query<{ cron: string }>(
    `SELECT to_char((now() + interval '3 seconds') AT TIME ZONE 'Europe/Madrid', 'FMSS FMMI FMHH24 * * *') AS cron`,
  );
  return rows[0]?.cron ?? "";
}

await command(
  import.meta.url,
  main,
  ({ instances, begun, reports: count }) =>
    `Of ${instances} instances one began the report and was killed; it was begun ${begun} times, and there is ${count} report`,
);
