import type { Row, SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError } from "../../../seam/errors.ts";
import type {
  RunEnding,
  RunGrip,
  RunRow,
  RunState,
  ScheduleAdministration,
  Schedules,
  ScheduleStep,
} from "../../../schedule/store.ts";
import { type Statement, own, sql } from "../../../seam/sql.ts";
import { namesOf } from "../dialect.ts";
import { failureOf } from "../locks/index.ts";
import { byMap } from "../patience.ts";
import { isTrue } from "../probe.ts";
import { safely } from "../search-path.ts";
import { typed as arg, milliseconds as ms, texts } from "../values.ts";

function number(value: unknown): number | undefined {
  return value === null || value === undefined ? undefined : Number(value);
}

async function ask(connection: SqlConnection, statement: Statement) {
  try {
    return await safely(connection, statement);
  } catch (error) {
    if (failureOf(connection, error) === "schema-missing")
      throw new SchemaMissingError(`The table ${namesOf(connection).own("schedule")}`, error);
    throw error;
  }
}

const savepoint = {
  set: sql.raw("SAVEPOINT holdfast_schedule"),
  release: sql.raw("RELEASE SAVEPOINT holdfast_schedule"),
};

const milliseconds = (value: number) => sql`${arg(value, "float8")} * interval '1 millisecond'`;

/** The run's row, whoever has it now. */
const row = ({ schedule, tick, manual }: RunGrip) =>
  sql`r.schedule = ${arg(schedule, "text")} AND r.tick = timestamptz 'epoch' + ${milliseconds(tick)}
    AND r.manual = ${arg(manual, "boolean")}`;

const held = (grip: RunGrip) =>
  sql`${row(grip)} AND r.fence = ${arg(grip.fence, "bigint")} AND r.state = 'running'`;

function change(ending: RunEnding): Statement {
  if (ending.state === "done") return sql`state = 'done', error = NULL`;
  const { error, retryInMs, uncounted } = ending;
  const counted = sql`error = ${arg(error, "text")}, attempt = r.attempt - ${sql.raw(uncounted ? "1" : "0")}`;
  if (retryInMs === undefined) return sql`state = 'failed', ${counted}`;
  return sql`state = 'waiting', ${counted}, until = pg_catalog.clock_timestamp() + ${milliseconds(retryInMs)}`;
}

const runColumns = sql`r.state, r.manual, r.attempt, r.fence, r.holder, r.error, ${ms("r.tick")} AS tick,
        ${ms("r.started")} AS started, ${ms("r.until")} AS until, ${ms("r.ended")} AS ended`;

function runOf(run: Row): RunRow {
  return {
    tick: Number(run.tick),
    manual: isTrue(run.manual),
    state: run.state as RunState,
    attempt: Number(run.attempt),
    fence: Number(run.fence),
    holder: String(run.holder),
    started: Number(run.started),
    until: Number(run.until),
    ended: number(run.ended),
    error: typeof run.error === "string" ? run.error : undefined,
  };
}

const administration: ScheduleAdministration<SqlConnection> = {
  async all(connection, names) {
    const which = names
      ? sql`s.name = ANY (${texts(names, (name) => name)}::pg_catalog.text::pg_catalog.text[])`
      : sql`true`;
    const rows = await ask(
      connection,
      sql`SELECT s.name, s.paused, ${ms("s.last")} AS last, ${runColumns},
        (SELECT pg_catalog.count(*)::int FROM ${own("schedule_run")} o WHERE o.schedule = s.name AND o.state IN ('running', 'waiting')) AS open
        FROM ${own("schedule")} s LEFT JOIN LATERAL (SELECT * FROM ${own("schedule_run")} r WHERE r.schedule = s.name
          AND r.state NOT IN ('running', 'waiting', 'skipped') ORDER BY r.tick DESC LIMIT 1) r ON true
        WHERE ${which} ORDER BY s.name COLLATE "C"`,
    );
    return rows.map((row) => ({
      name: String(row.name),
      paused: isTrue(row.paused),
      last: Number(row.last),
      open: Number(row.open),
      lastRun: number(row.tick) === undefined ? undefined : runOf(row),
    }));
  },

  async pause(connection, schedule, paused) {
    // Waits for whoever decides about a tick at this moment.
    const found = await ask(
      connection,
      sql`UPDATE ${own("schedule")} s SET paused = ${arg(paused, "boolean")} WHERE s.name = ${arg(schedule, "text")} RETURNING 1 AS there`,
    );
    return found.length > 0;
  },

  async list(connection, schedule, limit) {
    const rows = await ask(
      connection,
      sql`SELECT ${ms("clock_timestamp()")} AS now, ${ms("s.last")} AS last, s.paused, ${runColumns}
        FROM (SELECT 1) one LEFT JOIN ${own("schedule")} s ON s.name = ${arg(schedule, "text")}
        LEFT JOIN LATERAL (SELECT * FROM ${own("schedule_run")} r WHERE r.schedule = s.name
          ORDER BY r.state IN ('running', 'waiting') DESC, r.tick DESC LIMIT ${arg(limit, "integer")}) r ON true
        ORDER BY r.tick DESC`,
    );
    const [first] = rows;
    return {
      now: Number(first?.now),
      last: number(first?.last),
      paused: isTrue(first?.paused),
      runs: rows.filter(({ tick }) => number(tick) !== undefined).map(runOf),
    };
  },
};

