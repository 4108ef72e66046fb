import type { Result, SqlConnection } from "../../core/database.ts";
import { SchemaMissingError } from "../../core/errors.ts";
import { key, keyIn } from "../../core/key.ts";
import type { ClaimedJob, Ended, FailedJob, NewJob, QueueCounts, Queues, Where } from "../../core/queues.ts";
import { type Statement, own, sql } from "../../core/sql.ts";
import { dialect, hexText, namesOf } from "./dialect.ts";
import { newest } from "./fences.ts";
import { argument } from "./keys.ts";
import { failureOf } from "./locks.ts";
import { impatient, patiently } from "./patience.ts";
import { isTrue } from "./probe.ts";
import { queueChannel } from "./queue-functions.ts";
import { list, texts } from "./values.ts";

type Row = Record<string, unknown>;

async function ask(connection: SqlConnection, statement: Statement): Promise<Row[]> {
  const asking = connection.prepared?.(statement) ?? connection.query(statement);
  const { rows } = await asking.catch((error: unknown) => {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError("A table or function of queues", error)
      : error;
  });
  return rows as Row[];
}

const bound = (value: string | number | boolean | undefined | null, type: string) =>
  sql`${value === undefined || value === null ? null : String(value)}::text::${sql.raw(type)}`;

/** As it stands in a lease. */
type Written = [
  id: number,
  failures: number,
  priority: number,
  at: number,
  key: string | null,
  group: string | null,
  payload: unknown,
];

function jobOf([id, failures, priority, at, jobKey, group, payload]: Written): ClaimedJob {
  return { id, failures, priority, at, key: jobKey ?? undefined, group: group ?? undefined, payload };
}

function numbersOf(value: unknown): number[] {
  const text = String(value ?? "{}");
  return text === "{}" ? [] : text.slice(1, -1).split(",").map(Number);
}

const msOf = (column: string) => sql.raw(`(extract(epoch FROM ${column}) * 1000)::float8`);

