/** The generic store of queues: an engine that has a dialect gets it with one line, `queues: queueStore(dialect)`. */
import { randomInt } from "node:crypto";
import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import {
  type Arrival,
  type QueueDecided,
  type HeldLease,
  type LeaseRow,
  type QueueRow,
  decideAdd,
  decideFinish,
  decideGiveBack,
  decideSweep,
  isGone,
  markId,
} from "../../../queue/decide/index.ts";
import type {
  Added,
  Finish,
  How,
  Leased,
  QueueLook,
  Looked,
  NewJob,
  QueueCompletion,
  QueueSettings,
  QueueStore,
  QueueWorkers,
} from "../../../queue/store.ts";
import type { StoreDialect } from "../dialect.ts";
import { queueAdministration } from "./administration.ts";
import { JobClaims } from "./claim.ts";
import { queueLists } from "./lists.ts";
import { QueueRows, chunks } from "./rows.ts";
import {
  groupedTable,
  leaseTable,
  markTable,
  queueTable,
  readyTable,
  workerTable,
  delayedTable,
} from "./tables.ts";
import { queueTransactional } from "./transactional.ts";
import { never } from "../table.ts";

export function queueStore<C extends SqlConnection>(dialect: StoreDialect<C>): QueueStore<C> {
  const queue = new QueueRows(dialect);
  const claims = new JobClaims(queue);
  const work = new Work(queue);
  return {
    open: (connection, name, settings, how) => work.open(connection, name, settings, how),
    add: (connection, number, jobs, how) => work.add(connection, number, jobs, how),
    claim: (connection, call, how) => claims.claim(connection, call, how),
    finish: (connection, call, how) => work.finish(connection, call, how),
    giveBack: (connection, worker, unstarted, how) => work.giveBack(connection, worker, unstarted, how),
    look: (connection, look, how) => work.look(connection, look, how),
    workers: workersOf(queue),
    completion: completionOf(queue),
    transactional: queueTransactional(queue, claims),
    administration: queueAdministration(queue),
    lists: queueLists(queue),
  };
}

class Work<C extends SqlConnection> {
  readonly #queue: QueueRows<C>;

  constructor(queue: QueueRows<C>) {
    this.#queue = queue;
  }

