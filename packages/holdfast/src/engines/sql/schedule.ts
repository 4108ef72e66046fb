/**
 * Schedules on any engine: read, decided by `schedule/decide.ts`, written. Nothing is compared and set here: of N instances that
 * ask for a tick, N - 1 come too late and see that without a lock; the one that does not locks the schedule's row, and nobody
 * waits for that. Heartbeats lock the row of their run alone.
 */
import { Buffer } from "node:buffer";
import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";
import type { How } from "../../seam/store.ts";
import {
  type StepDecided,
  type StepNeed,
  type StepVerdict,
  type StepView,
  type StepWrites,
  type StoredRun,
  decideEnd,
  decideRenew,
  decideStep,
} from "../../schedule/decide.ts";
import type {
  RunGrip,
  RunRow,
  RunState,
  ScheduleAdministration,
  Schedules,
  ScheduleStanding,
  ScheduleStep,
} from "../../schedule/store.ts";
import type { Locking, StoreDialect } from "./dialect.ts";
import { StoredRows, type StoredSelection } from "./rows.ts";
import { type Table, table } from "./table.ts";

export const scheduleTable = table({
  name: "schedule",
  columns: { name: "text", last: "moment", decisions: "integer", paused: "boolean" },
  key: ["name"],
});

export const runTable = table({
  name: "schedule_run",
  columns: {
    schedule: "text",
    tick: "moment",
    manual: "boolean",
    state: "text",
    attempt: "integer",
    fence: "integer",
    token: "text",
    holder: "text",
    previous: "moment?",
    started: "moment",
    until: "moment",
    ended: "moment?",
    error: "text?",
  },
  key: ["schedule", "tick", "manual"],
});

export const scheduleTables: readonly Table[] = [scheduleTable, runTable];

const ms = (moment: number): number => moment / 1000;
const maybeMs = (moment: number | undefined): number | undefined =>
  moment === undefined ? undefined : ms(moment);

const open = sql.raw("state IN ('running', 'waiting')");

/** Everything that a step reads and writes, on one connection. */
class Stepping<C extends SqlConnection> {
  readonly #rows: StoredRows<C>;
  readonly #connection: C;
  readonly #step: ScheduleStep;
  #locked = false;

  constructor(rows: StoredRows<C>, connection: C, step: ScheduleStep) {
    this.#rows = rows;
    this.#connection = connection;
    this.#step = step;
  }

