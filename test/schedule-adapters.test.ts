/** The same schedules through every client. */
import { type Transaction, holdfast, sql } from "holdfast";
import { type Run, schedule } from "holdfast/schedule";
import { execute } from "holdfast/testing";
import { beforeEach, describe, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

function every(ms: number, ticks: readonly number[]): boolean {
  return ticks.every((tick, i) => i === 0 || tick - (ticks[i - 1] as number) === ms);
}

/** Each of them sends and reads values in its own way, and some open transactions of their own around everything. */
const clients = [
  "pg on an older PostgreSQL",
  "postgres.js",
  "PGlite",
  "Prisma",
  "Drizzle",
  "Kysely",
  "Knex",
  "TypeORM",
  "MikroORM",
  "Sequelize",
].map(backendNamed);

describe.each(clients)("$name", (backend) => {
  beforeEach(({ skip }) => {
    skip(missing(backend) !== undefined, missing(backend));
  });

  test("ticks, failures, effects and jobs", async () => {
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const of = holdfast(site.database);
    try {
      await of.migrate();
      await execute(site, sql`CREATE TABLE effect (kind varchar(20), at varchar(40))`);
      const ran: Run[] = [];
      const insert = (tx: Transaction<unknown>, kind: string, tick: Date) =>
        tx.query(sql`INSERT INTO effect (kind, at) VALUES (${kind}, ${tick.toISOString()})`);
      const options = { every: 200, catchUp: "all", backoff: 5, ttl: 5000, onError: () => {} } as const;
      const handled = schedule(of, "handled", options, async (run) => {
        ran.push(run);
        await of.transaction(async (tx) => {
          await insert(tx, "handled", run.tick);
          await run.complete(tx);
          if (ran.length === 2) throw new Error("once");
        });
      });
      const queued = schedule(of, "queued", {
        ...options,
        enqueue: (tick, tx) => insert(tx, "queued", tick),
      });
      await using _ = handled;
      await using __ = queued;
      await handled.start();
      await queued.start();
      const found = async (kind: string) =>
        (await execute(site, sql`SELECT at FROM effect WHERE kind = ${kind} ORDER BY at`)).map(({ at }) =>
          Date.parse(String(at)),
        );
      await eventually(
        async () => (await found("handled")).length >= 4 && (await found("queued")).length >= 4,
      );
      await Promise.all([handled.stop(), queued.stop()]);
      expect(every(200, await found("handled"))).toBe(true);
      expect(every(200, await found("queued"))).toBe(true);
      expect(ran.map(({ attempt }) => attempt).slice(0, 4)).toEqual([1, 1, 2, 1]);
      expect(ran[0]?.tick).toBeInstanceOf(Date);
      const { last, lastRun, running } = await handled.status();
      expect(running).toEqual([]);
      expect(lastRun).toMatchObject({ state: "done", tick: last, manual: false, error: undefined });
      expect(await queued.runNow()).toMatchObject({ ran: true });
    } finally {
      await of.close();
      await site.close();
      await place.drop();
    }
  });
});
