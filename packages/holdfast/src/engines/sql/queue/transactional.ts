/** Jobs in the transaction of their handlers: its row locks are what keeps others from them. */
import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import {
  type GroupRow,
  decideSettle,
  type JobRow,
  claimedJobs,
  inOrder,
  leaseText,
} from "../../../queue/decide/index.ts";
import type { ClaimCall, How, QueueTransactional } from "../../../queue/store.ts";
import type { JobClaims } from "./claim.ts";
import { type QueueRows, largest, milliseconds } from "./rows.ts";
import { groupTable, groupedTable, queueTable, readyTable } from "./tables.ts";

/** Of the next so many groups, those whose first job has the smallest priority come first. */
const together = 32;
const mostGroups = 2000;
/** What is due is moved so many at a time, and empty groups are forgotten. */
const atOnce = 1000;

export function queueTransactional<C extends SqlConnection>(
  queue: QueueRows<C>,
  claims: JobClaims<C>,
): QueueTransactional<C> {
  const { rows } = queue;
  const taking = new Taking(queue, claims);
  const savepoint = async (connection: C, name: string) => {
    if (rows.dialect.savepoints !== false) await connection.query(sql`SAVEPOINT ${sql.id(name)}`);
  };
  /** Sets the savepoint after our own settings are undone: a rollback to it restores the settings of that moment. */
  const takeThenSave = async <T>(
    connection: C,
    how: How,
    name: string,
    work: () => Promise<T>,
  ): Promise<T> => {
    const taken = await queue.run(connection, how, work);
    await savepoint(connection, name);
    return taken;
  };
  return {
    alone: rows.dialect.savepoints === false,

    tend: (connection, number, { after, whole }, how) =>
      queue.run(connection, how, async () => {
        const moment = await rows.clock(connection);
        const since = whole || after === undefined ? undefined : after * 1000;
        const unknown = whole ? await queue.unknown(connection, number) : [];
        const { moved, groups } = await queue.moveDue(connection, number, { most: atOnce, since, moment });
        await queue.knowAgain(connection, number, unknown, groups);
        const soon = moved > 0 ? 0 : await queue.soon(connection, number, since, moment);
        if (whole) await taking.forget(connection, number);
        return { soon, moment: milliseconds(moment) };
      }),

    take: (connection, number, what, how) =>
      takeThenSave(connection, how, what.savepoint, () => taking.take(connection, number, what)),

    takeOne: (connection, number, { id, priority, group }, what, how) =>
      takeThenSave(connection, how, what.savepoint, async () => {
        const from = group === undefined ? readyTable : groupedTable;
        const which = rows.matching(from, [
          { queue: number, ...(group !== undefined && { grp: group }), priority, id },
        ]);
        const found = await rows.select(connection, from, which, { locking: "skip" });
        return claimedJobs(leaseText(found.map((row) => ({ grp: group, ...row }))))[0];
      }),

    async another(connection, name, saved) {
      if (saved) await connection.query(sql`RELEASE SAVEPOINT ${sql.id(name)}`);
      await savepoint(connection, name);
    },

    settle: (connection, number, jobs, failure, how) =>
      queue.run(connection, how, async () => {
        const named = jobs.map(({ id, priority, group: grp }) => ({ queue: number, id, priority, grp }));
        const found = await taking.rowsOf(connection, named as JobRow[]);
        if (found.length < jobs.length)
          throw new Error(
            `${jobs.length - found.length} of ${jobs.length} jobs that this transaction has taken are not there any more`,
          );
        const moment = await rows.clock(connection);
        let decided = decideSettle({ moment, jobs: found, held: undefined }, failure);
        if ("need" in decided) {
          const held = await queue.hold(connection, decided.need);
          decided = decideSettle({ moment, jobs: found, held }, failure);
        }
        if ("need" in decided)
          throw new Error("what a decision about jobs needs was read, and is asked for again");
        await queue.apply(connection, decided.writes);
      }),
  };
}

class Taking<C extends SqlConnection> {
  readonly #queue: QueueRows<C>;
  readonly #claims: JobClaims<C>;

  constructor(queue: QueueRows<C>, claims: JobClaims<C>) {
    this.#queue = queue;
    this.#claims = claims;
  }

