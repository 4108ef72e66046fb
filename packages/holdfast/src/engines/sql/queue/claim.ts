/** A batch for a worker: what is locked, and passed over if somebody has it, is what nobody else gets. */
import type { SqlConnection } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import {
  type GroupRow,
  type QueueRow,
  afterClaim,
  isLimited,
  roomForGroups,
  roomSoon,
  roomsOf,
  shareOf,
  type JobRow,
  claimedJobs,
  leaseText,
} from "../../../queue/decide/index.ts";
import type { JobClaim, ClaimCall, How, JobPlace } from "../../../queue/store.ts";
import type { Locking } from "../dialect.ts";
import { type QueueRows, largest, milliseconds } from "./rows.ts";
import {
  delayedTable,
  groupTable,
  groupedTable,
  leaseTable,
  queueTable,
  readyTable,
  workerTable,
} from "./tables.ts";
import type { Table } from "../table.ts";

/** Groups that one claim looks at; the next one goes on from there. */
const mostGroups = 2000;

/** What a claim begins with. */
interface ClaimGlance {
  readonly moment: number;
  readonly settings: QueueRow;
  /** The worker is there. */
  readonly enlisted: boolean;
  /** There are groups. */
  readonly groups: boolean;
  /** When the next delayed job is due. */
  readonly next: number | undefined;
}

/** Jobs of groups that were chosen, and what becomes of the groups. */
interface Chosen {
  readonly jobs: readonly JobRow[];
  readonly last: string | undefined;
  readonly groups: readonly GroupRow[];
  readonly forgotten: readonly GroupRow[];
}

export class JobClaims<C extends SqlConnection> {
  readonly #queue: QueueRows<C>;
  /** Queues that were seen with a limit, for all databases: a guess. */
  readonly #limited = new Set<number>();

  constructor(queue: QueueRows<C>) {
    this.#queue = queue;
  }

  async claim(connection: C, call: ClaimCall, how: How): Promise<JobClaim> {
    // In the caller's transaction what is locked stays so: nothing is guessed.
    const guess = how.free ? this.#limited.has(call.queue) : undefined;
    const claim = (alone: boolean | undefined) =>
      this.#queue.run(connection, how, () => this.#claim(connection, call, alone));
    const found = await claim(guess);
    return found === "limited" ? ((await claim(true)) as JobClaim) : found;
  }

