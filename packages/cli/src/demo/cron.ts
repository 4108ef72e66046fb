import { setTimeout as sleep } from "node:timers/promises";
import { schedule } from "holdfast/schedule";
import type { Pool } from "pg";
import { type Place, type Race, type Stage, failureText, failures, one, sentence } from "./race.ts";

/** Seconds that it runs for, each a tick. */
const total = 4;

const addReport = (pool: Pool, tick: Date): Promise<unknown> =>
  pool.query("INSERT INTO report (tick) VALUES ($1)", [tick]);

/** What a timer in an instance does. */
async function onEverySecond(
  { call, progress }: Stage,
  run: (tick: Date) => Promise<unknown>,
): Promise<void> {
  for (let n = 1; n <= total; n++) {
    const tick = new Date(Math.floor(Date.now() / 1000 + 1) * 1000);
    await sleep(tick.getTime() - Date.now());
    await call(() => run(tick));
    progress(n);
  }
}

async function naive(stage: Stage): Promise<void> {
  const { pool } = stage;
  await onEverySecond(stage, (tick) => addReport(pool, tick));
}

async function exact({ pool, hf, progress }: Stage): Promise<void> {
  const write = ({ tick }: { tick: Date }): Promise<unknown> => addReport(pool, tick);
  const times = { every: "1 second", catchUp: "all" } as const;
  await using report = schedule(hf, "report", times, write);
  await report.start(); // in every instance
  for (let done = 0; done < total; await sleep(50)) {
    done = (await ticksOf({ pool })).ticks;
    progress(Math.min(done, total));
  }
}

const ticksOf = ({ pool }: Pick<Place, "pool">) =>
  one<{ counted: number; ticks: number; span: number; most: number }>(
    pool,
    `SELECT coalesce(sum(n), 0)::int AS counted, count(*)::int AS ticks, coalesce(max(n), 0)::int AS most,
       coalesce(extract(epoch FROM max(tick) - min(tick)) + 1, 0)::int AS span
     FROM (SELECT tick, count(*) AS n FROM report GROUP BY tick) AS per_tick`,
  );

export const cron: Race = {
  name: "cron",
  title: "A cron job on every instance",
  what: ({ processes }) =>
    `A report is due every second, and ${processes} instances of the service run. Each has a timer that writes the report (INSERT).`,
  counts: "reports",
  total: () => total,
  does: "seconds",
  timed: false,
  shared: true,
  tables: `CREATE TABLE report (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tick timestamptz NOT NULL,
      written timestamptz NOT NULL DEFAULT clock_timestamp())`,
  async reset({ pool }) {
    await pool.query("TRUNCATE report");
    // All instances are to see the same seconds: not when one is about to begin.
    while (Date.now() % 1000 > 500) await sleep(50);
  },
  ways: [
    {
      name: "naive",
      code: ["await onEverySecond(stage, (tick) => addReport(pool, tick));"],
      why: "A timer knows nothing of the timers of other instances.",
      run: naive,
    },
    {
      name: "Holdfast schedule",
      code: [
        'const times = { every: "1 second", catchUp: "all" } as const;',
        'await using report = schedule(hf, "report", times, write);',
        "await report.start(); // in every instance",
      ],
      why: "Each second is recorded in the database, and one instance gets it.",
      run: exact,
    },
  ],
  async find(place, _, tally) {
    const { counted, ticks, span, most } = await ticksOf(place);
    const { rows } = await place.pool.query<{ late: number }>(
      "SELECT (extract(epoch FROM written - tick) * 1000)::float8 AS late FROM report",
    );
    return {
      counted,
      expected: span,
      // A second that was left out is wrong as well.
      right: counted === span && ticks === span && ticks > 0 && failures(tally) === 0,
      text: sentence(
        `${counted} reports of ${span}`,
        most > 1 && `up to ${most} for a second`,
        ticks < span && `${span - ticks} left out`,
        failureText(tally),
      ),
      facts: { mostOfOne: most },
      // After the second at which it was due.
      took: rows.map(({ late }) => late),
    };
  },
};
