/** What becomes of jobs, without a database: the rules one by one, and what holds of all of them, whatever comes. */
import { describe, expect, inject, test } from "vitest";
import {
  type Arrival,
  type QueueDecided,
  type GroupRow,
  type HeldLease,
  type JobRow,
  type LeaseRow,
  type QueueNeed,
  type QueueWrites,
  afterClaim,
  claimedJobs,
  decideAdd,
  decideDue,
  decideFinish,
  decideGiveBack,
  decideRevive,
  decideSettle,
  decideSweep,
  isGone,
  leaseText,
  leasedRows,
  lost,
  roomForGroups,
  roomSoon,
  roomsOf,
  shareOf,
} from "../../packages/holdfast/src/queue/decide/index.ts";
import { random } from "../harness/random.ts";

const moment = 1_800_000_000_000_000;
const second = 1_000_000;

const job = (id: number, more: Partial<JobRow> = {}): JobRow => ({
  queue: 1,
  priority: 0,
  attempt: 0,
  id,
  at: moment - second,
  key: undefined,
  grp: undefined,
  payload: String(id),
  ...more,
});

const lease = (id: number, jobs: readonly JobRow[], more: Partial<LeaseRow> = {}): LeaseRow => ({
  id,
  worker: 1,
  queue: 1,
  counted: true,
  size: jobs.length,
  done: undefined,
  jobs: leaseText(jobs),
  ...more,
});

const group = (grp: string, more: Partial<GroupRow> = {}): GroupRow => ({
  queue: 1,
  grp,
  running: 0,
  since: undefined,
  started: 0,
  next: undefined,
  head: undefined,
  head_priority: undefined,
  floor: undefined,
  floor_priority: undefined,
  ...more,
});

const arrival = (more: Partial<Arrival> = {}): Arrival => ({
  payload: "1",
  priority: 0,
  runAt: undefined,
  group: undefined,
  key: undefined,
  replace: false,
  ...more,
});

function made<T>(
  decided: { readonly need: QueueNeed } | { readonly verdicts: T; readonly writes: QueueWrites },
) {
  if ("need" in decided) throw new Error(`it needs ${JSON.stringify(decided.need)}`);
  return decided;
}

describe("the text of a lease", () => {
  test("is read as it was written, by priority and id, payloads as they stand", () => {
    const payloads = [
      "1.50",
      '{ "a" : [1, "],[\\" {", {}] }',
      '"ä\\\\"',
      "null",
      "[[],[[1]]]",
      "12345678901234567890",
    ];
    const jobs = payloads.map((payload, i) =>
      job(i + 1, {
        payload,
        priority: i % 2 ? -1 : 0,
        key: i % 2 ? 'k",]' : undefined,
        grp: i % 3 ? "g[" : undefined,
      }),
    );
    const rows = leasedRows(1, leaseText(jobs));
    expect(rows).toEqual(jobs.toSorted((a, b) => a.priority - b.priority || a.id - b.id));
    expect(claimedJobs(leaseText(jobs.slice(0, 1)))).toEqual([
      {
        id: 1,
        failures: 0,
        priority: 0,
        at: (moment - second) / 1000,
        key: undefined,
        group: undefined,
        payload: 1.5,
      },
    ]);
  });

  test("knows moments in whole milliseconds, to the nearest", () => {
    const at = (micros: number) => leasedRows(1, leaseText([job(1, { at: moment + micros })]))[0]?.at;
    expect([at(499), at(500), at(1499)]).toEqual([moment, moment + 1000, moment + 1000]);
  });
});