export const schedules: Schedules<SqlConnection> = {
  async step(connection, step: ScheduleStep) {
    const { schedule, token, holder, ttlMs, attempts, overlap, take, wish, as, keep } = step;
    const due = typeof wish === "object" ? wish : undefined;
    const args = sql.join([
      byMap(arg(schedule, "text")),
      arg(token, "text"),
      arg(holder, "text"),
      arg(ttlMs, "float8"),
      arg(attempts, "integer"),
      arg(overlap, "text"),
      arg(take, "boolean"),
      arg(due?.tick, "float8"),
      arg(due?.after, "float8"),
      arg(due?.before, "float8"),
      arg(due?.run ?? true, "boolean"),
      arg(wish === "now", "boolean"),
      arg(typeof as === "object" ? "failed" : as, "text"),
      arg(typeof as === "object" ? as.failed : undefined, "text"),
      arg(keep, "integer"),
    ]);
    const [found] = await ask(
      connection,
      sql`SELECT o_now AS now, o_last AS last, o_wake AS wake, o_busy AS busy, o_paused AS paused, o_skipped AS skipped,
        pg_catalog.array_to_string(o_died, ',') AS died, o_tick AS tick, o_previous AS previous, o_manual AS manual,
        o_fence AS fence, o_attempt AS attempt FROM ${own("schedule_step")}(${args})`,
    );
    const { now, last, wake, busy, paused, skipped, died, tick, previous, manual, fence, attempt } =
      found ?? {};
    return {
      now: Number(now),
      last: Number(last),
      wake: number(wake),
      busy: isTrue(busy),
      paused: isTrue(paused),
      skipped: isTrue(skipped),
      died: died ? String(died).split(",").map(Number) : [],
      claimed:
        number(fence) === undefined
          ? undefined
          : {
              schedule,
              tick: Number(tick),
              previous: number(previous),
              manual: isTrue(manual),
              fence: Number(fence),
              attempt: Number(attempt),
            },
    };
  },

  async renew(connection, grip, ttlMs) {
    // Never waits: the row may be locked by a transaction of the run's own, which has ended it.
    const [found] = await ask(
      connection,
      sql`WITH mine AS (SELECT r.ctid AS place FROM ${own("schedule_run")} r WHERE ${held(grip)} FOR NO KEY UPDATE SKIP LOCKED),
        renewed AS (UPDATE ${own("schedule_run")} r SET until = pg_catalog.clock_timestamp() + ${milliseconds(ttlMs)}
          FROM mine WHERE r.ctid = mine.place RETURNING 1)
        SELECT (SELECT pg_catalog.count(*)::int FROM renewed) AS renewed,
          (SELECT r.state FROM ${own("schedule_run")} r WHERE ${row(grip)} AND r.fence = ${arg(grip.fence, "bigint")}) AS state`,
    );
    if (Number(found?.renewed) > 0) return "renewed";
    return found?.state === "running" ? "locked" : found?.state === "done" ? "done" : "lost";
  },

  async end(connection, grip, ending, { joined }) {
    // Outside of a transaction it would be committed at once: a savepoint is refused there.
    if (joined) await connection.query(savepoint.set);
    const ended = await ask(
      connection,
      sql`UPDATE ${own("schedule_run")} r SET ended = pg_catalog.clock_timestamp(), ${change(ending)} WHERE ${held(grip)} RETURNING 1 AS ended`,
    );
    if (joined) await connection.query(savepoint.release);
    if (ended.length > 0) return "ended";
    const [found] = await ask(
      connection,
      sql`SELECT r.state, r.fence FROM ${own("schedule_run")} r WHERE ${row(grip)}`,
    );
    const before =
      Number(found?.fence) === grip.fence && (found?.state === "done") === (ending.state === "done");
    return before ? "before" : "lost";
  },

  administration,
};
