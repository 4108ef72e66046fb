import type { SqlConnection } from "../../../seam/database.ts";
import { own, sql } from "../../../seam/sql.ts";
import type { FailedJob, JobInfo, JobPage, JobState, QueueCounts, QueueLists } from "../../../queue/store.ts";
import { type PagePlace, nextOf, placeOf } from "../../sql/page.ts";
import { isTrue } from "../probe.ts";
import { type QueueRow, askSafely } from "./support.ts";
import { milliseconds as ms, texts, typed } from "../values.ts";

const most = (n: number) => sql`LIMIT ${typed(n, "int")}`;
const common = sql`t.id, t.attempt, t.priority, t.key, ${ms("t.at")} AS at, ${ms("clock_timestamp() - t.at")} AS age`;
const none = sql.raw(
  "NULL::pg_catalog.float8 AS run_at, NULL::pg_catalog.float8 AS started, NULL AS worker, NULL AS alive, NULL AS error",
);

/** As a sweeper judges it. */
const alive =
  sql.raw(`w.id IS NOT NULL AND w.beat > pg_catalog.clock_timestamp() - w.ttl * interval '1 millisecond'
    AND (w.lock IS NULL OR EXISTS (SELECT FROM pg_catalog.pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND ((l.classid::bigint << 32) | l.objid::bigint) = w.lock))`);

interface Read {
  readonly rows: readonly Record<string, unknown>[];
  /** Of a row, where the page after it begins. */
  place(row: Record<string, unknown>): PagePlace;
}

/** Those without a group, by priority; then groups by name. */
async function waiting(connection: SqlConnection, q: number, after: PagePlace, n: number): Promise<Read> {
  const place = (row: Record<string, unknown>): PagePlace =>
    row["grp"] === null
      ? ["", Number(row["priority"]), Number(row["id"])]
      : [String(row["grp"]), Number(row["priority"]), Number(row["id"])];
  const [group = "", priority = -32768, id = 0] = after;
  const alone =
    group === ""
      ? await askSafely(
          connection,
          sql`SELECT ${common}, NULL AS grp, ${none} FROM ${own("queue_ready")} t WHERE t.queue = ${typed(q, "int")}
  AND (t.priority, t.id) > (${typed(priority, "smallint")}, ${typed(id, "bigint")}) ORDER BY t.priority, t.id ${most(n)}`,
        )
      : [];
  if (alone.length === n) return { rows: alone, place };
  const from =
    group === ""
      ? sql.raw("true")
      : sql`(t.grp, t.priority, t.id) > (${typed(group, "text")}, ${typed(priority, "smallint")}, ${typed(id, "bigint")})`;
  const grouped = await askSafely(
    connection,
    sql`SELECT ${common}, t.grp, ${none} FROM ${own("queue_grouped")} t WHERE t.queue = ${typed(q, "int")} AND ${from}
  ORDER BY t.grp, t.priority, t.id ${most(n - alone.length)}`,
  );
  return { rows: [...alone, ...grouped], place };
}

async function delayed(connection: SqlConnection, q: number, after: PagePlace, n: number): Promise<Read> {
  const [due = "-infinity", id = 0] = after;
  const rows = await askSafely(
    connection,
    sql`SELECT ${common}, t.grp, ${ms("t.run_at")} AS run_at, t.run_at::pg_catalog.text AS due, NULL::pg_catalog.float8 AS started, NULL AS worker, NULL AS alive, NULL AS error
  FROM ${own("queue_delayed")} t WHERE t.queue = ${typed(q, "int")} AND (t.run_at, t.id) > (${typed(due, "timestamptz")}, ${typed(id, "bigint")})
  ORDER BY t.run_at, t.id ${most(n)}`,
  );
  return { rows, place: (row) => [String(row["due"]), Number(row["id"])] };
}