  open(connection: C, name: string, settings: QueueSettings | undefined, how: How): Promise<number> {
    const { rows, dialect } = this.#queue;
    const named = rows.is(queueTable, "name", name);
    return this.#queue.run(connection, how, async () => {
      let [known] = await rows.select(connection, queueTable, named, { locking: "current" });
      if (!known) {
        const [id] = (await dialect.numbers(connection, "queue", 1)) as [number];
        await rows.insertMissing(connection, queueTable, [
          { id, name, paused: false, attempts: 1, ordered: false },
        ]);
        [known] = await rows.select(connection, queueTable, named, { locking: "current" });
      }
      if (!known) throw rows.hidden(queueTable);
      const found: QueueRow = known;
      const wanted = settings && settingsOf(settings);
      if (wanted && Object.entries(wanted).some(([column, value]) => found[column as "id"] !== value))
        await rows.update(connection, queueTable, named, wanted);
      return found.id;
    });
  }

  add(
    connection: C,
    queue: number,
    jobs: readonly NewJob[],
    how: How & { readonly joined: boolean },
  ): Promise<readonly Added[]> {
    const { rows, dialect } = this.#queue;
    return this.#queue.run(connection, how, async () => {
      const ids = await dialect.numbers(connection, "queue_job", jobs.length);
      const keyed = jobs.flatMap(({ key }, i) => (key === undefined ? [] : { key, job: ids[i] as number }));
      const holders = await this.#queue.takeKeys(connection, queue, keyed);
      const moment = await rows.clock(connection);
      const arrivals = jobs.map((job) => arrivalOf(job, moment));
      const { verdicts, writes } = decideAdd(
        // In a transaction of the caller's, others who add to the same new group would wait for its end: the next claim does it.
        { queue, moment, ids, holders, alone: !how.joined },
        arrivals,
      );
      await this.#queue.apply(connection, writes);
      return verdicts;
    });
  }

  finish(connection: C, { queue, worker, whole, ended }: Finish, how: How): Promise<ReadonlySet<number>> {
    const { rows } = this.#queue;
    const named = [...new Set([...whole, ...ended.map(({ lease }) => lease)])];
    return this.#queue.run(connection, how, async () => {
      // What is in the lease matters to those alone that free something, or fail.
      const plain = ended.every(
        ({ job, failure }) => !failure && job.key === undefined && job.group === undefined,
      );
      const leases = await this.#lease(connection, worker, named, plain);
      // When, and how, is asked by those alone that come again.
      const failed = ended.some(({ failure }) => failure);
      const [settings] = failed
        ? await rows.select(connection, queueTable, rows.is(queueTable, "id", queue), {
            columns: ["ordered"],
          })
        : [];
      const ordered = settings?.ordered ?? false;
      const moment = failed ? await rows.clock(connection) : 0;
      const marks = failed ? await this.#marksOf(connection, named) : [];
      const ours = await this.#decide(connection, (held) =>
        decideFinish({ moment, ordered, leases, marks, held }, whole, ended),
      );
      return new Set(ours);
    });
  }

  giveBack(connection: C, worker: number, unstarted: readonly Leased[], how: How): Promise<void> {
    const named = [...new Set(unstarted.map(({ lease }) => lease))];
    return this.#queue.run(connection, how, async () => {
      const leases = await this.#lease(connection, worker, named);
      const marks = await this.#marksOf(connection, named);
      await this.#decide(connection, (held) => decideGiveBack({ leases, marks, held }, unstarted));
    });
  }

  async look(connection: C, { sweep, idle, whole }: QueueLook, how: How): Promise<Looked> {
    const swept =
      sweep === "no"
        ? { jobs: 0, queues: [] }
        : await this.#queue.run(connection, how, () => this.#sweep(connection, sweep === "thorough"));
    const { rows } = this.#queue;
    const ready: number[] = [];
    const moment = idle.length > 0 ? await rows.clock(connection) : 0;
    for (const each of idle)
      if (await this.#hasSomething(connection, each, { moment, whole })) ready.push(each.queue);
    return { jobs: swept.jobs, queues: swept.queues, ready };
  }

  /** Those of these leases that are this worker's, in one order. `plain`: without their jobs. */
  async #lease(connection: C, worker: number, ids: readonly number[], plain = false): Promise<LeaseRow[]> {
    const { rows } = this.#queue;
    const where = sql`${rows.among(leaseTable, "id", ids)} AND ${rows.is(leaseTable, "worker", worker)}`;
    const options = { order: sql`id`, locking: "update" as const };
    if (!plain) return rows.select(connection, leaseTable, where, options);
    const columns = ["id", "worker", "queue", "counted", "size", "done", "since"] as const;
    const found = await rows.select(connection, leaseTable, where, { ...options, columns });
    return found.map((lease) => ({ ...lease, jobs: "[]" }));
  }

  async #decide<T>(connection: C, decide: (held: HeldLease | undefined) => QueueDecided<T>): Promise<T> {
    let decided = decide(undefined);
    if ("need" in decided) decided = decide(await this.#queue.hold(connection, decided.need));
    if ("need" in decided)
      throw new Error("what a decision about jobs needs was read, and is asked for again");
    await this.#queue.apply(connection, decided.writes);
    return decided.verdicts;
  }

  /**
   * Workers that did not say in time that they live, or whose session has ended; and, if it is to be thorough, leases of workers that are not there any more,
   * which were found to be gone while they claimed.
   */
  async #sweep(connection: C, thorough: boolean): Promise<{ jobs: number; queues: readonly string[] }> {
    const { rows, dialect } = this.#queue;
    const moment = await rows.clock(connection);
    const all = await this.#queue.workers(connection, sql`1 = 1`);
    const gone = all.filter((worker) => isGone(worker, moment)).map(({ id }) => id);
    const found = await this.#queue.workers(connection, rows.among(workerTable, "id", gone), {
      order: sql`id`,
      locking: "skip",
    });
    // It may have said so meanwhile, or have another session.
    const dead = found.filter((worker) => isGone(worker, moment));
    if (dead.length === 0 && !thorough) return { jobs: 0, queues: [] };
    const theirs = dead.map(({ queue, id }) => ({ queue, worker: id }));
    const orphans = sql`NOT EXISTS (SELECT 1 FROM ${dialect.table(workerTable.name)} w WHERE w.id = ${dialect.table(leaseTable.name)}.worker)`;
    const which = rows.matching(leaseTable, theirs);
    const leases = await rows.select(
      connection,
      leaseTable,
      thorough ? sql`(${which} OR ${orphans})` : which,
      { order: sql`id`, locking: "skip" },
    );
    const marks = await this.#marksOf(
      connection,
      leases.map(({ id }) => id),
    );
    const queues = new Map(
      (await rows.select(connection, queueTable, sql`1 = 1`)).map((queue) => [queue.id, queue]),
    );
    const swept = await this.#decide(connection, (held) =>
      decideSweep({ moment, leases, marks, queues, held }),
    );
    // One of its leases may be in a transaction that completes a job: another time.
    for (const some of chunks(dead)) {
      const ids = some.map(({ id }) => id);
      await rows.remove(
        connection,
        workerTable,
        sql`${rows.among(workerTable, "id", ids)} AND NOT EXISTS (SELECT 1 FROM ${dialect.table(leaseTable.name)} l
  WHERE l.worker = ${dialect.table(workerTable.name)}.id)`,
      );
    }
    return swept;
  }

  async #marksOf(connection: C, leases: readonly number[]) {
    const { rows } = this.#queue;
    return rows.select(connection, markTable, rows.among(markTable, "lease", leases), {
      locking: "current",
    });
  }

  /** Above the floors that are known of it, or anywhere; or something is due. */
  async #hasSomething(
    connection: C,
    { queue, floors, after }: QueueLook["idle"][number],
    { moment, whole }: { readonly moment: number; readonly whole: boolean },
  ): Promise<boolean> {
    const { rows } = this.#queue;
    const [settings] = await rows.select(connection, queueTable, rows.is(queueTable, "id", queue), {
      columns: ["paused"],
    });
    if (!settings || settings.paused) return false;
    const since = whole || after === undefined ? undefined : after * 1000;
    const one = { columns: ["id"] as const, limit: 1 };
    const due = this.#queue.dueWhere(queue, since, moment);
    if ((await rows.select(connection, delayedTable, due, one)).length > 0) return true;
    const mine = rows.is(readyTable, "queue", queue);
    const levels = [...floors].map(
      ([priority, floor]) =>
        sql`${rows.is(readyTable, "priority", priority)} AND ${rows.compare(readyTable, "id", ">", floor)}`,
    );
    for (const where of whole ? [mine] : levels.map((level) => sql`${mine} AND ${level}`))
      if ((await rows.select(connection, readyTable, where, one)).length > 0) return true;
    if (!whole) return false;
    const grouped = rows.is(groupedTable, "queue", queue);
    return (await rows.select(connection, groupedTable, grouped, one)).length > 0;
  }
}