function countsOf(row: Row | undefined): QueueCounts {
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

export const queues: Queues<SqlConnection> = {
  channel: dialect.names.label(queueChannel),

  async ring(connection, payload) {
    await ask(connection, sql`SELECT pg_notify(${own.label(queueChannel)}, ${payload}::text)::text AS sent`);
  },

  async open(connection, name, settings) {
    const json =
      settings &&
      JSON.stringify({
        attempts: settings.attempts,
        most: settings.most,
        group_most: settings.groupMost,
        group_rate: settings.groupRate,
        group_per: settings.groupPer,
        ordered: settings.ordered,
      });
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_open")}(${name}::text, ${bound(json, "jsonb")}) AS id`,
    );
    return Number(row?.["id"]);
  },

  async add(connection, queue, jobs, { tell, joined, waitMs }) {
    const any = (has: (job: NewJob) => boolean) => jobs.some(has);
    const numeric = (value: (job: NewJob) => number | undefined) =>
      any((job) => value(job) !== undefined) ? list(jobs.map(value)) : null;
    const runs = sql`${numeric(({ runAt }) => runAt)}::text::float8[]`;
    const delays = numeric(({ delayMs }) => delayMs);
    const [row] = await ask(
      connection,
      sql`SELECT ids::text AS ids, added::text AS added${impatient(waitMs)} FROM ${own("queue_add")}(${patiently(waitMs, bound(queue, "int"))},
  ${texts(jobs, ({ payload }) => payload)}::text::text[],
  ${any(({ priority }) => priority !== 0) ? list(jobs.map(({ priority }) => priority)) : null}::text::smallint[],
  ${
    delays === null
      ? runs
      : sql`ARRAY(SELECT coalesce(u.run, extract(epoch FROM clock_timestamp()) * 1000 + u.delay)
    FROM unnest(${runs}, ${delays}::text::float8[]) WITH ORDINALITY u (run, delay, n) ORDER BY u.n)`
  },
  ${any(({ group }) => group !== undefined) ? texts(jobs, ({ group }) => group) : null}::text::text[],
  ${any((job) => job.key !== undefined) ? texts(jobs, (job) => job.key) : null}::text::text[],
  ${any(({ replace }) => replace) ? `{${jobs.map(({ replace }) => replace).join(",")}}` : null}::text::boolean[],
  ${bound(!joined, "boolean")}, ${tell ?? null}::text)`,
    );
    const ids = numbersOf(row?.["ids"]);
    const added = row?.["added"] === null ? undefined : String(row?.["added"]).slice(1, -1).split(",");
    return ids.map((id, i) => ({ id, added: added?.[i] !== "f" }));
  },

  async enlist(connection, queue, { ttlMs, name, lock }) {
    const [row] = await ask(
      connection,
      sql`INSERT INTO ${own("queue_worker")} (id, queue, beat, ttl, name, lock) OVERRIDING SYSTEM VALUE
  VALUES (${newest("queue_worker_id_seq", false)}, ${bound(queue, "int")}, clock_timestamp(), ${bound(ttlMs, "int")}, ${name}::text, ${lockOf(connection, lock)}) RETURNING id`,
    );
    return Number(row?.["id"]);
  },

  async locked(connection, workers, lock) {
    await ask(
      connection,
      sql`UPDATE ${own("queue_worker")} SET lock = ${lockOf(connection, lock)} WHERE id = ANY(${list(workers)}::text::bigint[])`,
    );
  },

  async beat(connection, workers) {
    const rows = await ask(
      connection,
      sql`UPDATE ${own("queue_worker")} SET beat = clock_timestamp() WHERE id = ANY(${list(workers)}::text::bigint[]) RETURNING id`,
    );
    return new Set(rows.map(({ id }) => Number(id)));
  },

  async claim(connection, { queue, worker, most, where, whole, onward }) {
    const { priorities, floors } = floorsOf(where);
    const asking = ask(
      connection,
      sql`SELECT lease, jobs, counted, last, idle, soon, moment FROM ${own("queue_claim_jobs")}(${bound(queue, "int")}, ${bound(worker, "bigint")},
  ${bound(most, "int")}, ${priorities}, ${floors}, ${bound(where.after, "float8")}, ${bound(whole, "boolean")}, ${onward ?? null}::text)`,
    );
    const [row] = await asking.catch((error: unknown): Row[] => {
      if (!isTooLarge(connection, error)) throw error;
      return [{ idle: "large" }];
    });
    const served = textOf(row?.["last"]);
    if (row?.["lease"] === null || row?.["lease"] === undefined)
      return {
        lease: undefined,
        why: String(row?.["idle"]) as "empty",
        soon: numberOf(row?.["soon"]),
        onward: served,
        moment: numberOf(row?.["moment"]),
      };
    const text = String(row["jobs"]);
    return {
      lease: Number(row["lease"]),
      jobs: (JSON.parse(text) as Written[]).map(jobOf),
      counted: isTrue(row["counted"]),
      onward: served,
      moment: Number(row["moment"]),
      length: text.length,
    };
  },

  async finish(connection, { queue, worker, whole, ended }) {
    const gone = new Set(whole);
    const failed = ended.filter(({ failure }) => failure);
    const parts = ended.filter(({ lease }) => !gone.has(lease));
    // The key of one that runs again stays with it.
    const keyed = ended.filter(({ job, failure }) => job.key !== undefined && failure?.again === undefined);
    const grouped = ended.filter(({ job, counted }) => counted && job.group !== undefined);
    if (failed.length + parts.length + keyed.length + grouped.length === 0 && !ended.some(marked)) {
      const rows = await ask(
        connection,
        // Marks of jobs that were written down before.
        sql`WITH gone AS (DELETE FROM ${own("queue_lease")} WHERE id = ANY(${list(whole)}::text::bigint[]) AND worker = ${bound(worker, "bigint")} RETURNING id),
  marks AS (DELETE FROM ${own("queue_mark")} m USING gone g WHERE m.lease = g.id)
  SELECT g.id FROM gone g`,
      );
      return new Set(rows.map(({ id }) => Number(id)));
    }
    const some = <T>(items: readonly T[], make: (items: readonly T[]) => string) =>
      items.length > 0 ? make(items) : null;
    const [row] = await ask(
      connection,
      sql`SELECT ours::text AS ours FROM ${own("queue_finish")}(${bound(queue, "int")}, ${bound(worker, "bigint")},
  ${some(whole, list)}::text::bigint[],
  ${some(parts, (items) => list(items.map(({ lease }) => lease)))}::text::bigint[],
  ${some(parts, (items) => list(items.map(({ place }) => place)))}::text::int[],
  ${some(failed, (items) => list(items.map(({ lease }) => lease)))}::text::bigint[],
  ${some(failed, (items) => list(items.map(({ place }) => place)))}::text::int[],
  ${some(failed, (items) => list(items.map(({ failure }) => failure?.again)))}::text::float8[],
  ${some(failed, (items) => texts(items, ({ failure }) => failure?.error))}::text::text[],
  ${some(keyed, (items) => list(items.map(({ lease }) => lease)))}::text::bigint[],
  ${some(keyed, (items) => texts(items, ({ job }) => job.key))}::text::text[],
  ${some(keyed, (items) => list(items.map(({ job }) => job.id)))}::text::bigint[],
  ${some(grouped, (items) => list(items.map(({ lease }) => lease)))}::text::bigint[],
  ${some(grouped, (items) => list(items.map(({ place }) => place)))}::text::int[],
  ${some(grouped, (items) => texts(items, ({ job }) => job.group))}::text::text[])`,
    );
    return new Set(numbersOf(row?.["ours"]));
  },

  async complete(connection, worker, lease, place) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_complete")}(${bound(worker, "bigint")}, ${bound(lease, "bigint")}, ${bound(place, "int")}) AS ours`,
    );
    return isTrue(row?.["ours"]);
  },

  async completed(connection, of) {
    const rows = await ask(
      connection,
      sql`SELECT m.lease, m.place FROM ${own("queue_mark")} m WHERE (m.lease, m.place) IN (SELECT * FROM
  unnest(${list(of.map(({ lease }) => lease))}::text::bigint[], ${list(of.map(({ place }) => place))}::text::int[]))`,
    );
    const marks = new Set(rows.map(({ lease, place }) => `${String(lease)}/${String(place)}`));
    return of.map(({ lease, place }) => marks.has(`${lease}/${place}`));
  },

  async astray(connection, worker, known) {
    const rows = await ask(
      connection,
      sql`SELECT id, size FROM ${own("queue_lease")} WHERE worker = ${bound(worker, "bigint")} AND id <> ALL(${list(known)}::text::bigint[])`,
    );
    return rows.flatMap(({ id, size }) =>
      Array.from({ length: Number(size) }, (_, place) => ({ lease: Number(id), place })),
    );
  },

  async giveBack(connection, worker, unstarted) {
    await ask(
      connection,
      sql`SELECT ${own("queue_give_back")}(${bound(worker, "bigint")}, ${list(unstarted.map(({ lease }) => lease))}::text::bigint[],
  ${list(unstarted.map(({ place }) => place))}::text::int[])::text AS done`,
    );
  },

  async retire(connection, worker) {
    await ask(
      connection,
      sql`WITH gone AS (DELETE FROM ${own("queue_worker")} w WHERE w.id = ${bound(worker, "bigint")}
    AND NOT EXISTS (SELECT FROM ${own("queue_lease")} l WHERE l.worker = w.id) RETURNING w.id)
  UPDATE ${own("queue_worker")} w SET beat = '-infinity' WHERE w.id = ${bound(worker, "bigint")} AND NOT EXISTS (SELECT FROM gone)`,
    );
  },

  async tend(connection, queue, { after, whole }) {
    const [row] = await ask(
      connection,
      sql`SELECT soon, moment FROM ${own("queue_tend")}(${bound(queue, "int")}, ${bound(after, "float8")}, ${bound(whole, "boolean")})`,
    );
    return { soon: numberOf(row?.["soon"]), moment: Number(row?.["moment"]) };
  },

  async take(connection, queue, { savepoint, most, where, whole, onward }) {
    const { floors } = where;
    const priorities = sorted(floors);
    const [taken] = await inOne(connection, [
      `SELECT jobs, last FROM ${namesOf(connection).own("queue_take_jobs")}(${Math.trunc(queue)}, ${Math.trunc(most)}, '${list(priorities)}'::smallint[],
  '${list(priorities.map((priority) => floors.get(priority)))}'::bigint[], ${whole}, ${literal(onward)})`,
      `SAVEPOINT ${savepoint}`,
    ]);
    const row = taken?.rows[0];
    return { jobs: jobsOf(row?.["jobs"]), onward: textOf(row?.["last"]) };
  },

  async takeOne(connection, queue, { id, priority, group }, { savepoint }) {
    const [taken] = await inOne(connection, [
      `SELECT ${namesOf(connection).own("queue_take_one")}(${Math.trunc(queue)}, ${Math.trunc(id)}, ${Math.trunc(priority)}::smallint, ${literal(group)}) AS jobs`,
      `SAVEPOINT ${savepoint}`,
    ]);
    return jobsOf(taken?.rows[0]?.["jobs"])[0];
  },

  async another(connection, savepoint, saved) {
    await inOne(connection, [...(saved ? [`RELEASE SAVEPOINT ${savepoint}`] : []), `SAVEPOINT ${savepoint}`]);
  },

  async settle(connection, queue, jobs, failure) {
    const any = (has: (job: ClaimedJob) => boolean) => jobs.some(has);
    await ask(
      connection,
      sql`SELECT ${own("queue_settle")}(${bound(queue, "int")}, ${list(jobs.map(({ id }) => id))}::text::bigint[],
  ${list(jobs.map(({ priority }) => priority))}::text::smallint[],
  ${any(({ group }) => group !== undefined) ? texts(jobs, ({ group }) => group) : null}::text::text[],
  ${any((job) => job.key !== undefined) ? texts(jobs, (job) => job.key) : null}::text::text[],
  ${bound(failure?.again, "float8")}, ${failure?.error ?? null}::text)::text AS done`,
    );
  },

  async round(connection, { sweep, idle, whole }) {
    const floors = idle.flatMap(({ queue, floors: of }) =>
      sorted(of).map((priority) => ({ queue, priority, floor: of.get(priority) })),
    );
    const looking =
      idle.length > 0
        ? sql`${own("queue_look")}(${list(idle.map(({ queue }) => queue))}::text::int[], ${list(idle.map(({ after }) => after))}::text::float8[],
  ${list(floors.map(({ queue }) => queue))}::text::int[], ${list(floors.map(({ priority }) => priority))}::text::smallint[],
  ${list(floors.map(({ floor }) => floor))}::text::bigint[], ${bound(whole, "boolean")})::text`
        : sql`'{}'`;
    // What was swept up is seen by the look.
    const [row] = await ask(
      connection,
      sweep === "no"
        ? sql`SELECT 0 AS jobs, '[]' AS queues, ${looking} AS ready`
        : sql`SELECT s.jobs, to_json(s.queues)::text AS queues, ${looking} AS ready FROM ${own("queue_sweep")}(${bound(sweep === "thorough", "boolean")}) s`,
    );
    return {
      jobs: Number(row?.["jobs"]),
      queues: JSON.parse(String(row?.["queues"])) as string[],
      ready: numbersOf(row?.["ready"]),
    };
  },

  async pause(connection, queue, paused) {
    await ask(
      connection,
      sql`SELECT ${own("queue_pause")}(${bound(queue, "int")}, ${bound(paused, "boolean")})::text AS done`,
    );
  },

  async counts(connection, queue) {
    const [row] = await ask(
      connection,
      sql`SELECT * FROM ${own("queue_count")}(ARRAY[${bound(queue, "int")}], NULL)`,
    );
    return countsOf(row);
  },

  async list(connection, names) {
    const rows = await ask(
      connection,
      sql`SELECT * FROM ${own("queue_count")}(NULL, ${names ? texts(names, (name) => name) : null}::text::text[])`,
    );
    return rows.map((row) => ({ name: String(row["name"]), ...countsOf(row) }));
  },

  async failed(connection, queue, after, most) {
    const rows = await ask(
      connection,
      sql`SELECT id, attempt, payload, error, key, grp, ${msOf("at")} AS at, ${msOf("failed_at")} AS failed_at FROM ${own("queue_failed")}
  WHERE queue = ${bound(queue, "int")} AND id > ${bound(after ?? 0, "bigint")} ORDER BY id LIMIT ${bound(most, "int")}`,
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
    const which = sql`t.queue = ${bound(queue, "int")} AND t.id = ${bound(id, "bigint")}`;
    const [row] = await ask(
      connection,
      sql`SELECT 'waiting' AS state, ${common}, NULL AS grp, ${msOf("t.at")} AS at, NULL::float8 AS run_at, NULL AS worker, NULL AS error
    FROM ${own("queue_ready")} t WHERE ${which}
  UNION ALL SELECT CASE WHEN g.next > clock_timestamp() THEN 'delayed' ELSE 'waiting' END, ${common}, t.grp, ${msOf("t.at")},
    CASE WHEN g.next > clock_timestamp() THEN ${msOf("g.next")} END, NULL, NULL
    FROM ${own("queue_grouped")} t LEFT JOIN ${own("queue_group")} g ON g.queue = t.queue AND g.grp = t.grp AND g.head = t.id WHERE ${which}
  UNION ALL SELECT 'delayed', ${common}, t.grp, ${msOf("t.at")}, ${msOf("t.run_at")}, NULL, NULL FROM ${own("queue_delayed")} t WHERE ${which}
  UNION ALL SELECT 'failed', ${common}, t.grp, ${msOf("t.at")}, NULL, NULL, t.error FROM ${own("queue_failed")} t WHERE ${which}
  UNION ALL SELECT 'running', (j->>1)::smallint, (j->>2)::smallint, (j->6)::text, j->>4, j->>5, (j->>3)::float8, NULL, w.name, NULL
    FROM ${own("queue_lease")} l LEFT JOIN ${own("queue_worker")} w ON w.id = l.worker,
      json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
    WHERE l.queue = ${bound(queue, "int")} AND (j->>0)::bigint = ${bound(id, "bigint")} AND NOT coalesce((o - 1)::int = ANY(l.done), false)
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

  async revive(connection, queue, which) {
    const given = "ids" in which ? which.ids : undefined;
    const { after, upTo, most } = "ids" in which ? { after: 0, upTo: undefined, most: 0 } : which;
    const [row] = await ask(
      connection,
      sql`SELECT n, last, upto FROM ${own("queue_revive_some")}(${bound(queue, "int")}, ${given ? list(given) : null}::text::bigint[],
  ${bound(after, "bigint")}, ${bound(upTo, "bigint")}, ${bound(most, "int")})`,
    );
    return { count: Number(row?.["n"]), last: numberOf(row?.["last"]), upTo: numberOf(row?.["upto"]) };
  },

  async discard(connection, queue, ids) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_discard_some")}(${bound(queue, "int")}, ${list(ids)}::text::bigint[]) AS n`,
    );
    return Number(row?.["n"]);
  },

  async prune(connection, queue, older, { after, most }) {
    const [row] = await ask(
      connection,
      sql`SELECT n, last FROM ${own("queue_prune_some")}(${bound(queue, "int")},
  least(${bound(older.before, "float8")}, extract(epoch FROM clock_timestamp()) * 1000 - ${bound(older.ageMs, "float8")})::float8,
  ${bound(after, "bigint")}, ${bound(most, "int")})`,
    );
    return { count: Number(row?.["n"]), last: numberOf(row?.["last"]) };
  },
};

