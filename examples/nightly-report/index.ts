import { type ChildProcess, fork } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { sql } from "holdfast";
import { type Schedule, schedule } from "holdfast/schedule";
import { type Database, open } from "../database.ts";
import { command } from "../support.ts";

const timeZone = "Europe/Madrid";

/**
 * Every instance of the service has this line. At each time of the pattern one of them runs the report: the time
 * itself is what is unique in the database, so there is no leader that could be gone. If the instance dies in the middle
 * of it, another one runs the report of the same night. `run.complete(tx)` is part of the transaction that stores the
 * report, so that there is one, however often it was begun.
 */
export function reports(
  { hf }: Database,
  { name, cron }: When,
  collect: (night: Date, signal: AbortSignal, attempt: number) => Promise<string>,
): Schedule {
  return schedule(hf, name, { cron, timeZone, ttl: 2000 }, async (run) => {
    const text = await collect(run.tick, run.signal, run.attempt);
    await hf.transaction({ signal: run.signal }, async (tx) => {
      const night = run.tick.toISOString();
      await tx.query(sql`INSERT INTO holdfast_example_report (night, body) VALUES (${night}, ${text})`);
      await run.complete(tx);
    });
  });
}

export interface When {
  readonly name: string;
  readonly cron: string;
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
  await using database = await open(url, {
    holdfast_example_report: "night varchar(40) NOT NULL, body varchar(200) NOT NULL",
  });
  const { hf, query } = database;
  await hf.migrate();
  // Another name each time: the example may have been run before.
  const name = `report-${randomUUID()}`;
  const file = fileURLToPath(new URL("./instance.ts", import.meta.url));
  const crew = Array.from({ length: 5 }, () => fork(file, { env: { ...process.env, DATABASE_URL: url } }));
  try {
    await Promise.all(crew.map((child) => once(child, "message")));
    // Nobody wants to wait for 3 o'clock: the "night" is three seconds from now.
    const when = { name, cron: await inThreeSeconds(database) };
    const first = firstToBegin(crew);
    for (const child of crew) child.send(when);
    (await first).kill("SIGKILL");
    await firstToBegin(crew);
    const watch = reports(database, when, async () => "");
    for (;;) {
      const { lastRun } = await watch.status();
      const [row] = await query<{ reports: number }>(
        sql`SELECT count(*) AS reports FROM holdfast_example_report`,
      );
      if (lastRun)
        return {
          instances: crew.length,
          begun: lastRun.attempt,
          reports: Number(row?.reports),
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
async function inThreeSeconds({ hf }: Database): Promise<string> {
  const { next } = await schedule(hf, "clock", { cron: "* * * * * *" }, async () => {}).status();
  const then = new Date((next?.getTime() ?? Date.now()) + 3000);
  const shown = then.toLocaleTimeString("en-GB", { timeZone });
  const [hours, minutes, seconds] = shown.split(":").map(Number);
  return `${seconds} ${minutes} ${hours} * * *`;
}

await command(
  import.meta.url,
  main,
  ({ instances, begun, reports: count }) =>
    `Of ${instances} instances one began the report and was killed; it was begun ${begun} times, and there is ${count} report`,
);
