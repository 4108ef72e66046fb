import { randomUUID } from "node:crypto";
import type { SqlConnection } from "../../../seam/database.ts";
import { key, workersLock } from "../../../seam/key.ts";
import { type Statement, own, sql } from "../../../seam/sql.ts";
import type {
  EndedJobs,
  NewJob,
  QueueCompletion,
  QueueStore,
  QueueWorkers,
  JobPlace,
} from "../../../queue/store.ts";
import { dialect, namesOf, ownKey } from "../dialect.ts";
import { newest } from "../leases/fences.ts";
import { argument } from "../locks/keys.ts";
import { byMap, impatient, patiently } from "../patience.ts";
import { byPrimary } from "../primary.ts";
import { isTrue } from "../probe.ts";
import { administration } from "./administration.ts";
import { queueChannel } from "./functions/parts.ts";
import { lists } from "./lists.ts";
import {
  type QueueRow,
  type WrittenLease,
  ask,
  askSafely,
  jobOf,
  numberOf,
  numbersOf,
  sorted,
  textOf,
} from "./support.ts";
import { shown, written } from "../hidden.ts";
import { transactional } from "./transactional.ts";
import { list, texts, typed } from "../values.ts";

const workers: QueueWorkers<SqlConnection> = {
  sessionLock() {
    const lock = `${workersLock}${randomUUID()}`;
    return { lock, key: key(lock) };
  },

  async enlist(connection, queue, { ttlMs, name, lock }) {
    const [row] = await askSafely(
      connection,
      sql`INSERT INTO ${own("queue_worker")} (id, queue, beat, ttl, name, lock) OVERRIDING SYSTEM VALUE
  VALUES (${newest("queue_worker_id_seq", false)}, ${typed(queue, "int")}, pg_catalog.clock_timestamp(), ${typed(ttlMs, "int")}, ${name}::pg_catalog.text, ${lockOf(connection, lock)}) RETURNING id`,
    );
    return Number(written(connection, row, "queue_worker")["id"]);
  },

  async locked(connection, workers, lock) {
    await askSafely(
      connection,
      sql`UPDATE ${own("queue_worker")} SET lock = ${lockOf(connection, lock)} WHERE id = ANY(${list(workers)}::pg_catalog.text::bigint[]) RETURNING id`,
    );
  },

  async beat(connection, workers) {
    const rows = await askSafely(
      connection,
      sql`UPDATE ${own("queue_worker")} SET beat = pg_catalog.clock_timestamp() WHERE id = ANY(${list(workers)}::pg_catalog.text::bigint[]) RETURNING id`,
    );
    return new Set(rows.map(({ id }) => Number(id)));
  },

  async astray(connection, worker, known) {
    const rows = await askSafely(
      connection,
      sql`SELECT id, size FROM ${own("queue_lease")} WHERE worker = ${typed(worker, "bigint")} AND id <> ALL(${list(known)}::pg_catalog.text::bigint[])`,
    );
    return rows.flatMap(({ id, size }) =>
      Array.from({ length: Number(size) }, (_, place) => ({ lease: Number(id), place })),
    );
  },

  async retire(connection, worker) {
    await askSafely(
      connection,
      sql`WITH gone AS (DELETE FROM ${own("queue_worker")} w WHERE w.id = ${typed(worker, "bigint")}
    AND NOT EXISTS (SELECT FROM ${own("queue_lease")} l WHERE l.worker = w.id) RETURNING w.id)
  UPDATE ${own("queue_worker")} w SET beat = '-infinity' WHERE w.id = ${typed(worker, "bigint")} AND NOT EXISTS (SELECT FROM gone) RETURNING w.id`,
    );
  },
};

