/**
 * Statements that the parts of the generic store of queues share. Whoever waits for rows that others may have takes them in one
 * order, so that no two wait for each other: leases, then keys by name, then groups by name, each kind once. Jobs and workers are
 * passed over if somebody has them.
 */
import type { SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError } from "../../../seam/errors.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import {
  type DelayedRow,
  type GroupRow,
  type HeldLease,
  type QueueNeed,
  type QueueWrites,
  byText,
  decideDue,
  type JobRow,
} from "../../../queue/decide/index.ts";
import type { How } from "../../../queue/store.ts";
import type { StoreDialect } from "../dialect.ts";
import {
  delayedTable,
  failedTable,
  groupTable,
  groupedTable,
  keyTable,
  leaseTable,
  markTable,
  readyTable,
  type StoredWorker,
  workerTable,
} from "./tables.ts";
import { type StoredSelection, StoredRows, mostTurns } from "../rows.ts";
import type { NewRow, Table } from "../table.ts";

/** Rows in one statement: servers take some ten thousand values. */
const perStatement = 500;

/** More than this, in characters, is no batch: whoever gets it could not read it. The worker asks for fewer. */
export const largest = 64 * 1024 * 1024;

export const milliseconds = (moment: number): number => moment / 1000;

export class QueueRows<C extends SqlConnection> {
  readonly dialect: StoreDialect<C>;
  readonly rows: StoredRows<C>;

  constructor(dialect: StoreDialect<C>) {
    this.dialect = dialect;
    this.rows = new StoredRows(dialect);
  }

  /** `unlocked`: its session has ended. */
  async workers(
    connection: C,
    where: Statement,
    options: StoredSelection = {},
  ): Promise<readonly (StoredWorker & { readonly unlocked?: boolean })[]> {
    const { rows, dialect } = this;
    const all = await rows.select(connection, workerTable, where, options);
    const locks = new Set(all.flatMap(({ lock }) => lock ?? []));
    if (!dialect.sessionLocks || locks.size === 0) return all;
    const column = sql`${sql.id("lock")}`;
    const found = await rows.look(
      connection,
      sql`SELECT ${column} AS free FROM ${dialect.table(workerTable.name)} WHERE ${rows.reading(sql`${rows.among(workerTable, "lock", [...locks])} AND ${dialect.sessionLocks.isFree(column)}`)}`,
    );
    const free = new Set(found.map((row) => Number(row["free"])));
    return all.map((worker) => ({
      ...worker,
      unlocked: worker.lock !== undefined && free.has(worker.lock),
    }));
  }

  /** In a transaction of its own, or in the one that is there. */
  async run<T>(connection: C, { free, waitMs }: How, work: () => Promise<T>): Promise<T> {
    const { dialect } = this;
    return this.ask(connection, () =>
      free ? dialect.transaction(connection, waitMs, work) : dialect.inside(connection, waitMs, work),
    );
  }