  /** Half of them are jobs of groups, and what is left on either side is for the other. */
  async take(
    connection: C,
    number: number,
    { most, where, whole, onward }: Pick<ClaimCall, "most" | "where" | "whole" | "onward">,
  ) {
    const { rows } = this.#queue;
    const none = { jobs: [], onward: undefined };
    if (await this.#isPaused(connection, number)) return none;
    const known = await rows.select(connection, groupTable, rows.is(groupTable, "queue", number), {
      columns: ["grp"],
      limit: 1,
    });
    const groups = known.length > 0;
    const first = !groups ? most : most === 1 ? Number(Math.random() < 0.5) : most - Math.floor(most / 2);
    const ready = await this.#claims.ready(connection, number, { most: first, where, whole });
    const chosen = groups
      ? await this.#fromGroups(connection, number, most - ready.length, onward)
      : { jobs: [], last: undefined };
    const left = most - ready.length - chosen.jobs.length;
    if (groups && left > 0)
      ready.push(
        ...(await this.#claims.ready(connection, number, { most: left, where, whole, except: ready })),
      );
    // It may have been paused before they were locked.
    if (await this.#isPaused(connection, number)) return { ...none, onward: chosen.last ?? onward };
    const text = leaseText(bearable([...ready, ...chosen.jobs].toSorted(inOrder)));
    return { jobs: claimedJobs(text), onward: chosen.last ?? onward };
  }

  /** In turn, and their rows are not locked, which would keep others from them until the transaction ends. */
  async #fromGroups(connection: C, number: number, room: number, onward: string | undefined) {
    const jobs: JobRow[] = [];
    let last: string | undefined;
    let seen = 0;
    for (const turn of [1, 2]) {
      let after = turn === 1 ? onward : undefined;
      while (jobs.length < room && seen < mostGroups) {
        const names = await this.#names(connection, number, after, turn === 2 ? onward : undefined);
        if (names.length === 0) break;
        seen += names.length;
        after = names.at(-1);
        const share = Math.ceil((room - jobs.length) / names.length);
        for (const { grp } of await this.#byPriority(connection, number, names)) {
          const most = Math.min(share, room - jobs.length);
          const found = await this.#claims.grouped(connection, number, grp, most);
          jobs.push(...found);
          if (found.length > 0) last = grp;
          if (jobs.length >= room) break;
        }
      }
      if (onward === undefined || jobs.length >= room || seen >= mostGroups) break;
    }
    return { jobs, last };
  }

  async #names(connection: C, number: number, after: string | undefined, upTo: string | undefined) {
    const { rows } = this.#queue;
    const conditions = [rows.is(groupTable, "queue", number)];
    if (after !== undefined) conditions.push(rows.compare(groupTable, "grp", ">", after));
    if (upTo !== undefined) conditions.push(rows.compare(groupTable, "grp", "<=", upTo));
    const found = await rows.select(connection, groupTable, sql.join(conditions, " AND "), {
      columns: ["grp"],
      order: sql`grp`,
      limit: together,
    });
    return found.map(({ grp }) => grp);
  }

  /** Those that have jobs, by the priority of the first of them, and then in turn. */
  async #byPriority(connection: C, number: number, names: readonly string[]) {
    const { rows } = this.#queue;
    const heads: { readonly grp: string; readonly priority: number }[] = [];
    for (const grp of names) {
      const [head] = await rows.select(
        connection,
        groupedTable,
        rows.matching(groupedTable, [{ queue: number, grp }]),
        { columns: ["priority"], order: sql`priority, id`, limit: 1 },
      );
      if (head) heads.push({ grp, priority: head.priority });
    }
    return heads.toSorted((a, b) => a.priority - b.priority);
  }

  async #isPaused(connection: C, number: number): Promise<boolean> {
    const { rows } = this.#queue;
    const [settings] = await rows.select(connection, queueTable, rows.is(queueTable, "id", number), {
      columns: ["paused"],
    });
    return settings?.paused ?? false;
  }

  /** Of jobs that this transaction has locked. As they are now: its snapshot may be older than they are. */
  async rowsOf(connection: C, jobs: readonly JobRow[]): Promise<JobRow[]> {
    const { rows } = this.#queue;
    const [alone, grouped] = [false, true].map((has) =>
      jobs.filter(({ grp }) => (grp !== undefined) === has),
    );
    const locking = "update" as const;
    const found: JobRow[] = [];
    if (alone?.length) {
      const some = await rows.select(connection, readyTable, this.#queue.placesOf(alone, false), { locking });
      found.push(...some.map((row) => ({ ...row, grp: undefined })));
    }
    if (grouped?.length)
      found.push(
        ...(await rows.select(connection, groupedTable, this.#queue.placesOf(grouped, true), { locking })),
      );
    return found;
  }

  /** Groups without jobs. One to which a job is added at this moment may be lost: the next look gives it a new row. */
  async forget(connection: C, number: number): Promise<void> {
    const { rows, dialect } = this.#queue;
    const mine = dialect.table(groupTable.name);
    const where = sql`${rows.is(groupTable, "queue", number)} AND ${rows.is(groupTable, "running", 0)}
  AND since IS NULL AND ${rows.is(groupTable, "next", undefined)}
  AND NOT EXISTS (SELECT 1 FROM ${dialect.table(groupedTable.name)} j WHERE j.queue = ${mine}.queue AND j.grp = ${mine}.grp)`;
    const found: GroupRow[] = await rows.select(connection, groupTable, where, {
      order: sql`grp`,
      limit: atOnce,
      locking: "skip",
    });
    await rows.removeRows(connection, groupTable, found);
  }
}

/** So many characters at the most, but always one. */
function bearable(jobs: readonly JobRow[]): JobRow[] {
  let before = 0;
  return jobs.filter(({ payload }) => {
    const fits = before < largest;
    before += payload.length;
    return fits;
  });
}