describe("adding", () => {
  const view = { queue: 1, moment, alone: true };

  test("what is due waits, what is not is delayed, whatever its group", () => {
    const { writes } = decideAdd({ ...view, ids: [1, 2, 3, 4], holders: new Map() }, [
      arrival(),
      arrival({ runAt: moment }),
      arrival({ runAt: moment + 1, group: "g" }),
      arrival({ group: "h" }),
    ]);
    expect(writes.insert.ready.map(({ id }) => id)).toEqual([1, 2]);
    expect(writes.insert.delayed.map(({ id, run_at, grp }) => [id, run_at, grp])).toEqual([
      [3, moment + 1, "g"],
    ]);
    expect(writes.insert.grouped.map(({ id }) => id)).toEqual([4]);
    expect(writes.insert.group.map(({ grp }) => grp)).toEqual(["g", "h"]);
  });

  test("in a transaction of the caller's no rows of groups are made", () => {
    const { writes } = decideAdd({ ...view, alone: false, ids: [1], holders: new Map() }, [
      arrival({ group: "g" }),
    ]);
    expect(writes.insert.group).toEqual([]);
  });

  test("a key that is taken: the one that has it, or this one in its place", () => {
    const holders = new Map([
      ["taken", 7],
      ["free", 3],
    ]);
    const { verdicts, writes } = decideAdd({ ...view, ids: [1, 2, 3, 4, 5], holders }, [
      arrival({ key: "taken" }),
      arrival({ key: "taken", replace: true }),
      arrival({ key: "free" }),
      arrival({ key: "free" }),
      arrival({ key: "free", replace: true }),
    ]);
    expect(verdicts).toEqual([
      { id: 7, added: false },
      { id: 2, added: true },
      { id: 3, added: false },
      { id: 3, added: false },
      { id: 5, added: true },
    ]);
    expect(writes.remove.job).toEqual([{ queue: 1, id: 7 }]);
    expect(writes.update.key).toEqual([
      { queue: 1, key: "taken", job: 2 },
      { queue: 1, key: "free", job: 5 },
    ]);
    expect(writes.insert.ready.map(({ id }) => id)).toEqual([2, 5]);
  });
});

describe("the end of jobs", () => {
  const jobs = [job(1, { key: "k" }), job(2, { grp: "g" }), job(3)];
  const view = { moment, ordered: false, leases: [lease(5, jobs)], marks: [], held: undefined };
  const held: HeldLease = {
    keys: [{ queue: 1, key: "k", job: 1 }],
    groups: [group("g", { running: 2, floor: 1, floor_priority: 0 })],
  };

  test("asks for keys and groups before it decides", () => {
    const ended = [0, 1, 2].map((place) => ({ lease: 5, place }));
    const decided = decideFinish(view, [5], ended);
    expect(decided).toEqual({
      need: { keys: [{ queue: 1, key: "k", job: 1 }], groups: [{ queue: 1, grp: "g" }] },
    });
    const { verdicts, writes } = made(decideFinish({ ...view, held }, [5], ended));
    expect(verdicts).toEqual([5]);
    expect(writes.remove).toMatchObject({ key: held.keys, lease: [5] });
    expect(writes.update.group).toEqual([{ ...held.groups[0], running: 1 }]);
    expect(Object.values(writes.insert).flat()).toEqual([]);
  });

  test("to run again: delayed, to the microsecond, and it keeps its key", () => {
    const failure = { error: "no", again: 1.2346 };
    const { writes } = made(decideFinish({ ...view, held }, [], [{ lease: 5, place: 0, failure }]));
    expect(writes.insert.delayed).toEqual([{ ...jobs[0], attempt: 1, run_at: moment + 1235 }]);
    expect(writes.remove.key).toEqual([]);
    expect(writes.update.lease).toEqual([{ id: 5, done: [0] }]);
  });

  test("never again: with the failed, and its key is free", () => {
    const failure = { error: "no", again: undefined };
    const { writes } = made(decideFinish({ ...view, held }, [], [{ lease: 5, place: 0, failure }]));
    expect(writes.insert.failed).toEqual([{ ...jobs[0], attempt: 1, failed_at: moment, error: "no" }]);
    expect(writes.remove.key).toEqual(held.keys);
  });

  test("what was completed in a transaction has not failed, and its key is free", () => {
    const marks = [{ lease: 5, place: 0 }];
    for (const again of [undefined, 10]) {
      const failure = { error: "no", again };
      const { writes } = made(decideFinish({ ...view, marks, held }, [], [{ lease: 5, place: 0, failure }]));
      expect(Object.values(writes.insert).flat()).toEqual([]);
      expect(writes.remove.key).toEqual(held.keys);
      expect(writes.update.lease).toEqual([{ id: 5, done: [0] }]);
    }
    const { writes } = made(decideGiveBack({ ...view, marks, held }, [{ lease: 5, place: 0 }]));
    expect(Object.values(writes.insert).flat()).toEqual([]);
    expect(writes.remove.key).toEqual(held.keys);
  });

  test("a key that has gone to another stays with that", () => {
    const other = { ...held, keys: [{ queue: 1, key: "k", job: 99 }] };
    const { writes } = made(decideFinish({ ...view, held: other }, [], [{ lease: 5, place: 0 }]));
    expect(writes.remove.key).toEqual([]);
  });

  test("in order: it waits at the head of its group, which waits for it", () => {
    const failure = { error: "no", again: 10 };
    const { writes } = made(
      decideFinish({ ...view, ordered: true, held }, [], [{ lease: 5, place: 1, failure }]),
    );
    expect(writes.insert.grouped).toEqual([{ ...jobs[1], attempt: 1 }]);
    expect(writes.insert.delayed).toEqual([]);
    expect(writes.update.group).toEqual([
      group("g", { running: 1, next: moment + 10_000, head: 2, head_priority: 0 }),
    ]);
  });

  test("what is noted already is passed over, and a lease that is not ours too", () => {
    const noted = { ...view, leases: [lease(5, jobs, { done: [1, 2] })] };
    const failure = { error: "no", again: undefined };
    const ended = [
      { lease: 5, place: 1, failure },
      { lease: 5, place: 2 },
      { lease: 6, place: 0, failure },
    ];
    const { verdicts, writes } = made(decideFinish(noted, [6], ended));
    expect(verdicts).toEqual([5]);
    expect(Object.values(writes.insert).flat()).toEqual([]);
    expect(writes.update.lease).toEqual([]);
    expect(writes.remove.lease).toEqual([]);
  });

  test("in the transaction of a handler", () => {
    const failure = { error: "no", again: undefined };
    const taken = { moment, jobs, held };
    const done = made(decideSettle(taken, undefined)).writes;
    expect(done.remove).toMatchObject({ waiting: jobs, key: held.keys });
    expect(Object.values(done.insert).flat()).toEqual([]);
    const failed = made(decideSettle(taken, failure)).writes;
    expect(failed.insert.failed.map(({ id, attempt }) => [id, attempt])).toEqual([
      [1, 1],
      [2, 1],
      [3, 1],
    ]);
    const again = made(decideSettle(taken, { error: "no", again: 5 })).writes;
    expect(again.insert.delayed.map(({ run_at }) => run_at)).toEqual([1, 2, 3].map(() => moment + 5000));
    expect(again.remove.key).toEqual([]);
  });
});