  /** What is there, as far as it is needed; `lock`: under the lock of the schedule's row, if nobody else has that. */
  async read(lock: boolean): Promise<StepView> {
    const [locked] = lock ? await this.#schedule("skip") : [];
    this.#locked = locked !== undefined;
    const [schedule] = locked ? [locked] : await this.#schedule();
    const runs = await this.#runs(sql`${this.#mine()} AND ${open}`, {
      order: sql`${sql.id("tick")}, ${sql.id("manual")}`,
    });
    const now = await this.#rows.clock(this.#connection);
    return { now, schedule, open: runs, lock: locked ? "ours" : lock && schedule ? "theirs" : "none" };
  }

  /** Decides, and reads what is asked for meanwhile; the lock, and the schedule itself, are not its to get. */
  async decide(first: StepView): Promise<StepDecided> {
    for (let view = first; ;) {
      const decided = decideStep(view, this.#step);
      if (!("need" in decided) || decided.need === "lock" || typeof decided.need === "object") return decided;
      view = { ...view, ...(await this.#more(view, decided.need)) };
    }
  }

  async write({ schedule, insert, update, forget }: StepWrites): Promise<void> {
    const connection = this.#connection;
    const { name, ...set } = schedule;
    await this.#rows.update(connection, scheduleTable, this.#rows.is(scheduleTable, "name", name), set);
    for (const run of update) await writeRun(this.#rows, connection, run);
    await this.#rows.insert(connection, runTable, insert);
    if (forget === undefined) return;
    const older = this.#rows.compare(runTable, "tick", "<", forget);
    await this.#rows.remove(connection, runTable, sql`${this.#mine()} AND NOT (${open}) AND ${older}`);
  }

  async #more(view: StepView, need: Exclude<StepNeed, object | "lock">): Promise<Partial<StepView>> {
    const rows = this.#rows;
    switch (need) {
      case "free":
        return { free: await this.#free(view) };
      case "fence":
        return { fence: await this.#fence() };
      case "manual": {
        const from = rows.compare(runTable, "tick", ">=", Math.floor(view.now / 1000) * 1000);
        const taken = await this.#runs(
          sql`${this.#mine()} AND ${rows.is(runTable, "manual", true)} AND ${from}`,
        );
        return { manual: taken.map(({ tick }) => tick) };
      }
      default: {
        const newest = { order: sql.raw("tick DESC"), offset: this.#step.keep - 1, limit: 2 };
        return { edge: (await this.#runs(this.#mine(), newest)).map(({ tick }) => tick) };
      }
    }
  }

  /** One that a transaction has ended, and not committed yet, is passed over: it is still held. */
  async #free({ open: runs, now }: StepView): Promise<Set<StoredRun>> {
    const over = runs.filter(({ until }) => until <= now);
    const which = over.map(({ schedule, tick, manual }) => ({ schedule, tick, manual }));
    const got = await this.#runs(this.#rows.matching(runTable, which), { locking: "skip" });
    // As it is now: somebody may have renewed or ended it since it was read.
    return new Set(
      over.filter(({ tick, manual, until, fence, state }) =>
        got.some(
          (now) =>
            now.tick === tick &&
            now.manual === manual &&
            now.until === until &&
            now.fence === fence &&
            now.state === state,
        ),
      ),
    );
  }

  async #fence(): Promise<number> {
    const [fence] = await this.#rows.dialect.numbers(this.#connection, "fence", 1);
    return fence as number;
  }

  #mine(): Statement {
    return this.#rows.is(runTable, "schedule", this.#step.schedule);
  }

  #schedule(locking?: Locking) {
    const which = this.#rows.is(scheduleTable, "name", this.#step.schedule);
    return this.#rows.select(this.#connection, scheduleTable, which, { locking });
  }

  /** Under the lock as they are now: a snapshot of the caller's may be older than it. */
  #runs(where: Statement, options: StoredSelection = {}): Promise<StoredRun[]> {
    const { locking = this.#locked ? "current" : undefined } = options;
    return selectRuns(this.#rows, this.#connection, where, { ...options, locking });
  }
}

async function selectRuns<C extends SqlConnection>(
  rows: StoredRows<C>,
  connection: C,
  where: Statement,
  options: StoredSelection = {},
): Promise<StoredRun[]> {
  const found = await rows.select(connection, runTable, where, options);
  return found.map((run) => ({ ...run, state: run.state as RunState }));
}

function keyOf<C extends SqlConnection>(
  rows: StoredRows<C>,
  { schedule, tick, manual }: Pick<StoredRun, "schedule" | "tick" | "manual">,
): Statement {
  return rows.matching(runTable, [{ schedule, tick, manual }]);
}

async function writeRun<C extends SqlConnection>(
  rows: StoredRows<C>,
  connection: C,
  run: StoredRun,
): Promise<void> {
  await rows.update(connection, runTable, keyOf(rows, run), run);
}

function standing({ now, last, wake, claimed, died, ...rest }: StepVerdict): ScheduleStanding {
  return {
    ...rest,
    now: ms(now),
    last: ms(last),
    wake: maybeMs(wake),
    died: died.map(ms),
    claimed: claimed && {
      schedule: claimed.schedule,
      tick: ms(claimed.tick),
      manual: claimed.manual,
      fence: claimed.fence,
      previous: maybeMs(claimed.previous),
      attempt: claimed.attempt,
    },
  };
}

function runOf({
  tick,
  manual,
  state,
  attempt,
  fence,
  holder,
  started,
  until,
  ended,
  error,
}: StoredRun): RunRow {
  return {
    manual,
    state,
    attempt,
    fence,
    holder,
    error,
    tick: ms(tick),
    started: ms(started),
    until: ms(until),
    ended: maybeMs(ended),
  };
}

/** The store over an engine's dialect: `schedules: scheduleStore(dialect)`. */
export function scheduleStore<C extends SqlConnection>(dialect: StoreDialect<C>): Schedules<C> {
  const rows = new StoredRows(dialect);

  async function explained<T>(connection: C, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      if (dialect.failure(connection, error) === "schema-missing")
        throw new SchemaMissingError("The table of schedules", error);
      throw error;
    }
  }

  /** In a transaction of its own, or as part of the one that there is. */
  const within = <T>(connection: C, { free, waitMs }: How, work: () => Promise<T>): Promise<T> =>
    free ? dialect.transaction(connection, waitMs, work) : dialect.inside(connection, waitMs, work);

  /** By itself, what could not be had in time is somebody else's for now. A transaction of the caller's has failed with it. */
  async function patiently<T>(
    connection: C,
    how: How,
    work: () => Promise<T>,
    otherwise: () => Promise<T>,
  ): Promise<T> {
    try {
      return await within(connection, how, work);
    } catch (error) {
      if (!how.free || dialect.failure(connection, error) !== "lock-timeout") throw error;
      return otherwise();
    }
  }

  async function step(connection: C, wish: ScheduleStep, how: How): Promise<ScheduleStanding> {
    const stepping = new Stepping(rows, connection, wish);
    const look = async () => stepping.decide(await stepping.read(false));
    let looked = await look();
    if ("need" in looked && typeof looked.need === "object") {
      const { make } = looked.need;
      await within(connection, how, () => rows.insertMissing(connection, scheduleTable, [make]));
      looked = await look();
      if ("need" in looked && typeof looked.need === "object") throw rows.hidden(scheduleTable);
    }
    if (!("need" in looked)) return standing(looked.verdicts);
    const deleted = () => new Error(`schedule ${wish.schedule}: its row was deleted while it was read`);
    if (looked.need !== "lock") throw deleted();
    const work = async () => {
      const decided = await stepping.decide(await stepping.read(true));
      if ("need" in decided) throw deleted();
      if (decided.writes) await stepping.write(decided.writes);
      return standing(decided.verdicts);
    };
    const busy = async () => {
      const seen = decideStep({ ...(await stepping.read(false)), lock: "theirs" }, wish);
      if ("need" in seen) throw deleted();
      return standing(seen.verdicts);
    };
    return patiently(connection, how, work, busy);
  }

  async function runAt(connection: C, grip: RunGrip, locking?: Locking): Promise<StoredRun | undefined> {
    const key = { schedule: grip.schedule, tick: Math.round(grip.tick * 1000), manual: grip.manual };
    return (await selectRuns(rows, connection, keyOf(rows, key), { locking }))[0];
  }

  const administration: ScheduleAdministration<C> = {
    async all(connection, names) {
      return explained(connection, async () => {
        const found = await rows.select(
          connection,
          scheduleTable,
          names
            ? rows.matching(
                scheduleTable,
                names.map((name) => ({ name })),
              )
            : sql`1 = 1`,
        );
        const unfinished = await selectRuns(rows, connection, open);
        const over = sql.raw("state IN ('done', 'failed')");
        // Of each schedule the newest; two of them if one is by hand.
        const last = await selectRuns(
          rows,
          connection,
          sql`${over} AND (schedule, tick) IN (SELECT schedule, max(tick) FROM ${dialect.table(runTable.name)} WHERE ${over} GROUP BY schedule)`,
        );
        return found
          .toSorted((a, b) => Buffer.compare(Buffer.from(a.name), Buffer.from(b.name)))
          .map((schedule) => {
            const lastRun = last.find((run) => run.schedule === schedule.name);
            return {
              name: schedule.name,
              paused: schedule.paused,
              last: ms(schedule.last),
              open: unfinished.filter((run) => run.schedule === schedule.name).length,
              lastRun: lastRun && runOf(lastRun),
            };
          });
      });
    },

    async list(connection, schedule, limit) {
      return explained(connection, async () => {
        const now = await rows.clock(connection);
        const [found] = await rows.select(
          connection,
          scheduleTable,
          rows.is(scheduleTable, "name", schedule),
        );
        const order = sql`CASE WHEN ${open} THEN 0 ELSE 1 END, tick DESC`;
        const runs = found
          ? await selectRuns(rows, connection, rows.is(runTable, "schedule", schedule), { order, limit })
          : [];
        return {
          now: ms(now),
          last: maybeMs(found?.last),
          paused: found?.paused ?? false,
          runs: runs.toSorted((a, b) => b.tick - a.tick).map(runOf),
        };
      });
    },

    async pause(connection, schedule, paused, how) {
      const which = rows.is(scheduleTable, "name", schedule);
      // Waits for whoever decides about a tick at this moment. Read, for not every server counts what was so already.
      return explained(connection, () =>
        within(connection, how, async () => {
          const [found] = await rows.select(connection, scheduleTable, which, { locking: "update" });
          if (found) await rows.update(connection, scheduleTable, which, { paused });
          return found !== undefined;
        }),
      );
    },
  };

  return {
    step: (connection, wish, how) => explained(connection, () => step(connection, wish, how)),

    renew(connection, grip, ttlMs, how) {
      const work = async () => {
        // Never waits: the row may be locked by a transaction of the run's own, which has ended it.
        const mine = await runAt(connection, grip, "skip");
        const run = mine ?? (await runAt(connection, grip));
        const now = await rows.clock(connection);
        const terms = { fence: grip.fence, ttlMs };
        const { verdict, update } = decideRenew({ now, run, lock: mine ? "ours" : "theirs" }, terms);
        if (update) await writeRun(rows, connection, update);
        return verdict;
      };
      return explained(connection, () => patiently(connection, how, work, async () => "locked" as const));
    },

    end(connection, grip, ending, how) {
      return explained(connection, async () => {
        return within(connection, how, async () => {
          const run = await runAt(connection, grip, "update");
          const { verdict, update } = decideEnd(
            { now: await rows.clock(connection), run },
            grip.fence,
            ending,
          );
          if (update) await writeRun(rows, connection, update);
          return verdict;
        });
      });
    },

    administration,
  };
}