  /** `alone`: whether it is taken for a queue with a limit. "limited": it has one, and nothing was done. */
  async #claim(connection: C, call: ClaimCall, alone: boolean | undefined): Promise<JobClaim | "limited"> {
    const { queue: number, worker, where, whole } = call;
    const { rows } = this.#queue;
    const since = whole || where.after === undefined ? undefined : where.after * 1000;
    const glance = await this.#enter(connection, call, since, alone);
    if (glance === "limited") return glance;
    const { moment, settings } = glance;
    const idle = (why: Idle, soon?: number, onward?: string): JobClaim => ({
      lease: undefined,
      why,
      soon,
      onward,
      moment: milliseconds(moment),
    });
    if (settings.paused) return idle("paused");
    // Who has been given up for dead gets nothing more.
    if (!glance.enlisted) return idle("lost");
    const most = Math.min(call.most, await this.#left(connection, settings));
    if (most <= 0) return idle("limit");
    const isDue = glance.next !== undefined && glance.next <= moment;
    const brought =
      isDue || whole ? await this.#bringDue(connection, number, { most, since, moment, whole }) : 0;
    const ready = await this.ready(connection, number, { most, where, whole });
    const room =
      glance.groups || brought > 0 ? roomForGroups(most, ready.length, () => Math.random() < 0.5) : 0;
    const chosen = await this.#choose(connection, settings, { room, onward: call.onward, moment });
    const onward = chosen.last ?? call.onward;
    const jobs = [...ready.slice(0, most - chosen.jobs.length), ...chosen.jobs];
    if (jobs.length === 0) {
      await this.#keep(connection, chosen);
      const { why, soon } = await this.#nothing(connection, settings, { since, moment, whole });
      return idle(why, soon, onward);
    }
    const text = leaseText(jobs);
    if (text.length > (this.#queue.dialect.largest ?? largest) && jobs.length > 1) return idle("large");
    await this.#keep(connection, chosen);
    await this.#queue.removeWaiting(connection, jobs);
    const [lease] = (await this.#queue.dialect.numbers(connection, "queue_lease", 1)) as [number];
    const counted = isLimited(settings);
    await rows.insertMissing(connection, leaseTable, [
      { id: lease, worker, queue: number, counted, size: jobs.length, jobs: text, since: moment },
    ]);
    const claimed = claimedJobs(text);
    return { lease, jobs: claimed, counted, onward, moment: milliseconds(moment), length: text.length };
  }

  /**
   * The settings, in a way that whoever pauses the queue waits for us, and one claim at a time where what is under way has to be
   * counted; with what else says at a glance what there is to do.
   */
  async #enter(
    connection: C,
    call: ClaimCall,
    since: number | undefined,
    guess: boolean | undefined,
  ): Promise<ClaimGlance | "limited"> {
    const { dialect } = this.#queue;
    const read = (locking?: Locking) => this.#glance(connection, call, since, locking);
    if (dialect.exclude) await connection.query(dialect.exclude(pauseOf(call.queue), true));
    const seen = dialect.exclude || guess === undefined ? await read() : undefined;
    const alone = seen ? seen.settings.most !== undefined : guess;
    if (seen && (seen.settings.paused || (dialect.exclude && !alone))) return seen;
    const found = await read(alone ? "update" : "share");
    const limited = found.settings.most !== undefined;
    if (limited) this.#limited.add(call.queue);
    else this.#limited.delete(call.queue);
    if (!limited || alone) return found;
    // The limit came this moment, and is not ours alone to count.
    return "limited";
  }

  async #glance(
    connection: C,
    { queue, worker }: ClaimCall,
    since: number | undefined,
    locking: Locking | undefined,
  ): Promise<ClaimGlance> {
    const { rows, dialect } = this.#queue;
    const moment = dialect.now ? await rows.clock(connection) : undefined;
    const some = (of: Table, where: Statement) =>
      sql`EXISTS (SELECT 1 FROM ${dialect.table(of.name)} WHERE ${where})`;
    const first = dialect.read("moment", sql`min(${sql.id("run_at")})`);
    const [found] = await rows.select(connection, queueTable, rows.is(queueTable, "id", queue), {
      locking,
      computed: {
        moment: ["integer", dialect.clock],
        enlisted: ["boolean", some(workerTable, rows.is(workerTable, "id", worker))],
        groups: ["boolean", some(groupTable, rows.is(groupTable, "queue", queue))],
        next: [
          "moment",
          sql`(SELECT ${first} FROM ${dialect.table(delayedTable.name)} WHERE ${this.#queue.dueWhere(queue, since, undefined)})`,
        ],
      },
    });
    const {
      moment: seen,
      enlisted,
      groups,
      next,
      ...settings
    } = found as QueueRow & Omit<ClaimGlance, "settings">;
    return { settings, enlisted, groups, next, moment: moment ?? seen };
  }

  async #left(connection: C, { id, most }: QueueRow): Promise<number> {
    if (most === undefined) return Infinity;
    const { rows } = this.#queue;
    const leases = await rows.select(connection, leaseTable, rows.is(leaseTable, "queue", id), {
      columns: ["size", "done"],
      locking: "current",
    });
    return leases.reduce((left, { size, done }) => left - size + (done?.length ?? 0), most);
  }