function settingsOf({ attempts, most, groupMost, groupRate, groupPer, ordered }: QueueSettings) {
  return {
    attempts,
    most,
    group_most: groupMost,
    group_rate: groupRate,
    group_per: groupPer,
    ordered,
  };
}

function arrivalOf(
  { payload, priority, runAt, delayMs, group, key, replace }: NewJob,
  moment: number,
): Arrival {
  const due = runAt === undefined ? undefined : Math.round(runAt * 1000);
  const later = delayMs === undefined ? undefined : moment + Math.round(delayMs * 1000);
  return { payload, priority, runAt: due ?? later, group, key, replace };
}

/** A session's lock is a number here, which nobody else has. */
const largestLock = 2 ** 47;
const numbered = (lock: string | undefined) => (lock === undefined ? {} : { lock: Number(lock) });

function workersOf<C extends SqlConnection>(queue: QueueRows<C>): QueueWorkers<C> {
  const { rows, dialect } = queue;
  const { sessionLocks } = dialect;
  return {
    ...(sessionLocks && {
      sessionLock() {
        const number = randomInt(1, largestLock);
        return { lock: String(number), key: sessionLocks.key(number) };
      },
    }),

    enlist: (connection, number, { ttlMs, name, lock }, how) =>
      queue.run(connection, how, async () => {
        const [id] = (await dialect.numbers(connection, "queue_worker", 1)) as [number];
        const beat = await rows.clock(connection);
        await rows.insertMissing(connection, workerTable, [
          { id, queue: number, beat, since: beat, ttl: ttlMs, name, ...numbered(lock) },
        ]);
        return id;
      }),

    locked: (connection, workers, lock, how) =>
      queue.run(connection, how, async () => {
        await rows.update(connection, workerTable, rows.among(workerTable, "id", workers), numbered(lock));
      }),

    beat: (connection, workers, how) =>
      queue.run(connection, how, async () => {
        const these = rows.among(workerTable, "id", workers);
        await rows.update(connection, workerTable, these, { beat: await rows.clock(connection) });
        const alive = await rows.select(connection, workerTable, these, {
          columns: ["id"],
          locking: "current",
        });
        return new Set(alive.map(({ id }) => id));
      }),

    astray: (connection, worker, known) =>
      queue.ask(connection, async () => {
        const leases = await rows.select(connection, leaseTable, rows.is(leaseTable, "worker", worker), {
          columns: ["id", "size"],
        });
        const knows = new Set(known);
        return leases
          .filter(({ id }) => !knows.has(id))
          .flatMap(({ id, size }) => Array.from({ length: size }, (_, place) => ({ lease: id, place })));
      }),

    retire: (connection, worker, how) =>
      queue.run(connection, how, async () => {
        const left = await rows.select(connection, leaseTable, rows.is(leaseTable, "worker", worker), {
          columns: ["id"],
          limit: 1,
          locking: "current",
        });
        const it = rows.is(workerTable, "id", worker);
        if (left.length > 0) await rows.update(connection, workerTable, it, { beat: -never });
        else await rows.remove(connection, workerTable, it);
      }),
  };
}