/** A lease has its jobs in it, as [id, attempt, priority, at, key, group, payload]. */
async function running(connection: SqlConnection, q: number, after: PagePlace, n: number): Promise<Read> {
  const [lease = 0, place = 0] = after;
  const rows = await askSafely(
    connection,
    sql`SELECT (j->>0)::bigint AS id, (j->>1)::smallint AS attempt, (j->>2)::smallint AS priority, j->>4 AS key, j->>5 AS grp,
    (j->>3)::pg_catalog.float8 AS at, ${ms("clock_timestamp()")} - (j->>3)::pg_catalog.float8 AS age, NULL::pg_catalog.float8 AS run_at, ${ms("l.since")} AS started,
    coalesce(w.name, 'a worker that is gone') AS worker, ${alive} AS alive, NULL AS error, l.id AS lease, o AS place
  FROM ${own("queue_lease")} l LEFT JOIN ${own("queue_worker")} w ON w.id = l.worker,
    pg_catalog.json_array_elements(l.jobs::pg_catalog.json) WITH ORDINALITY x (j, o)
  WHERE l.queue = ${typed(q, "int")} AND l.id >= ${typed(lease, "bigint")} AND (l.id, o) > (${typed(lease, "bigint")}, ${typed(place, "bigint")})
    AND NOT coalesce((o - 1)::int = ANY(l.done), false)
    AND NOT EXISTS (SELECT FROM ${own("queue_mark")} m WHERE m.lease = l.id AND m.place = o - 1) ORDER BY l.id, o ${most(n)}`,
  );
  return { rows, place: (row) => [Number(row["lease"]), Number(row["place"])] };
}

async function failed(connection: SqlConnection, q: number, after: PagePlace, n: number): Promise<Read> {
  const [id = 0] = after;
  const rows = await askSafely(
    connection,
    sql`SELECT ${common}, t.grp, NULL::pg_catalog.float8 AS run_at, NULL::pg_catalog.float8 AS started, NULL AS worker, NULL AS alive, pg_catalog.split_part(t.error, pg_catalog.chr(10), 1) AS error
  FROM ${own("queue_failed")} t WHERE t.queue = ${typed(q, "int")} AND t.id > ${typed(id, "bigint")} ORDER BY t.id ${most(n)}`,
  );
  return { rows, place: (row) => [Number(row["id"])] };
}

const readers = { waiting, delayed, running, failed };

function infoOf(row: Record<string, unknown>, state: JobState): JobInfo {
  const text = (name: string) => (typeof row[name] === "string" ? row[name] : undefined);
  const worker = text("worker");
  return {
    id: Number(row["id"]),
    state,
    failures: Number(row["attempt"]),
    priority: Number(row["priority"]),
    key: text("key"),
    group: text("grp"),
    at: Number(row["at"]),
    ageMs: Math.max(0, Number(row["age"])),
    runAt: row["run_at"] === null ? undefined : Number(row["run_at"]),
    startedAt: row["started"] === null ? undefined : Number(row["started"]),
    worker: worker === undefined ? undefined : { name: worker, alive: isTrue(row["alive"]) },
    error: text("error"),
  };
}

function countsOf(row: QueueRow | undefined): QueueCounts {
  return {
    waiting: Number(row?.["waiting"]),
    delayed: Number(row?.["delayed"]),
    running: Number(row?.["running"]),
    failed: Number(row?.["failed"]),
    workers: Number(row?.["workers"]),
    paused: isTrue(row?.["paused"]),
    oldest: row?.["oldest"] === null ? undefined : Number(row?.["oldest"]),
  };
}

async function numberOf(connection: SqlConnection, queue: string): Promise<number | undefined> {
  const [found] = await askSafely(
    connection,
    sql`SELECT q.id FROM ${own("queue")} q WHERE q.name = ${queue}::pg_catalog.text`,
  );
  return found && Number(found["id"]);
}