  /** Resolves to how many groups have got something. */
  async #bringDue(
    connection: C,
    number: number,
    what: {
      readonly most: number;
      readonly since: number | undefined;
      readonly moment: number;
      readonly whole: boolean;
    },
  ): Promise<number> {
    const { groups } = await this.#queue.moveDue(connection, number, what);
    const unknown = what.whole ? await this.#queue.unknown(connection, number) : [];
    await this.#queue.knowAgain(connection, number, unknown, groups);
    return groups.length + unknown.length;
  }

  /** Those without a group, by priority and id: of each priority that the worker knows only above its floor, or all of them. */
  async ready(
    connection: C,
    number: number,
    {
      most,
      where: { floors },
      whole,
      except = [],
    }: Pick<ClaimCall, "most" | "whole"> & { readonly where: JobPlace; readonly except?: readonly JobRow[] },
  ): Promise<JobRow[]> {
    const { rows } = this.#queue;
    const mine = rows.is(readyTable, "queue", number);
    // Our own locks keep nobody out of ours.
    const others =
      except.length === 0
        ? mine
        : sql`${mine} AND NOT ${rows.among(
            readyTable,
            "id",
            except.map(({ id }) => id),
          )}`;
    const levels =
      whole || floors.size === 0
        ? [{ at: others, order: sql`priority, id` }]
        : [...floors]
            .toSorted(([a], [b]) => a - b)
            .map(([priority, floor]) => ({
              at: sql`${others} AND ${rows.is(readyTable, "priority", priority)} AND ${rows.compare(readyTable, "id", ">", floor)}`,
              order: sql`id`,
            }));
    const found: JobRow[] = [];
    for (const { at, order } of levels) {
      if (found.length >= most) break;
      const limit = most - found.length;
      const some = await rows.select(connection, readyTable, at, { order, limit, locking: "skip" });
      found.push(...some.map((row) => ({ ...row, grp: undefined })));
    }
    return found;
  }

  /** The first jobs of a group that nobody has. */
  async grouped(connection: C, number: number, grp: string, most: number): Promise<JobRow[]> {
    const { rows } = this.#queue;
    const where = rows.matching(groupedTable, [{ queue: number, grp }]);
    return rows.select(connection, groupedTable, where, {
      order: sql`priority, id`,
      limit: most,
      locking: "skip",
    });
  }

  /**
   * The first job of a group whose jobs run in their order. "held": somebody's transaction has it, and may discard or replace it, or roll that
   * back: the second one must not overtake it. The first one is read without a lock, in the same statement.
   */
  async #head(connection: C, number: number, grp: string): Promise<readonly JobRow[] | "held"> {
    const { rows, dialect } = this.#queue;
    const where = rows.matching(groupedTable, [{ queue: number, grp }]);
    const first = sql`(SELECT id FROM ${dialect.table(groupedTable.name)} WHERE ${where} ORDER BY priority, id LIMIT 1)`;
    const [free] = (await rows.select(connection, groupedTable, where, {
      order: sql`priority, id`,
      limit: 1,
      locking: "skip",
      computed: { first: ["integer", first] },
    })) as (JobRow & { readonly first?: number })[];
    if (!free) return [];
    const { first: head, ...job } = free;
    return head === job.id ? [job] : "held";
  }

  /**
   * Jobs of groups: those after the group that was served last, in turn, each with an equal share. The groups' rows are locked,
   * or passed over if somebody else is choosing from them. First the groups, then their jobs: what a group had put back before it
   * was locked must be seen.
   */
  async #choose(
    connection: C,
    queue: QueueRow,
    {
      room,
      onward,
      ...of
    }: { readonly room: number; readonly onward: string | undefined; readonly moment: number },
  ): Promise<Chosen> {
    const jobs: JobRow[] = [];
    const groups: GroupRow[] = [];
    const forgotten: GroupRow[] = [];
    let last: string | undefined;
    let seen = 0;
    if (room <= 0) return { jobs, last, groups, forgotten };
    const share = shareOf(queue, room);
    // A window begins when its jobs do, and not when we began to wait.
    const moment = queue.group_rate === undefined ? of.moment : await this.#queue.rows.clock(connection);
    for (const turn of [1, 2]) {
      let after = turn === 1 ? onward : undefined;
      while (jobs.length < room && seen < mostGroups) {
        const left = room - jobs.length;
        const range = { after, upTo: turn === 2 ? onward : undefined };
        const some = await this.#open(connection, queue, { ...range, most: Math.ceil(left / share), moment });
        const end = some.at(-1)?.grp;
        if (end === undefined) break;
        seen += some.length;
        last = after = end;
        for (const each of roomsOf(queue, some, { moment, share, left })) {
          const { grp } = each.group;
          const found =
            each.room <= 0
              ? []
              : queue.ordered
                ? await this.#head(connection, queue.id, grp)
                : await this.grouped(connection, queue.id, grp, each.room);
          if (found === "held") continue;
          jobs.push(...found);
          const then = afterClaim(queue, each, found.length, moment);
          if (then === "forget") forgotten.push(each.group);
          else if (then) groups.push(then);
        }
      }
      if (onward === undefined || jobs.length >= room || seen >= mostGroups) break;
    }
    return { jobs, last, groups, forgotten };
  }

  /** Groups that may begin something, in their order, locked. */
  async #open(
    connection: C,
    { id, group_most }: QueueRow,
    of: {
      readonly after: string | undefined;
      readonly upTo: string | undefined;
      readonly most: number;
      readonly moment: number;
    },
  ): Promise<GroupRow[]> {
    const { rows, dialect } = this.#queue;
    const conditions = [rows.is(groupTable, "queue", id)];
    if (of.after !== undefined) conditions.push(rows.compare(groupTable, "grp", ">", of.after));
    if (of.upTo !== undefined) conditions.push(rows.compare(groupTable, "grp", "<=", of.upTo));
    if (group_most !== undefined) conditions.push(rows.compare(groupTable, "running", "<", group_most));
    const mine = dialect.table(groupTable.name);
    // Or the one that it waits for was thrown away.
    conditions.push(
      sql`(${rows.is(groupTable, "next", undefined)} OR ${rows.compare(groupTable, "next", "<=", of.moment)} OR head IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM ${dialect.table(groupedTable.name)} h
    WHERE h.queue = ${mine}.queue AND h.grp = ${mine}.grp AND h.priority = ${mine}.head_priority AND h.id = ${mine}.head))`,
    );
    return rows.select(connection, groupTable, sql.join(conditions, " AND "), {
      order: sql`grp`,
      limit: of.most,
      locking: "skip",
    });
  }

  async #keep(connection: C, { groups, forgotten }: Chosen): Promise<void> {
    const { rows } = this.#queue;
    for (const group of groups) await this.#queue.updateGroup(connection, group);
    // A job that is added at this moment may lose its group by this: a later claim gives it a new one.
    for (const { queue, grp } of forgotten)
      await rows.remove(connection, groupTable, rows.matching(groupTable, [{ queue, grp }]));
  }

  async #nothing(
    connection: C,
    queue: QueueRow,
    {
      since,
      moment,
      whole,
    }: { readonly since: number | undefined; readonly moment: number; readonly whole: boolean },
  ): Promise<{ readonly why: "empty" | "full"; readonly soon: number | undefined }> {
    const { rows } = this.#queue;
    const due = await this.#queue.soon(connection, queue.id, since, moment);
    const groups: GroupRow[] = await rows.select(
      connection,
      groupTable,
      rows.is(groupTable, "queue", queue.id),
      {
        order: sql`grp`,
        limit: 1000,
      },
    );
    if (groups.length === 0) return { why: "empty", soon: due };
    // Their groups have no room, or are to come next.
    const mine = rows.is(groupedTable, "queue", queue.id);
    const waits = whole
      ? await rows.select(connection, groupedTable, mine, { columns: ["id"], limit: 1 })
      : undefined;
    const opens = roomSoon(queue, groups, moment);
    const soon = [due, opens].filter((each) => each !== undefined);
    return {
      why: waits?.length === 0 ? "empty" : "full",
      soon: soon.length > 0 ? Math.min(...soon) : undefined,
    };
  }
}

type Idle = Extract<JobClaim, { lease: undefined }>["why"];

/** Whoever claims has it with others, whoever pauses has it alone. */
export const pauseOf = (queue: number): string => `holdfast_queue_pause ${queue}`;
