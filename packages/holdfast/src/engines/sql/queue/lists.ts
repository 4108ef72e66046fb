/** Queues, jobs and workers as people look at them. */
import type { Row, SqlConnection } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import { type QueueRow, isGone, type JobRow, leasedRows } from "../../../queue/decide/index.ts";
import type {
  FailedJob,
  JobInfo,
  JobPage,
  JobState,
  JobView,
  QueueCounts,
  QueueLists,
  WorkerInfo,
} from "../../../queue/store.ts";
import { type PagePlace, nextOf, placeOf } from "../page.ts";
import { mostTurns, valueOf } from "../rows.ts";
import { type QueueRows, milliseconds } from "./rows.ts";
import {
  type StoredWorker,
  delayedTable,
  failedTable,
  groupTable,
  groupedTable,
  leaseTable,
  markTable,
  queueTable,
  readyTable,
  workerTable,
} from "./tables.ts";
import type { Table } from "../table.ts";

/** Counted up to here, so that it stays cheap. */
const mostCounted = 100_000;
/** Leases that are read at a time, as their jobs are in them. */
const perRead = 20;

export function queueLists<C extends SqlConnection>(queue: QueueRows<C>): QueueLists<C> {
  const lists = new Lists(queue);
  const { rows } = queue;
  const ask = <T>(connection: C, work: () => Promise<T>) => queue.ask(connection, work);
  return {
    number: (connection, name) =>
      ask(connection, async () => {
        const [found] = await rows.select(connection, queueTable, rows.is(queueTable, "name", name));
        return found?.id;
      }),

    counts: (connection, number) =>
      ask(connection, async () => {
        const [settings] = await rows.select(connection, queueTable, rows.is(queueTable, "id", number));
        return lists.counts(connection, settings as QueueRow, await lists.workers(connection));
      }),

    queues: (connection, names) =>
      ask(connection, async () => {
        const where = names ? rows.among(queueTable, "name", names) : sql`1 = 1`;
        const found = await rows.select(connection, queueTable, where, { order: sql`name` });
        const workers = await lists.workers(connection);
        const infos = [];
        for (const each of found)
          infos.push({ name: each.name, ...(await lists.counts(connection, each, workers)) });
        return infos;
      }),

    failed: (connection, number, after, limit) =>
      ask(connection, async () => {
        const where = sql`${rows.is(failedTable, "queue", number)} AND ${rows.compare(failedTable, "id", ">", after ?? 0)}`;
        const found = await rows.select(connection, failedTable, where, { order: sql`id`, limit });
        return found.map((row): FailedJob => ({
          id: row.id,
          attempts: row.attempt,
          payload: JSON.parse(row.payload),
          error: row.error,
          key: row.key,
          group: row.grp,
          at: milliseconds(row.at),
          failedAt: milliseconds(row.failed_at),
        }));
      }),

    find: (connection, number, id) => ask(connection, () => lists.find(connection, number, id)),

    jobs: (connection, name, { state, after, most }) =>
      ask(connection, async () => {
        const [found] = await rows.select(connection, queueTable, rows.is(queueTable, "name", name));
        return found && lists.page(connection, found.id, { state, after: placeOf(after), most });
      }),

    workers: (connection) =>
      ask(connection, async () => {
        const { all, moment } = await lists.workers(connection);
        const queues = new Map(
          (await rows.select(connection, queueTable, sql`1 = 1`)).map(({ id, name }) => [id, name]),
        );
        const infos: WorkerInfo[] = [];
        for (const worker of all) {
          const name = queues.get(worker.queue);
          if (name === undefined) continue;
          const leases = await lists.sizes(connection, worker.queue, worker.id);
          infos.push({
            queue: name,
            name: worker.name ?? "",
            since: milliseconds(worker.since),
            alive: !isGone(worker, moment),
            jobs: leases.reduce((sum, { left }) => sum + left, 0),
          });
        }
        return infos.toSorted((a, b) => (a.queue < b.queue ? -1 : a.queue > b.queue ? 1 : 0));
      }),
  };
}

interface Workers {
  readonly all: readonly (StoredWorker & { readonly unlocked?: boolean })[];
  readonly moment: number;
}

class Lists<C extends SqlConnection> {
  readonly #queue: QueueRows<C>;

  constructor(queue: QueueRows<C>) {
    this.#queue = queue;
  }