describe("what comes back", () => {
  test("of a dead worker: with one attempt more, failed after the last, ended if it was marked", () => {
    const jobs = [
      job(1, { grp: "g", key: "a" }),
      job(2, { attempt: 1, key: "b" }),
      job(3, { key: "c" }),
      job(4),
    ];
    const { verdicts, writes } = made(
      decideSweep({
        moment,
        leases: [lease(5, jobs, { done: [3] }), lease(6, [], { jobs: "[[1,", size: 1 })],
        marks: [{ lease: 5, place: 2 }],
        queues: new Map([[1, { name: "q", attempts: 2 }]]),
        held: {
          keys: [
            { queue: 1, key: "a", job: 1 },
            { queue: 1, key: "b", job: 2 },
            { queue: 1, key: "c", job: 3 },
          ],
          groups: [group("g", { running: 1, floor: 4, floor_priority: 0 })],
        },
      }),
    );
    expect(verdicts).toEqual({ jobs: 2, queues: ["q"], unreadable: [6] });
    expect(writes.insert.grouped).toEqual([{ ...jobs[0], attempt: 1 }]);
    expect(writes.insert.failed).toEqual([{ ...jobs[1], attempt: 2, failed_at: moment, error: lost }]);
    expect(writes.remove.key.map(({ key }) => key)).toEqual(["b", "c"]);
    expect(writes.update.group).toEqual([group("g")]);
    expect(writes.remove.lease).toEqual([5]);
  });

  test("a worker is gone when its time is over, and not before", () => {
    expect(isGone({ beat: moment - 5 * second, ttl: 5000 }, moment)).toBe(false);
    expect(isGone({ beat: moment - 5 * second - 1, ttl: 5000 }, moment)).toBe(true);
  });

  test("what was not started is as it was; twice is as once", () => {
    const jobs = [job(1, { attempt: 2 }), job(2, { grp: "g" })];
    const back = [0, 1].map((place) => ({ lease: 5, place }));
    const groups = [group("g", { running: 0 })];
    const { writes } = made(
      decideGiveBack({ leases: [lease(5, jobs)], marks: [], held: { keys: [], groups } }, [...back, ...back]),
    );
    expect(writes.insert.ready).toEqual([jobs[0]]);
    expect(writes.insert.grouped).toEqual([jobs[1]]);
    expect(writes.remove.lease).toEqual([5]);
    // Never below nothing.
    expect(writes.update.group).toEqual(groups);
    const noted = made(
      decideGiveBack({ leases: [lease(5, jobs, { done: [0] })], marks: [], held: undefined }, [
        back[0] as never,
      ]),
    );
    expect(Object.values(noted.writes.insert).flat()).toEqual([]);
  });

  test("failed jobs begin anew, unless another has their key", () => {
    const failed = [job(1, { key: "a", attempt: 3 }), job(2, { key: "a" }), job(3, { grp: "g" })].map(
      (row) => ({
        ...row,
        failed_at: moment,
        error: "no",
      }),
    );
    const { verdicts, writes } = decideRevive(failed, new Map([["a", 1]]));
    expect(verdicts).toEqual({ count: 2, back: ["g"] });
    expect(writes.insert.ready).toEqual([job(1, { key: "a" })]);
    expect(writes.remove.failed.map(({ id }) => id)).toEqual([1, 3]);
  });

  test("what is due waits", () => {
    const due = [job(1), job(2, { grp: "g" })].map((row) => ({ ...row, run_at: moment }));
    const { verdicts, writes } = decideDue(due);
    expect(verdicts).toEqual(["g"]);
    expect([writes.insert.ready, writes.insert.grouped]).toEqual([[job(1)], [job(2, { grp: "g" })]]);
  });
});

