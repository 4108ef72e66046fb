import { randomUUID } from "node:crypto";
import type { SqlConnection } from "../../../seam/database.ts";
import { key, keyIn } from "../../../seam/key.ts";
import { type Statement, own, sql } from "../../../seam/sql.ts";
import type {
  EndedJobs,
  NewJob,
  QueueCompletion,
  QueueStore,
  QueueWorkers,
  JobPlace,
} from "../../../queue/store.ts";
import { dialect } from "../dialect.ts";
import { newest } from "../leases/fences.ts";
import { argument } from "../locks/keys.ts";
import { impatient, patiently } from "../patience.ts";
import { isTrue } from "../probe.ts";
import { administration } from "./administration.ts";
import { queueChannel } from "./functions/parts.ts";
import { lists } from "./lists.ts";
import {
  type QueueRow,
  type WrittenLease,
  ask,
  bound,
  jobOf,
  numberOf,
  numbersOf,
  sorted,
  textOf,
} from "./support.ts";
import { transactional } from "./transactional.ts";
import { list, texts } from "../values.ts";

const workers: QueueWorkers<SqlConnection> = {
  sessionLock() {
    const lock = `holdfast:queue:workers:${randomUUID()}`;
    return { lock, key: key(lock) };
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

  async astray(connection, worker, known) {
    const rows = await ask(
      connection,
      sql`SELECT id, size FROM ${own("queue_lease")} WHERE worker = ${bound(worker, "bigint")} AND id <> ALL(${list(known)}::text::bigint[])`,
    );
    return rows.flatMap(({ id, size }) =>
      Array.from({ length: Number(size) }, (_, place) => ({ lease: Number(id), place })),
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
};

const completion: QueueCompletion<SqlConnection> = {
  async complete(connection, worker, { lease, place }) {
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
};

export const queues: QueueStore<SqlConnection> = {
  channel: dialect.names.label(queueChannel),
  workers,
  completion,
  transactional,
  administration,
  lists,

  async notify(connection, payload) {
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

  async claim(connection, { queue, worker, most, where, whole, onward }) {
    const { priorities, floors } = floorsOf(where);
    const asking = ask(
      connection,
      sql`SELECT lease, jobs, counted, last, idle, soon, moment FROM ${own("queue_claim_jobs")}(${bound(queue, "int")}, ${bound(worker, "bigint")},
  ${bound(most, "int")}, ${priorities}, ${floors}, ${bound(where.after, "float8")}, ${bound(whole, "boolean")}, ${onward ?? null}::text)`,
    );
    const [row] = await asking.catch((error: unknown): QueueRow[] => {
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
      jobs: (JSON.parse(text) as WrittenLease[]).map(jobOf),
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

  async giveBack(connection, worker, unstarted) {
    await ask(
      connection,
      sql`SELECT ${own("queue_give_back")}(${bound(worker, "bigint")}, ${list(unstarted.map(({ lease }) => lease))}::text::bigint[],
  ${list(unstarted.map(({ place }) => place))}::text::int[])::text AS done`,
    );
  },

  async look(connection, { sweep, idle, whole }) {
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
};

/** As the worker's session holds it. */
function lockOf({ names }: SqlConnection, name: string | undefined): Statement {
  if (name === undefined) return sql.raw("NULL");
  return sql.raw(argument(names ? keyIn(names.schema, key(name)) : key(name)));
}

function floorsOf({ floors }: JobPlace): { readonly priorities: Statement; readonly floors: Statement } {
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

/** It may have been completed in a transaction of its handler: then there is a mark to be deleted. */
const marked = (ended: EndedJobs) => ended.marked === true;