const completion: QueueCompletion<SqlConnection> = {
  async complete(connection, worker, { lease, place }) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_complete")}(${byPrimary(typed(worker, "bigint"))}, ${typed(lease, "bigint")}, ${typed(place, "int")}) AS ours`,
    );
    return isTrue(row?.["ours"]);
  },

  async completed(connection, of) {
    const rows = await askSafely(
      connection,
      sql`SELECT m.lease, m.place FROM ${own("queue_mark")} m WHERE (m.lease, m.place) IN (SELECT * FROM
  unnest(${list(of.map(({ lease }) => lease))}::pg_catalog.text::bigint[], ${list(of.map(({ place }) => place))}::pg_catalog.text::int[]))`,
    );
    const marks = new Set(rows.map(({ lease, place }) => `${String(lease)}/${String(place)}`));
    return of.map(({ lease, place }) => marks.has(`${lease}/${place}`));
  },

  async settled(connection, { lease, place }, { waitMs }) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_settled")}(${patiently(waitMs, typed(lease, "bigint"), "any map")}, ${typed(place, "int")}) AS done${impatient(waitMs)}`,
    );
    return isTrue(row?.["done"]);
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
    await ask(
      connection,
      sql`SELECT pg_catalog.pg_notify(${own.label(queueChannel)}, ${payload}::pg_catalog.text)::pg_catalog.text AS sent`,
    );
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
      sql`SELECT ${own("queue_open")}(${byPrimary(typed(name, "text"))}, ${typed(json, "jsonb")}) AS id`,
    );
    return Number(row?.["id"]);
  },

  async add(connection, queue, jobs, { tell, joined, waitMs }) {
    const any = (has: (job: NewJob) => boolean) => jobs.some(has);
    const numeric = (value: (job: NewJob) => number | undefined) =>
      any((job) => value(job) !== undefined) ? list(jobs.map(value)) : null;
    const runs = sql`${numeric(({ runAt }) => runAt)}::pg_catalog.text::pg_catalog.float8[]`;
    const delays = numeric(({ delayMs }) => delayMs);
    const [row] = await ask(
      connection,
      sql`SELECT ids::pg_catalog.text AS ids, added::pg_catalog.text AS added${impatient(waitMs)} FROM ${own("queue_add")}(${patiently(waitMs, typed(queue, "int"))},
  ${texts(jobs, ({ payload }) => payload)}::pg_catalog.text::pg_catalog.text[],
  ${any(({ priority }) => priority !== 0) ? list(jobs.map(({ priority }) => priority)) : null}::pg_catalog.text::smallint[],
  ${
    delays === null
      ? runs
      : sql`ARRAY(SELECT coalesce(u.run, (extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 OPERATOR(pg_catalog.+) u.delay)
    FROM unnest(${runs}, ${delays}::pg_catalog.text::pg_catalog.float8[]) WITH ORDINALITY u (run, delay, n) ORDER BY u.n)`
  },
  ${any(({ group }) => group !== undefined) ? texts(jobs, ({ group }) => group) : null}::pg_catalog.text::pg_catalog.text[],
  ${any((job) => job.key !== undefined) ? texts(jobs, (job) => job.key) : null}::pg_catalog.text::pg_catalog.text[],
  ${any(({ replace }) => replace) ? `{${jobs.map(({ replace }) => replace).join(",")}}` : null}::pg_catalog.text::boolean[],
  ${typed(!joined, "boolean")}, ${tell ?? null}::pg_catalog.text)`,
    );
    const ids = numbersOf(row?.["ids"]);
    const added = row?.["added"] === null ? undefined : String(row?.["added"]).slice(1, -1).split(",");
    return ids.map((id, i) => ({ id, added: added?.[i] !== "f" }));
  },

  async claim(connection, { queue, worker, most, where, whole, onward }) {
    const { priorities, floors } = floorsOf(where);
    const asking = ask(
      connection,
      sql`SELECT lease, jobs, counted, last, idle, soon, moment FROM ${own("queue_claim_jobs")}(${byMap(typed(queue, "int"))}, ${typed(worker, "bigint")},
  ${typed(most, "int")}, ${priorities}, ${floors}, ${typed(where.after, "float8")}, ${typed(whole, "boolean")}, ${onward ?? null}::pg_catalog.text)`,
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
        sql`WITH gone AS (DELETE FROM ${own("queue_lease")} WHERE id OPERATOR(pg_catalog.=) ANY(${list(whole)}::pg_catalog.text::bigint[]) AND worker OPERATOR(pg_catalog.=) ${typed(worker, "bigint")}
    AND ${shown("queue_lease", "queue_mark")} RETURNING id),
  marks AS (DELETE FROM ${own("queue_mark")} m USING gone g WHERE m.lease OPERATOR(pg_catalog.=) g.id)
  SELECT g.id FROM gone g`,
      );
      return new Set(rows.map(({ id }) => Number(id)));
    }
    const some = <T>(items: readonly T[], make: (items: readonly T[]) => string) =>
      items.length > 0 ? make(items) : null;
    const [row] = await ask(
      connection,
      sql`SELECT ours::pg_catalog.text AS ours FROM ${own("queue_finish")}(${byPrimary(typed(queue, "int"))}, ${typed(worker, "bigint")},
  ${some(whole, list)}::pg_catalog.text::bigint[],
  ${some(parts, (items) => list(items.map(({ lease }) => lease)))}::pg_catalog.text::bigint[],
  ${some(parts, (items) => list(items.map(({ place }) => place)))}::pg_catalog.text::int[],
  ${some(failed, (items) => list(items.map(({ lease }) => lease)))}::pg_catalog.text::bigint[],
  ${some(failed, (items) => list(items.map(({ place }) => place)))}::pg_catalog.text::int[],
  ${some(failed, (items) => list(items.map(({ failure }) => failure?.again)))}::pg_catalog.text::pg_catalog.float8[],
  ${some(failed, (items) => texts(items, ({ failure }) => failure?.error))}::pg_catalog.text::pg_catalog.text[],
  ${some(keyed, (items) => list(items.map(({ lease }) => lease)))}::pg_catalog.text::bigint[],
  ${some(keyed, (items) => texts(items, ({ job }) => job.key))}::pg_catalog.text::pg_catalog.text[],
  ${some(keyed, (items) => list(items.map(({ job }) => job.id)))}::pg_catalog.text::bigint[],
  ${some(grouped, (items) => list(items.map(({ lease }) => lease)))}::pg_catalog.text::bigint[],
  ${some(grouped, (items) => list(items.map(({ place }) => place)))}::pg_catalog.text::int[],
  ${some(grouped, (items) => texts(items, ({ job }) => job.group))}::pg_catalog.text::pg_catalog.text[])`,
    );
    return new Set(numbersOf(row?.["ours"]));
  },

  async giveBack(connection, worker, unstarted) {
    await ask(
      connection,
      sql`SELECT ${own("queue_give_back")}(${byPrimary(typed(worker, "bigint"))}, ${list(unstarted.map(({ lease }) => lease))}::pg_catalog.text::bigint[],
  ${list(unstarted.map(({ place }) => place))}::pg_catalog.text::int[])::pg_catalog.text AS done`,
    );
  },

  async look(connection, { sweep, idle, whole }) {
    const floors = idle.flatMap(({ queue, floors: of }) =>
      sorted(of).map((priority) => ({ queue, priority, floor: of.get(priority) })),
    );
    const looking =
      idle.length > 0
        ? sql`${own("queue_look")}(${byPrimary(sql`${list(idle.map(({ queue }) => queue))}::pg_catalog.text::int[]`)}, ${list(idle.map(({ after }) => after))}::pg_catalog.text::pg_catalog.float8[],
  ${list(floors.map(({ queue }) => queue))}::pg_catalog.text::int[], ${list(floors.map(({ priority }) => priority))}::pg_catalog.text::smallint[],
  ${list(floors.map(({ floor }) => floor))}::pg_catalog.text::bigint[], ${typed(whole, "boolean")})::pg_catalog.text`
        : sql`'{}'`;
    // What was swept up is seen by the look.
    const [row] = await ask(
      connection,
      sweep === "no"
        ? sql`SELECT 0 AS jobs, '[]' AS queues, ${looking} AS ready`
        : sql`SELECT s.jobs, pg_catalog.to_json(s.queues)::pg_catalog.text AS queues, ${looking} AS ready FROM ${own("queue_sweep")}(${byPrimary(typed(sweep === "thorough", "boolean"))}) s`,
    );
    return {
      jobs: Number(row?.["jobs"]),
      queues: JSON.parse(String(row?.["queues"])) as string[],
      ready: numbersOf(row?.["ready"]),
    };
  },
};

/** As the worker's session holds it. */
function lockOf(connection: SqlConnection, name: string | undefined): Statement {
  if (name === undefined) return sql.raw("NULL");
  return sql.raw(argument(ownKey(namesOf(connection), key(name))));
}

function floorsOf({ floors }: JobPlace): { readonly priorities: Statement; readonly floors: Statement } {
  const priorities = sorted(floors);
  return {
    priorities: sql`${list(priorities)}::pg_catalog.text::smallint[]`,
    floors: sql`${list(priorities.map((priority) => floors.get(priority)))}::pg_catalog.text::bigint[]`,
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