describe("rooms and shares", () => {
  const free = { group_most: undefined, group_rate: undefined, group_per: undefined };

  test("half of a claim is for groups, and what others leave", () => {
    const heads = () => true;
    expect([roomForGroups(10, 10, heads), roomForGroups(10, 2, heads), roomForGroups(5, 5, heads)]).toEqual([
      5, 8, 2,
    ]);
    expect([
      roomForGroups(1, 1, heads),
      roomForGroups(1, 1, () => false),
      roomForGroups(1, 0, () => false),
    ]).toEqual([1, 0, 1]);
    expect([shareOf(free, 100), shareOf(free, 4), shareOf({ group_most: 2 }, 100), shareOf(free, 0)]).toEqual(
      [10, 4, 2, 1],
    );
  });

  test("as far as the limits allow", () => {
    const limited = { group_most: 3, group_rate: 5, group_per: 1000 };
    const groups = [
      group("a", { running: 2 }),
      group("b", { since: moment - second + 1, started: 4 }),
      group("c", { since: moment - second, started: 5 }),
      group("d"),
    ];
    const rooms = roomsOf(limited, groups, { moment, share: 3, left: 10 });
    expect(rooms.map(({ room }) => room)).toEqual([1, 1, 3, 1]);
    expect(rooms.map(({ used }) => used)).toEqual([0, 4, 0, 0]);
    expect(rooms[1]?.since).toBe(moment - second + 1);
    expect(rooms[2]?.since).toBe(moment);
  });

  test("a group is forgotten when it has no jobs and nothing to remember", () => {
    const rate = { group_most: undefined, group_rate: 5, group_per: 1000 };
    const after = (queue: typeof rate | typeof free, of: GroupRow, begun = 0) =>
      afterClaim(queue, roomsOf(queue, [of], { moment, share: 2, left: 2 })[0] as never, begun, moment);
    expect(after(free, group("g"))).toBe("forget");
    expect(after(free, group("g", { running: 1 }))).toBeUndefined();
    expect(after(rate, group("g", { since: moment - 1, started: 1 }))).toBeUndefined();
    expect(after(rate, group("g", { since: moment - second, started: 1 }))).toBe("forget");
    expect(after(free, group("g"), 2)).toBeUndefined();
    expect(after(rate, group("g", { next: moment, head: 4 }), 2)).toEqual(
      group("g", { running: 2, since: moment, started: 2 }),
    );
  });

  test("when one has room again", () => {
    const rate = { group_per: 1000 };
    const groups = [group("a", { since: moment - second / 2 }), group("b", { next: moment + 200_000 })];
    expect(roomSoon(rate, groups, moment)).toBe(200);
    expect(roomSoon(rate, [group("c")], moment)).toBeUndefined();
  });
});