  async workers(connection: C): Promise<Workers> {
    const { rows } = this.#queue;
    const all = await this.#queue.workers(connection, sql`1 = 1`, { order: sql`id` });
    return { all, moment: await rows.clock(connection) };
  }

  /**
   * A worker whose time is over is dead, and what it had waits to be found, also if nobody is there who could find it. In one statement:
   * a job that moves meanwhile would be in neither place, or in both.
   */
  async counts(connection: C, settings: QueueRow, { all, moment }: Workers): Promise<QueueCounts> {
    const { id } = settings;
    const { dialect, rows } = this.#queue;
    const alive = new Set(all.filter((worker) => !isGone(worker, moment)).map((worker) => worker.id));
    const counted = [readyTable, groupedTable, delayedTable, failedTable].map(
      (of) => sql`SELECT ${sql.raw(`'${of.name}'`)}, count(*), 0, NULL FROM (
    SELECT 1 AS one FROM ${dialect.table(of.name)} WHERE ${rows.is(of, "queue", id)} LIMIT ${sql.raw(String(mostCounted))}) x`,
    );
    const found = await rows.look(
      connection,
      sql`SELECT 'lease' AS what, worker AS n, size, ${dialect.read("integers", sql`done`)} AS done
  FROM ${dialect.table(leaseTable.name)} WHERE ${rows.reading(rows.is(leaseTable, "queue", id))} UNION ALL ${sql.join(counted, " UNION ALL ")}`,
    );
    const leases = found.filter(({ what }) => what === "lease");
    const leftOf = (lease: Row) => Number(lease["size"]) - (placesOf(lease["done"])?.length ?? 0);
    const sum = (of: readonly Row[]) => of.reduce((left, lease) => left + leftOf(lease), 0);
    const running = sum(leases.filter(({ n }) => alive.has(Number(n))));
    const count = ({ name }: Table) => Number(found.find(({ what }) => what === name)?.["n"]);
    return {
      waiting: count(readyTable) + count(groupedTable) + sum(leases) - running,
      delayed: count(delayedTable),
      running,
      failed: count(failedTable),
      workers: all.filter((worker) => worker.queue === id && alive.has(worker.id)).length,
      paused: settings.paused,
      oldest: await this.#oldest(connection, id, moment),
    };
  }