const numberOf = (value: unknown) => (value === null || value === undefined ? undefined : Number(value));
const textOf = (value: unknown) => (typeof value === "string" ? value : undefined);

function jobsOf(text: unknown): ClaimedJob[] {
  return typeof text === "string" ? (JSON.parse(text) as Written[]).map(jobOf) : [];
}

const literal = (text: string | undefined) => (text === undefined ? "NULL" : hexText(text));

/** As the worker's session holds it. */
function lockOf({ names }: SqlConnection, name: string | undefined): Statement {
  if (name === undefined) return sql.raw("NULL");
  return sql.raw(argument(names ? keyIn(names.schema, key(name)) : key(name)));
}

const sorted = (floors: Where["floors"]) => [...floors.keys()].toSorted((a, b) => a - b);

function floorsOf({ floors }: Where): { readonly priorities: Statement; readonly floors: Statement } {
  const priorities = sorted(floors);
  return {
    priorities: sql`${list(priorities)}::text::smallint[]`,
    floors: sql`${list(priorities.map((priority) => floors.get(priority)))}::text::bigint[]`,
  };
}

/** Of the function's own, and of the server: a text, or an array, that is larger than it can be. */
const tooLarge = new Set(["HF413", "54000", "53200"]);

function isTooLarge(connection: SqlConnection, error: unknown): boolean {
  const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
  return tooLarge.has(String(code));
}

/** In one message, where the client can. */
async function inOne(connection: SqlConnection, statements: readonly string[]): Promise<readonly Result[]> {
  if (connection.script) return connection.script(statements.join("; "));
  const results: Result[] = [];
  for (const text of statements) results.push(await connection.query(sql.raw(text)));
  return results;
}

/** It may have been completed in a transaction of its handler: then there is a mark to be deleted. */
const marked = (ended: Ended) => ended.marked === true;