/** A queue in memory, of which everything is decided by the rules. */
describe("whatever comes", () => {
  test.for(Array.from({ length: 5 }, (_, i) => inject("seed") + i))(
    "no job is lost or doubled, and a key belongs to one job that is there, seed %i",
    (seed) => {
      const next = random(seed);
      const int = (most: number) => Math.floor(next() * most);
      let jobs: JobRow[] = [];
      let delayed: JobRow[] = [];
      let failed: (JobRow & { failed_at: number; error: string })[] = [];
      let leases: LeaseRow[] = [];
      const keys = new Map<string, number>();
      const groups = new Map<string, GroupRow>();
      let [id, fence] = [0, 0];
      const alive = new Set<number>();
      const hold = ({ keys: wanted, groups: names }: QueueNeed): HeldLease => ({
        keys: wanted.flatMap(({ key }) =>
          keys.has(key) ? [{ queue: 1, key, job: keys.get(key) as number }] : [],
        ),
        groups: names.flatMap(({ grp }) => groups.get(grp) ?? []),
      });
      const apply = ({ insert, update, remove }: QueueWrites) => {
        const out = new Set([...remove.job, ...remove.waiting, ...remove.due].map((each) => each.id));
        for (const gone of remove.job)
          if ([...jobs, ...delayed].some((each) => each.id === gone.id)) alive.delete(gone.id);
        const revived = new Set(remove.failed.map((each) => each.id));
        failed = [...failed.filter((each) => !revived.has(each.id)), ...insert.failed];
        jobs = [...jobs.filter((each) => !out.has(each.id)), ...insert.ready, ...insert.grouped];
        delayed = [...delayed.filter((each) => !out.has(each.id)), ...insert.delayed];
        for (const { key, job: holder } of update.key) keys.set(key, holder);
        for (const { key } of remove.key) keys.delete(key);
        for (const each of update.group) groups.set(each.grp, each);
        for (const each of insert.group) if (!groups.has(each.grp)) groups.set(each.grp, group(each.grp));
        leases = leases
          .filter((each) => !remove.lease.includes(each.id))
          .map((each) => ({ ...each, ...update.lease.find((changed) => changed.id === each.id) }));
      };
      const decide = <T>(ask: (held: HeldLease | undefined) => QueueDecided<T>) => {
        const first = ask(undefined);
        apply(made("need" in first ? ask(hold(first.need)) : first).writes);
      };
      for (let step = 0; step < 300; step++) {
        const kind = int(6);
        if (kind < 2) {
          const arrivals = Array.from({ length: 1 + int(4) }, () =>
            arrival({
              ...(int(2) && { key: `k${int(4)}` }),
              ...(int(2) && { group: `g${int(3)}` }),
              replace: int(2) === 0,
              ...(int(4) === 0 && { runAt: moment + 1 }),
            }),
          );
          const ids = arrivals.map(() => ++id);
          for (const [i, { key }] of arrivals.entries())
            if (key && !keys.has(key)) keys.set(key, ids[i] as number);
          const { verdicts, writes } = decideAdd(
            { queue: 1, moment, ids, holders: new Map(keys), alone: true },
            arrivals,
          );
          for (const [i, { added }] of verdicts.entries()) if (added) alive.add(ids[i] as number);
          apply(writes);
        } else if (kind === 2) {
          const some = jobs.slice(0, 1 + int(3));
          if (some.length === 0) continue;
          jobs = jobs.slice(some.length);
          leases.push(lease(++fence, some));
        } else if (kind === 3) {
          const some = leases.filter(() => int(2));
          const ordered = int(2) === 0;
          const ended = some.flatMap((each) =>
            leasedRows(1, each.jobs).map((row, place) => {
              const failure = [undefined, { error: "no", again: 1 }, { error: "no", again: undefined }][
                int(3)
              ];
              if (!failure && !each.done?.includes(place)) alive.delete(row.id);
              return { lease: each.id, place, failure };
            }),
          );
          decide((held) =>
            decideFinish(
              { moment, ordered, leases: some, marks: [], held },
              some.map((each) => each.id),
              ended,
            ),
          );
        } else if (kind === 4) {
          const some = leases.filter(() => int(2));
          const queues = new Map([[1, { name: "q", attempts: 3 }]]);
          decide((held) => decideSweep({ moment, leases: some, marks: [], queues, held }));
        } else {
          const some = leases.filter(() => int(2));
          const places = some.flatMap(({ id: of, size }) =>
            Array.from({ length: size }, (_, place) => ({ lease: of, place })),
          );
          const given = places.filter(() => int(2));
          decide((held) => decideGiveBack({ leases: some, marks: [], held }, given));
          apply(decideDue(delayed.map((row) => ({ ...row, run_at: moment }))).writes);
          for (const row of failed) if (row.key && !keys.has(row.key)) keys.set(row.key, row.id);
          apply(decideRevive(failed, new Map(keys)).writes);
        }
        const running = leases.flatMap((each) =>
          leasedRows(1, each.jobs).filter((_, place) => !each.done?.includes(place)),
        );
        const there = [...jobs, ...delayed, ...failed, ...running].map((row) => row.id);
        expect(
          there.toSorted((a, b) => a - b),
          `step ${step}`,
        ).toEqual([...alive].toSorted((a, b) => a - b));
        for (const [key, holder] of keys) {
          const owner = [...jobs, ...delayed, ...running].find((row) => row.id === holder);
          expect(owner?.key, `step ${step}, key ${key}`).toBe(key);
        }
      }
    },
  );
});
