/** A server that is killed in the middle of quotas, stock and jobs, and started again on what it has on disk. */
import { sql } from "holdfast";
import { execute } from "holdfast/testing";
import mysql from "mysql2/promise";
import { describe, expect, test } from "vitest";
import { unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { startMysql } from "./harness/mysql.ts";
import { startWorker } from "./harness/processes.ts";
import { openNamed } from "./harness/sites.ts";
import { eventually } from "./harness/wait.ts";
import {
  type PatternCallersArg,
  type PatternCallersResult,
  limit,
  shop,
  subject,
  uploads,
} from "./workers/pattern-callers.ts";
import { type PatternJobsArg, errands } from "./workers/pattern-jobs.ts";

const asker = new URL("./workers/pattern-callers.ts", import.meta.url);
const jobber = new URL("./workers/pattern-jobs.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const attempts = 150;
const jobs = long ? 5000 : 400;

/** What was committed is on disk when the client hears of it, as servers have it that are no test's. */
const durable = ["--innodb-flush-log-at-trx-commit=2", "--innodb-doublewrite=ON"];

// MariaDB starts in a third of the time.
describe.each(long ? (["mariadb", "mysql"] as const) : (["mariadb"] as const))("%s", (name) => {
  const why =
    process.env["HOLDFAST_MYSQL_URL"] && name === "mysql" ? "it is not ours to restart" : unavailable(name);

  test("quotas, stock and jobs are exact afterwards", { timeout: 600_000 }, async ({ skip }) => {
    skip(why !== undefined, why);
    const backend = name === "mariadb" ? "mysql2 on MariaDB" : "mysql2 on MySQL";
    const server = await (name === "mariadb" ? startMariadb(durable) : startMysql(durable));
    try {
      const admin = await mysql.createConnection(server.url);
      await admin.query("CREATE DATABASE restarted");
      await admin.end();
      const url = new URL(server.url);
      url.pathname = "restarted";
      const arg = { backend, url: url.href };
      const site = await openNamed(backend, arg.url);
      try {
        const { hf } = site;
        await hf.migrate();
        await shop(hf).increase("LAST", limit);
        await execute(site, sql`CREATE TABLE effect (job varchar(20) NOT NULL)`);
        await errands(hf).enqueueMany(Array.from({ length: jobs }, (_, n) => ({ payload: String(n) })));
        const ids = (place: number) => Array.from({ length: attempts }, (_, i) => `${place}:${i}`);
        const callers = [1, 2].map((place) =>
          startWorker<PatternCallersResult>(asker, {
            ...arg,
            again: true,
            ids: ids(place),
          } satisfies PatternCallersArg),
        );
        const workers = (["transactional", "complete"] as const).map((how) =>
          startWorker(jobber, { ...arg, how, away: true } satisfies PatternJobsArg),
        );
        try {
          for (const each of callers) await each.message("ready");
          for (const each of callers) each.send("go");
          const left = async () => {
            const { waiting, delayed, running } = await errands(hf).counts();
            return waiting + delayed + running;
          };
          const kills = long ? 3 : 1;
          // In the middle of calls: none of the processes that call has come to its end.
          for (let kill = 0; kill < kills; kill++) {
            for (let asked = 0; asked < 20; asked++) await callers[kill % 2]?.message("asked");
            await server.restart("SIGKILL");
          }
          // And of jobs: some were done since the server came back, and there are others.
          const atKills: number[] = [];
          for (let kill = 0; kill < kills; kill++) {
            const before = await eventually(left);
            let now = before;
            const some = long ? 200 : 1;
            await eventually(async () => (now = await left()) <= before - some, { timeout: 120_000 });
            expect(now).toBeGreaterThan(0);
            atKills.push(now);
            await server.restart("SIGKILL");
          }
          if (long)
            console.log(`${name}: jobs that were left when the server was killed: ${atKills.join(", ")}`);
          const results = await Promise.all(callers.map(({ result }) => result));
          await eventually(async () => (await left()) === 0, { timeout: 300_000, interval: 100 });
          for (const what of ["quota", "stock"] as const)
            expect(results.flatMap((each) => each[what].granted).length, what).toBe(limit);
        } finally {
          for (const each of [...callers, ...workers]) each.sigkill();
          await Promise.all([...callers, ...workers].map(({ exited }) => exited));
        }
        expect(await uploads(hf).peek(subject)).toMatchObject({ used: limit, remaining: 0 });
        expect(await uploads(hf).reconcile(subject)).toMatchObject({ ok: true, findings: [] });
        expect(await shop(hf).level("LAST")).toMatchObject({ onHand: 0, version: limit + 1 });
        expect(await shop(hf).reconcile()).toMatchObject({ ok: true, findings: [] });
        expect(await errands(hf).failed()).toEqual([]);
        const [row] = await execute(
          site,
          sql`SELECT count(*) AS written, count(DISTINCT job) AS jobs FROM effect`,
        );
        expect([Number(row?.["written"]), Number(row?.["jobs"])]).toEqual([jobs, jobs]);
      } finally {
        await site.close();
      }
    } finally {
      await server.stop();
    }
  });
});