export const lists: QueueLists<SqlConnection> = {
  number: numberOf,

  async counts(connection, queue) {
    const [row] = await askSafely(
      connection,
      sql`SELECT * FROM ${own("queue_count")}(ARRAY[${typed(queue, "int")}], NULL)`,
    );
    return countsOf(row);
  },

  async queues(connection, names) {
    const rows = await askSafely(
      connection,
      sql`SELECT * FROM ${own("queue_count")}(NULL, ${names ? texts(names, (name) => name) : null}::pg_catalog.text::pg_catalog.text[])`,
    );
    return rows.map((row) => ({ name: String(row["name"]), ...countsOf(row) }));
  },

  async failed(connection, queue, after, most) {
    const rows = await askSafely(
      connection,
      sql`SELECT id, attempt, payload, error, key, grp, ${ms("at")} AS at, ${ms("failed_at")} AS failed_at FROM ${own("queue_failed")}
  WHERE queue = ${typed(queue, "int")} AND id > ${typed(after ?? 0, "bigint")} ORDER BY id LIMIT ${typed(most, "int")}`,
    );
    return rows.map((row): FailedJob => ({
      id: Number(row["id"]),
      attempts: Number(row["attempt"]),
      payload: JSON.parse(String(row["payload"])),
      error: String(row["error"]),
      key: typeof row["key"] === "string" ? row["key"] : undefined,
      group: typeof row["grp"] === "string" ? row["grp"] : undefined,
      at: Number(row["at"]),
      failedAt: Number(row["failed_at"]),
    }));
  },

  async find(connection, queue, id) {
    const common = sql.raw("t.attempt, t.priority, t.payload, t.key");
    const which = sql`t.queue = ${typed(queue, "int")} AND t.id = ${typed(id, "bigint")}`;
    const [row] = await askSafely(
      connection,
      sql`SELECT 'waiting' AS state, ${common}, NULL AS grp, ${ms("t.at")} AS at, NULL::pg_catalog.float8 AS run_at, NULL AS worker, NULL AS error
    FROM ${own("queue_ready")} t WHERE ${which}
  UNION ALL SELECT CASE WHEN g.next > pg_catalog.clock_timestamp() THEN 'delayed' ELSE 'waiting' END, ${common}, t.grp, ${ms("t.at")},
    CASE WHEN g.next > pg_catalog.clock_timestamp() THEN ${ms("g.next")} END, NULL, NULL
    FROM ${own("queue_grouped")} t LEFT JOIN ${own("queue_group")} g ON g.queue = t.queue AND g.grp = t.grp AND g.head = t.id WHERE ${which}
  UNION ALL SELECT 'delayed', ${common}, t.grp, ${ms("t.at")}, ${ms("t.run_at")}, NULL, NULL FROM ${own("queue_delayed")} t WHERE ${which}
  UNION ALL SELECT 'failed', ${common}, t.grp, ${ms("t.at")}, NULL, NULL, t.error FROM ${own("queue_failed")} t WHERE ${which}
  UNION ALL SELECT 'running', (j->>1)::smallint, (j->>2)::smallint, (j->6)::pg_catalog.text, j->>4, j->>5, (j->>3)::pg_catalog.float8, NULL, w.name, NULL
    FROM ${own("queue_lease")} l LEFT JOIN ${own("queue_worker")} w ON w.id = l.worker,
      pg_catalog.json_array_elements(l.jobs::pg_catalog.json) WITH ORDINALITY x (j, o)
    WHERE l.queue = ${typed(queue, "int")} AND (j->>0)::bigint = ${typed(id, "bigint")} AND NOT coalesce((o - 1)::int = ANY(l.done), false)
      AND NOT EXISTS (SELECT FROM ${own("queue_mark")} m WHERE m.lease = l.id AND m.place = o - 1)
  LIMIT 1`,
    );
    if (!row) return undefined;
    const text = (name: string) => (typeof row[name] === "string" ? row[name] : undefined);
    return {
      id,
      state: String(row["state"]) as "waiting",
      failures: Number(row["attempt"]),
      priority: Number(row["priority"]),
      payload: JSON.parse(String(row["payload"])),
      key: text("key"),
      group: text("grp"),
      at: Number(row["at"]),
      runAt: row["run_at"] === null ? undefined : Number(row["run_at"]),
      worker: text("worker"),
      error: text("error"),
    };
  },

  async jobs(connection, queue, { state, after, most: n }): Promise<JobPage | undefined> {
    const number = await numberOf(connection, queue);
    if (number === undefined) return undefined;
    const { rows, place } = await readers[state](connection, number, placeOf(after), n);
    const last = rows.at(-1);
    return {
      jobs: rows.map((row) => infoOf(row, state)),
      next: last && rows.length === n ? nextOf(place(last)) : undefined,
    };
  },

  async workers(connection) {
    const rows = await askSafely(
      connection,
      sql`SELECT q.name AS queue, coalesce(w.name, '') AS name, ${ms("w.since")} AS since, ${alive} AS alive,
    (SELECT coalesce(pg_catalog.sum(l.size - coalesce(pg_catalog.cardinality(l.done), 0)), 0) FROM ${own("queue_lease")} l WHERE l.worker = w.id) AS jobs
  FROM ${own("queue_worker")} w JOIN ${own("queue")} q ON q.id = w.queue ORDER BY q.name, w.id`,
    );
    return rows.map((row) => ({
      queue: String(row["queue"]),
      name: String(row["name"]),
      since: Number(row["since"]),
      alive: isTrue(row["alive"]),
      jobs: Number(row["jobs"]),
    }));
  },
};