function completionOf<C extends SqlConnection>(queue: QueueRows<C>): QueueCompletion<C> {
  const { rows } = queue;
  return {
    // Whoever takes the lease away waits for this transaction, or has done so, and then it is false.
    complete: (connection, worker, { lease, place }, how) =>
      queue.run(connection, how, async () => {
        const ours = rows.matching(leaseTable, [{ id: lease, worker }]);
        const [found] = await rows.select(connection, leaseTable, ours, {
          columns: ["done"],
          locking: "share",
        });
        if (!found || found.done?.includes(place)) return false;
        await rows.insertMissing(connection, markTable, [{ lease, place }]);
        return true;
      }),

    completed: (connection, of) =>
      queue.ask(connection, async () => {
        const leases = [...new Set(of.map(({ lease }) => lease))];
        const where = rows.among(markTable, "lease", leases);
        const marks = new Set((await rows.selectCommitted(connection, markTable, where))?.map(markId));
        return of.map((job) => marks.has(markId(job)));
      }),

    // A second mark of the same job waits for the transaction that has written the first one.
    settled: (connection, mark, how) =>
      queue.run(connection, how, async () => {
        if ((await rows.countMissing(connection, markTable, [mark])) === 0) return true;
        await rows.removeRows(connection, markTable, [mark]);
        return false;
      }),
  };
}