  async ask<T>(connection: C, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      throw this.dialect.failure(connection, error) === "schema-missing"
        ? new SchemaMissingError("A table of queues", error)
        : error;
    }
  }

  /** By the key of where they wait, so that each is found by it. */
  placesOf(jobs: readonly JobRow[], grouped: boolean): Statement {
    const { rows } = this;
    const of = grouped ? groupedTable : readyTable;
    const places = new Map<string, { readonly job: JobRow; readonly ids: number[] }>();
    for (const job of jobs) {
      const place = JSON.stringify([job.queue, job.priority, job.grp]);
      const found = places.get(place);
      if (found) found.ids.push(job.id);
      else places.set(place, { job, ids: [job.id] });
    }
    const each = [...places.values()].map(({ job: { queue, priority, grp }, ids }) => {
      const group = grouped ? sql` AND ${rows.is(groupedTable, "grp", grp)}` : sql``;
      return sql`(${rows.is(of, "queue", queue)}${group} AND ${rows.is(of, "priority", priority)} AND ${rows.among(of, "id", ids)})`;
    });
    return sql.join(each, " OR ");
  }

  /** They have waited, and do not any more. Throws if one of them did not: this transaction has locked them. */
  async removeWaiting(connection: C, jobs: readonly JobRow[]): Promise<void> {
    const { rows } = this;
    for (const grouped of [false, true])
      for (const some of chunks(jobs.filter(({ grp }) => (grp !== undefined) === grouped))) {
        const where = this.placesOf(some, grouped);
        const removed = grouped
          ? await rows.removeRows(connection, groupedTable, some as NewRow<typeof groupedTable>[], where)
          : await rows.removeRows(connection, readyTable, some, where);
        if (removed !== some.length)
          throw new Error(`${some.length} jobs were locked, and ${removed} were there`);
      }
  }

  async insertAll<T extends Table>(connection: C, into: T, rows: readonly NewRow<T>[]): Promise<void> {
    for (const some of chunks(rows)) await this.rows.insert(connection, into, some);
  }

  /** In their order. */
  async lockKeys(connection: C, queue: number, keys: readonly string[]) {
    const { rows } = this;
    const where = sql`${rows.is(keyTable, "queue", queue)} AND ${rows.among(keyTable, "key", keys)}`;
    return rows.select(connection, keyTable, where, { order: rows.order(keyTable), locking: "update" });
  }

  async lockGroups(connection: C, queue: number, names: readonly string[]): Promise<GroupRow[]> {
    const { rows } = this;
    const where = sql`${rows.is(groupTable, "queue", queue)} AND ${rows.among(groupTable, "grp", names)}`;
    return rows.select(connection, groupTable, where, { order: rows.order(groupTable), locking: "update" });
  }

  /** First all the keys, then all the groups, whatever the number of queues. */
  async hold(connection: C, { keys, groups }: QueueNeed): Promise<HeldLease> {
    const held = { keys: [] as HeldLease["keys"][number][], groups: [] as GroupRow[] };
    for (const queue of queuesOf(keys)) {
      const names = keys.flatMap((each) => (each.queue === queue ? each.key : []));
      held.keys.push(...(await this.lockKeys(connection, queue, names)));
    }
    for (const queue of queuesOf(groups)) {
      const names = groups.flatMap((each) => (each.queue === queue ? each.grp : []));
      held.groups.push(...(await this.lockGroups(connection, queue, names)));
    }
    return held;
  }

  /**
   * Keys that are free are taken for these jobs, the first of each key; others stay with whoever has them. Resolves to the job that
   * each belongs to. A row has to be there to be locked; one that has ended meanwhile is taken the next time round.
   */
  async takeKeys(
    connection: C,
    queue: number,
    wanted: readonly { readonly key: string; readonly job: number }[],
  ): Promise<Map<string, number>> {
    const first = new Map<string, number>();
    for (const { key, job } of wanted) if (!first.has(key)) first.set(key, job);
    const holders = new Map<string, number>();
    let missing = [...first.keys()].toSorted(byText);
    for (let turn = 1; missing.length > 0; turn++) {
      if (turn > mostTurns) throw this.rows.hidden(keyTable);
      const rows = missing.map((key) => ({ queue, key, job: first.get(key) as number }));
      for (const some of chunks(rows)) await this.rows.insertMissing(connection, keyTable, some);
      for (const some of chunks(missing))
        for (const { key, job } of await this.lockKeys(connection, queue, some)) holders.set(key, job);
      missing = missing.filter((key) => !holders.has(key));
    }
    return holders;
  }

  /** Rows for groups that have none: only those that are new to us, as others may be at work on those that are there. */
  async know(connection: C, queue: number, names: readonly string[]): Promise<void> {
    const { rows } = this;
    for (const some of chunks([...new Set(names)].toSorted(byText))) {
      const where = sql`${rows.is(groupTable, "queue", queue)} AND ${rows.among(groupTable, "grp", some)}`;
      const known = await rows.select(connection, groupTable, where, { columns: ["grp"] });
      const there = new Set(known.map(({ grp }) => grp));
      const fresh = some.filter((grp) => !there.has(grp));
      await rows.insertMissing(
        connection,
        groupTable,
        fresh.map((grp) => ({ queue, grp, running: 0, started: 0 })),
      );
    }
  }

  /** And groups to which jobs have come back that are older than others: whoever chooses from those looks at all that they have. */
  async knowAgain(
    connection: C,
    queue: number,
    fresh: readonly string[],
    back: readonly string[],
  ): Promise<void> {
    const { rows } = this;
    await this.know(connection, queue, [...fresh, ...back]);
    for (const some of chunks([...new Set(back)].toSorted(byText))) {
      const where = sql`${rows.is(groupTable, "queue", queue)} AND ${rows.among(groupTable, "grp", some)} AND floor IS NOT NULL`;
      const floored = await rows.select(connection, groupTable, where, {
        order: rows.order(groupTable),
        locking: "update",
      });
      if (floored.length === 0) continue;
      const which = rows.among(
        groupTable,
        "grp",
        floored.map(({ grp }) => grp),
      );
      await rows.update(connection, groupTable, sql`${rows.is(groupTable, "queue", queue)} AND ${which}`, {
        floor: undefined,
        floor_priority: undefined,
      });
    }
  }

  /** Groups that have jobs and no row: added in a transaction, or while the group was taken for empty. */
  async unknown(connection: C, queue: number): Promise<string[]> {
    const { rows, dialect } = this;
    const found = await rows.look(
      connection,
      sql`SELECT DISTINCT j.grp AS grp FROM ${dialect.table(groupedTable.name)} j WHERE ${rows.reading()} AND j.${rows.is(groupedTable, "queue", queue)}
  AND NOT EXISTS (SELECT 1 FROM ${dialect.table(groupTable.name)} g WHERE g.queue = j.queue AND g.grp = j.grp)`,
    );
    return found.map(({ grp }) => String(grp));
  }

  /** What is due at a moment, after another one: where that is. */
  dueWhere(queue: number, since: number | undefined, moment: number | undefined): Statement {
    const { rows } = this;
    const after = since === undefined ? sql`` : sql` AND ${rows.compare(delayedTable, "run_at", ">", since)}`;
    const until =
      moment === undefined ? sql`` : sql` AND ${rows.compare(delayedTable, "run_at", "<=", moment)}`;
    return sql`${rows.is(delayedTable, "queue", queue)}${after}${until}`;
  }

  /** So many of what is due go where they can be claimed. Resolves to how many there were, and their groups. */
  async moveDue(
    connection: C,
    queue: number,
    {
      most,
      since,
      moment,
    }: { readonly most: number; readonly since: number | undefined; readonly moment: number },
  ): Promise<{ readonly moved: number; readonly groups: readonly string[] }> {
    const due: DelayedRow[] = await this.rows.select(
      connection,
      delayedTable,
      this.dueWhere(queue, since, moment),
      { order: sql`run_at, id`, limit: most, locking: "skip" },
    );
    if (due.length === 0) return { moved: 0, groups: [] };
    const { verdicts, writes } = decideDue(due);
    await this.apply(connection, writes);
    return { moved: due.length, groups: verdicts };
  }

  /** Milliseconds until the next one is due; undefined: none is. */
  async soon(
    connection: C,
    queue: number,
    since: number | undefined,
    moment: number,
  ): Promise<number | undefined> {
    const [next] = await this.rows.select(connection, delayedTable, this.dueWhere(queue, since, undefined), {
      columns: ["run_at"],
      order: sql`run_at`,
      limit: 1,
    });
    return next && Math.max(0, milliseconds(next.run_at - moment));
  }

  async apply(connection: C, { insert, update, remove }: QueueWrites): Promise<void> {
    const { rows } = this;
    for (const job of remove.job) await this.#takeOut(connection, job);
    await this.removeWaiting(connection, remove.waiting);
    for (const some of chunks(remove.due)) await rows.removeRows(connection, delayedTable, some);
    for (const some of chunks(remove.failed)) await rows.removeRows(connection, failedTable, some);
    await this.insertAll(connection, readyTable, insert.ready);
    await this.insertAll(connection, groupedTable, insert.grouped as NewRow<typeof groupedTable>[]);
    await this.insertAll(connection, delayedTable, insert.delayed);
    for (const some of chunks(insert.failed)) await rows.insertMissing(connection, failedTable, some);
    for (const { queue, key, job } of update.key)
      await rows.update(connection, keyTable, rows.matching(keyTable, [{ queue, key }]), { job });
    for (const some of chunks(remove.key)) await rows.removeRows(connection, keyTable, some);
    for (const group of update.group) await this.updateGroup(connection, group);
    for (const { id, done } of update.lease)
      await rows.update(connection, leaseTable, rows.is(leaseTable, "id", id), { done });
    for (const some of chunks(remove.lease)) {
      const marks = some.map((lease) => ({ lease }));
      await rows.removeRows(connection, markTable, marks, rows.among(markTable, "lease", some));
      const leases = some.map((id) => ({ id }));
      await rows.removeRows(connection, leaseTable, leases, rows.among(leaseTable, "id", some));
    }
    for (const queue of queuesOf(insert.group))
      await this.know(
        connection,
        queue,
        insert.group.flatMap((group) => (group.queue === queue ? group.grp : [])),
      );
  }

  async updateGroup(connection: C, { queue, grp, ...set }: GroupRow): Promise<void> {
    await this.rows.update(connection, groupTable, this.rows.matching(groupTable, [{ queue, grp }]), set);
  }

  /** A job that waits, wherever that is, unless somebody has it. */
  async #takeOut(connection: C, { queue, id }: Pick<JobRow, "queue" | "id">): Promise<void> {
    const { rows } = this;
    for (const from of [delayedTable, readyTable, groupedTable] as const) {
      const where = rows.matching(from, [{ queue, id }]);
      const [found] = await rows.select(connection, from, where, { locking: "skip" });
      if (!found) continue;
      // By its key: who looks for it among others might have to wait for those.
      await rows.removeRows(connection, from, [found]);
      return;
    }
  }
}

function queuesOf(of: readonly { readonly queue: number }[]): number[] {
  return [...new Set(of.map(({ queue }) => queue))].toSorted((a, b) => a - b);
}

export function chunks<T>(items: readonly T[], size = perStatement): T[][] {
  return Array.from({ length: Math.ceil(items.length / size) }, (_, i) =>
    items.slice(i * size, (i + 1) * size),
  );
}