  async #oldest(connection: C, queue: number, moment: number): Promise<number | undefined> {
    const { rows } = this.#queue;
    const first = async (of: typeof readyTable | typeof groupedTable) => {
      const order = rows.order(of);
      const [row] = await rows.select(connection, of, rows.is(of, "queue", queue), {
        columns: ["at"],
        order,
        limit: 1,
      });
      return row?.at;
    };
    const ats = [await first(readyTable), await first(groupedTable)].filter((at) => at !== undefined);
    return ats.length > 0 ? milliseconds(moment - Math.min(...ats)) : undefined;
  }

  /** How many of each lease have not ended. */
  async sizes(connection: C, queue: number, worker?: number) {
    const { rows } = this.#queue;
    const where = rows.matching(leaseTable, [{ queue, ...(worker !== undefined && { worker }) }]);
    const leases = await rows.select(connection, leaseTable, where, { columns: ["worker", "size", "done"] });
    return leases.map((lease) => ({
      worker: lease.worker,
      left: lease.size - (lease.done?.length ?? 0),
    }));
  }

  /** Where it is, by one statement: one that moves meanwhile is not taken for one that has ended. */
  async find(connection: C, queue: number, id: number): Promise<JobView | undefined> {
    const { dialect, rows } = this.#queue;
    const one = rows.matching(readyTable, [{ queue, id }]);
    const places = [readyTable, groupedTable, delayedTable, failedTable].map(
      ({ name }) =>
        sql`SELECT ${sql.raw(`'${name}'`)}, 0, 0, NULL, NULL FROM ${dialect.table(name)} WHERE ${one}`,
    );
    for (let turn = 1; turn <= mostTurns; turn++) {
      const found = await rows.look(
        connection,
        sql`SELECT 'lease' AS what, id AS lease, worker, ${dialect.read("integers", sql`done`)} AS done, ${dialect.read("text", sql`jobs`)} AS jobs
  FROM ${dialect.table(leaseTable.name)} WHERE ${rows.reading(rows.is(leaseTable, "queue", queue))} UNION ALL ${sql.join(places, " UNION ALL ")}`,
      );
      const waits = found.find(({ what }) => what !== "lease");
      if (!waits) return this.#inLeases(connection, found, queue, id);
      const view = await this.#at(connection, String(waits["what"]), queue, id);
      if (view) return view;
    }
    throw rows.hidden(readyTable);
  }

  async #at(connection: C, name: string, queue: number, id: number): Promise<JobView | undefined> {
    const { rows } = this.#queue;
    const one = rows.matching(readyTable, [{ queue, id }]);
    if (name === readyTable.name) {
      const [ready] = await rows.select(connection, readyTable, one);
      return ready && viewOf({ ...ready, grp: undefined }, "waiting", {});
    }
    if (name === delayedTable.name) {
      const [delayed] = await rows.select(connection, delayedTable, one);
      return delayed && viewOf(delayed, "delayed", { runAt: milliseconds(delayed.run_at) });
    }
    if (name === failedTable.name) {
      const [failed] = await rows.select(connection, failedTable, one);
      return failed && viewOf(failed, "failed", { error: failed.error });
    }
    const [grouped] = await rows.select(connection, groupedTable, one);
    if (!grouped) return undefined;
    const { grp } = grouped;
    const [group] = await rows.select(connection, groupTable, rows.matching(groupTable, [{ queue, grp }]));
    const held =
      group?.head === id && group.next !== undefined && group.next > (await rows.clock(connection));
    return held
      ? viewOf(grouped, "delayed", { runAt: milliseconds(group.next) })
      : viewOf(grouped, "waiting", {});
  }

  async #inLeases(connection: C, leases: readonly Row[], queue: number, id: number) {
    const { rows } = this.#queue;
    for (const { lease, worker, done, jobs } of leases) {
      const all = leasedRows(queue, String(jobs));
      const place = all.findIndex((job) => job.id === id);
      if (place < 0 || placesOf(done)?.includes(place)) continue;
      const mark = rows.matching(markTable, [{ lease: Number(lease), place }]);
      // It was completed in a transaction of its handler.
      if ((await rows.select(connection, markTable, mark)).length > 0) continue;
      const who = rows.is(workerTable, "id", Number(worker));
      const [its] = await rows.select(connection, workerTable, who, { columns: ["name"] });
      return viewOf(all[place] as JobRow, "running", { worker: its?.name });
    }
    return undefined;
  }

  /** Jobs in leases, a few leases at a time: their text may be large. */
  async *#running(connection: C, queue: number, from: number) {
    const { rows } = this.#queue;
    for (let after = from - 1; ;) {
      const where = sql`${rows.is(leaseTable, "queue", queue)} AND ${rows.compare(leaseTable, "id", ">", after)}`;
      const leases = await rows.select(connection, leaseTable, where, { order: sql`id`, limit: perRead });
      const ids = leases.map(({ id }) => id);
      const marks = await rows.select(connection, markTable, rows.among(markTable, "lease", ids));
      const marked = new Set(marks.map(({ lease, place }) => `${lease} ${place}`));
      for (const { id, jobs, done, worker, since } of leases)
        for (const [place, job] of leasedRows(queue, jobs).entries())
          if (!done?.includes(place) && !marked.has(`${id} ${place}`))
            yield { lease: id, place: place + 1, job, worker, since };
      if (leases.length < perRead) return;
      after = ids.at(-1) as number;
    }
  }

  async page(
    connection: C,
    queue: number,
    { state, after, most }: { readonly state: JobState; readonly after: PagePlace; readonly most: number },
  ): Promise<JobPage> {
    const read = await this.#read(connection, queue, state, after, most);
    const moment = await this.#queue.rows.clock(connection);
    const last = read.at(-1);
    return {
      jobs: read.map((each) => infoOf(each, state, moment)),
      next: last && read.length === most ? nextOf(last.place) : undefined,
    };
  }

  async #read(
    connection: C,
    queue: number,
    state: JobState,
    after: PagePlace,
    most: number,
  ): Promise<Listed[]> {
    switch (state) {
      case "waiting":
        return this.#waiting(connection, queue, after, most);
      case "delayed":
        return this.#delayed(connection, queue, after, most);
      case "running":
        return this.#runningPage(connection, queue, after, most);
      default:
        return this.#failed(connection, queue, after, most);
    }
  }

  /** Those without a group, by priority; then groups by name. */
  async #waiting(connection: C, queue: number, after: PagePlace, most: number): Promise<Listed[]> {
    const { rows } = this.#queue;
    const [group = "", priority = -32_768, id = 0] = after;
    const later = (of: typeof readyTable | typeof groupedTable) =>
      sql`(${rows.compare(of, "priority", ">", priority)} OR ${rows.is(of, "priority", priority)} AND ${rows.compare(of, "id", ">", id)})`;
    const alone =
      group === ""
        ? await rows.select(
            connection,
            readyTable,
            sql`${rows.is(readyTable, "queue", queue)} AND ${later(readyTable)}`,
            {
              order: sql`priority, id`,
              limit: most,
            },
          )
        : [];
    const from: Statement =
      group === ""
        ? sql`1 = 1`
        : sql`(${rows.compare(groupedTable, "grp", ">", group)} OR ${rows.is(groupedTable, "grp", group)} AND ${later(groupedTable)})`;
    const grouped =
      alone.length === most
        ? []
        : await rows.select(
            connection,
            groupedTable,
            sql`${rows.is(groupedTable, "queue", queue)} AND ${from}`,
            {
              order: sql`grp, priority, id`,
              limit: most - alone.length,
            },
          );
    return [...alone.map((row) => ({ ...row, grp: undefined })), ...grouped].map((job) => ({
      job,
      place: [job.grp ?? "", job.priority, job.id],
    }));
  }

  async #delayed(connection: C, queue: number, [due, id = 0]: PagePlace, limit: number): Promise<Listed[]> {
    const { rows } = this.#queue;
    const later =
      due === undefined
        ? sql`1 = 1`
        : sql`(${rows.compare(delayedTable, "run_at", ">", due)} OR ${rows.is(delayedTable, "run_at", due)} AND ${rows.compare(delayedTable, "id", ">", id)})`;
    const where = sql`${rows.is(delayedTable, "queue", queue)} AND ${later}`;
    const found = await rows.select(connection, delayedTable, where, { order: sql`run_at, id`, limit });
    return found.map((job) => ({ job, place: [job.run_at, job.id], runAt: milliseconds(job.run_at) }));
  }

  async #runningPage(
    connection: C,
    queue: number,
    [lease = 0, place = 0]: PagePlace,
    most: number,
  ): Promise<Listed[]> {
    const { all, moment } = await this.workers(connection);
    const workers = new Map(all.map((worker) => [worker.id, worker]));
    const found: Listed[] = [];
    for await (const each of this.#running(connection, queue, Number(lease))) {
      if (each.lease === Number(lease) && each.place <= Number(place)) continue;
      const worker = workers.get(each.worker);
      found.push({
        job: each.job,
        place: [each.lease, each.place],
        startedAt: each.since === undefined ? undefined : milliseconds(each.since),
        worker: {
          name: worker ? (worker.name ?? "") : "a worker that is gone",
          alive: worker !== undefined && !isGone(worker, moment),
        },
      });
      if (found.length === most) break;
    }
    return found;
  }

  async #failed(connection: C, queue: number, [id = 0]: PagePlace, limit: number): Promise<Listed[]> {
    const { rows } = this.#queue;
    const where = sql`${rows.is(failedTable, "queue", queue)} AND ${rows.compare(failedTable, "id", ">", id)}`;
    const found = await rows.select(connection, failedTable, where, { order: sql`id`, limit });
    return found.map((job) => ({ job, place: [job.id], error: job.error.split("\n")[0] }));
  }
}

function placesOf(done: unknown): readonly number[] | undefined {
  return valueOf("integers", done) as number[] | undefined;
}

/** A job of a page, and where the page after it begins. */
interface Listed extends Partial<Pick<JobInfo, "runAt" | "startedAt" | "worker" | "error">> {
  readonly job: JobRow;
  readonly place: PagePlace;
}

function infoOf({ job, runAt, startedAt, worker, error }: Listed, state: JobState, moment: number): JobInfo {
  const { id, attempt, priority, key, grp, at } = job;
  return {
    id,
    state,
    failures: attempt,
    priority,
    key,
    group: grp,
    at: milliseconds(at),
    ageMs: Math.max(0, milliseconds(moment - at)),
    runAt,
    startedAt,
    worker,
    error,
  };
}

function viewOf(
  { id, attempt, priority, payload, key, grp, at }: JobRow,
  state: JobState,
  { runAt, worker, error }: Partial<Pick<JobView, "runAt" | "worker" | "error">>,
): JobView {
  return {
    id,
    state,
    failures: attempt,
    priority,
    payload: JSON.parse(payload),
    key,
    group: grp,
    at: milliseconds(at),
    runAt,
    worker,
    error,
  };
}
