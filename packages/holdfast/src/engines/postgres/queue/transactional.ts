import type { SqlConnection } from "../../../seam/database.ts";
import { own, sql } from "../../../seam/sql.ts";
import type { ClaimedJob, QueueTransactional } from "../../../queue/store.ts";
import { hexText, namesOf } from "../dialect.ts";
import { run } from "../locks/index.ts";
import { byPrimary } from "../primary.ts";
import { ask, jobsOf, numberOf, sorted, textOf } from "./support.ts";
import { list, texts, typed } from "../values.ts";

export const transactional: QueueTransactional<SqlConnection> = {
  async tend(connection, queue, { after, whole }) {
    const [row] = await ask(
      connection,
      sql`SELECT soon, moment FROM ${own("queue_tend")}(${byPrimary(typed(queue, "int"))}, ${typed(after, "float8")}, ${typed(whole, "boolean")})`,
    );
    return { soon: numberOf(row?.["soon"]), moment: Number(row?.["moment"]) };
  },

  async take(connection, queue, { savepoint, most, where, whole, onward }) {
    const { floors } = where;
    const priorities = sorted(floors);
    const [taken] = await run(connection, [
      `SELECT jobs, last FROM ${namesOf(connection).own("queue_take_jobs")}(${Math.trunc(queue)}, ${Math.trunc(most)}, '${list(priorities)}'::smallint[],
  '${list(priorities.map((priority) => floors.get(priority)))}'::bigint[], ${whole}, ${literal(onward)})`,
      `SAVEPOINT ${savepoint}`,
    ]);
    const row = taken?.rows[0];
    return { jobs: jobsOf(row?.["jobs"]), onward: textOf(row?.["last"]) };
  },

  async takeOne(connection, queue, { id, priority, group }, { savepoint }) {
    const [taken] = await run(connection, [
      `SELECT ${namesOf(connection).own("queue_take_one")}(${Math.trunc(queue)}, ${Math.trunc(id)}, ${Math.trunc(priority)}::smallint, ${literal(group)}) AS jobs`,
      `SAVEPOINT ${savepoint}`,
    ]);
    return jobsOf(taken?.rows[0]?.["jobs"])[0];
  },

  async another(connection, savepoint, saved) {
    await run(connection, [...(saved ? [`RELEASE SAVEPOINT ${savepoint}`] : []), `SAVEPOINT ${savepoint}`]);
  },

  async settle(connection, queue, jobs, failure) {
    const any = (has: (job: ClaimedJob) => boolean) => jobs.some(has);
    await ask(
      connection,
      sql`SELECT ${own("queue_settle")}(${typed(queue, "int")}, ${list(jobs.map(({ id }) => id))}::pg_catalog.text::bigint[],
  ${list(jobs.map(({ priority }) => priority))}::pg_catalog.text::smallint[],
  ${any(({ group }) => group !== undefined) ? texts(jobs, ({ group }) => group) : null}::pg_catalog.text::pg_catalog.text[],
  ${any((job) => job.key !== undefined) ? texts(jobs, (job) => job.key) : null}::pg_catalog.text::pg_catalog.text[],
  ${typed(failure?.again, "float8")}, ${failure?.error ?? null}::pg_catalog.text)::pg_catalog.text AS done`,
    );
  },
};

const literal = (text: string | undefined) => (text === undefined ? "NULL" : hexText(text));
