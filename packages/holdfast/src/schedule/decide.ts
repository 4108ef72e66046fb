/**
 * The rules of schedules, each written once: what becomes of a tick, who may have a run, and when a claim is over. Pure: what
 * was read comes in, what is to be written goes out. Moments are whole microseconds since 1970, of the database's clock.
 *
 * **A schedule** is one row. `last` is the newest tick that was decided upon; it only grows. `decisions` counts: every decision
 * under the row's lock raises it. A schedule that is not there is made with `last` at this moment, rounded down to the
 * millisecond: its first tick is the first after that. Its definition is not kept: with another one it goes on from `last`.
 *
 * **A tick is due** if nobody has decided upon one since the caller looked (`last` is what the caller says), the schedule is
 * not paused, the tick's time has come, and the wish is not out of date (`before` has not come). What is due is decided upon
 * once: `last` becomes the tick, in whichever way it is decided.
 *
 * - It is too late for it (`run: false`): it is passed over, and no row is written.
 * - Another run is open, and runs may not overlap: with "skip" a row says so; with "queue" it stays undecided, for later.
 * - Otherwise it is begun, as attempt 1: with a new fence, and a claim that ends `ttlMs` from now. In the caller's own
 *   transaction it is done with that, or has failed.
 *
 * **A run is open** while it is `running` or `waiting` (for its next attempt). Its claim is over when `until` has come.
 * Whoever asks with `take`, of a schedule that is not paused, gets the oldest such run before any tick, unless somebody's
 * transaction has its row: begun again as the next attempt, with a new fence. One that was running, and has no attempt left,
 * has failed instead: its process died. One that waits was promised an attempt, and gets it.
 *
 * **By hand** ("now") a run is no tick: `last` stays, pauses do not count, and its moment is this millisecond, or the next one
 * that no other run by hand has. If runs may not overlap and one is open, it is not begun, and no row says so.
 *
 * **A wish that is made again**, by its token, gets the run that it got before, with a claim that ends `ttlMs` from now.
 *
 * **Afterwards** runs that are over and older than the newest `keep` are deleted: only when a tick was decided upon, or a run
 * by hand asked for.
 *
 * **A claim is renewed** while the run is `running` with the same fence. **A run is ended** by whoever has that: `done`, or
 * `failed`; with another attempt to come it is `waiting` until then. An attempt that is not to count is taken off.
 */
import type { Due, RunEnding, Overlap, RunState, ScheduleStep } from "./store.ts";

const millisecond = 1000;

/** A row of `schedule`. */
export interface StoredSchedule {
  readonly name: string;
  readonly last: number;
  readonly decisions: number;
  readonly paused: boolean;
}

/** A row of `schedule_run`: one per schedule, tick and `manual`. */
export interface StoredRun {
  readonly schedule: string;
  readonly tick: number;
  readonly manual: boolean;
  readonly state: RunState;
  readonly attempt: number;
  readonly fence: number;
  readonly token: string;
  readonly holder: string;
  readonly previous: number | undefined;
  readonly started: number;
  readonly until: number;
  readonly ended: number | undefined;
  readonly error: string | undefined;
}

/** What was read. What is left out was not asked for yet. */
export interface StepView {
  readonly now: number;
  readonly schedule: StoredSchedule | undefined;
  /** The schedule's row: not locked, locked by us, or somebody else has it. */
  readonly lock: "none" | "ours" | "theirs";
  /** Those that are not over, in the order of their ticks. */
  readonly open: readonly StoredRun[];
  /** Of these, by their place: those whose claim is over, and whose row nobody else has. It is locked by us. */
  readonly free?: ReadonlySet<StoredRun>;
  /** A number above all that were given for this schedule. One is enough: each step begins one run at the most. */
  readonly fence?: number;
  /** Ticks of runs by hand from this millisecond on. */
  readonly manual?: readonly number[];
  /** Of all runs, the newest first: the ticks at the places `keep` and `keep + 1`, as far as there are so many. */
  readonly edge?: readonly number[];
}

/** What has to be read, or done, before it can be decided. */
export type StepNeed =
  /** The schedule is to be made, if it still is not there. */
  | { readonly make: StoredSchedule }
  /** The lock of its row, without waiting for it; then everything is read again. */
  | "lock"
  | "free"
  | "fence"
  | "manual"
  | "edge";

export interface StepWrites {
  readonly schedule: StoredSchedule;
  readonly insert: readonly StoredRun[];
  /** By schedule, tick and `manual`. */
  readonly update: readonly StoredRun[];
  /** Runs of this schedule that are over, with a tick before that, are deleted. */
  readonly forget: number | undefined;
}

export interface StepVerdict {
  readonly now: number;
  readonly last: number;
  readonly wake: number | undefined;
  readonly busy: boolean;
  readonly paused: boolean;
  readonly skipped: boolean;
  readonly died: readonly number[];
  readonly claimed: StoredRun | undefined;
}

export type StepDecided =
  { readonly need: StepNeed } | { readonly verdicts: StepVerdict; readonly writes: StepWrites | undefined };

const isOpen = ({ state }: Pick<StoredRun, "state">): boolean => state === "running" || state === "waiting";

/** Milliseconds, as microseconds: rounded, for they may have parts. */
const micro = (ms: number): number => Math.round(ms * millisecond);

const floorMs = (at: number): number => Math.floor(at / millisecond) * millisecond;

function isDue({ last, paused }: StoredSchedule, wish: ScheduleStep["wish"], now: number): wish is Due {
  return (
    typeof wish === "object" &&
    !paused &&
    micro(wish.after) === last &&
    micro(wish.tick) <= now &&
    (wish.before === undefined || now < micro(wish.before))
  );
}

export function decideStep(view: StepView, step: ScheduleStep): StepDecided {
  const { now, schedule, lock, open } = view;
  if (!schedule)
    return { need: { make: { name: step.schedule, last: floorMs(now), decisions: 0, paused: false } } };
  const due = isDue(schedule, step.wish, now);
  const takes = step.take && !schedule.paused;
  if (lock !== "ours") {
    const waits = open.some(({ token, until }) => token === step.token || (takes && until <= now));
    const idle = !due && step.wish !== "now" && !waits;
    if (!idle && lock === "none") return { need: "lock" };
    return { verdicts: verdict(view, schedule, open, { busy: lock === "theirs" }), writes: undefined };
  }
  const draft = new Draft(view, schedule, step);
  draft.again();
  if (takes) draft.takeOver();
  if (!draft.claimed && !draft.need && (due || step.wish === "now")) draft.begin();
  return draft.need === undefined ? draft.decided() : { need: draft.need };
}

function verdict(
  { now }: StepView,
  { last, paused }: StoredSchedule,
  open: readonly StoredRun[],
  more: Partial<StepVerdict>,
): StepVerdict {
  const wake = paused || open.length === 0 ? undefined : Math.min(...open.map(({ until }) => until));
  return { now, last, wake, paused, busy: false, skipped: false, died: [], claimed: undefined, ...more };
}

/** What a step comes to, under the lock of its schedule. */
class Draft {
  readonly #view: StepView;
  readonly #step: ScheduleStep;
  #schedule: StoredSchedule;
  /** As they will be: those that are open, and those that were. */
  readonly #runs: Map<StoredRun, StoredRun>;
  #inserted: StoredRun | undefined;
  #forget: number | undefined;
  #skipped = false;
  readonly #died: number[] = [];
  claimed: StoredRun | undefined;
  need: StepNeed | undefined;

  constructor(view: StepView, schedule: StoredSchedule, step: ScheduleStep) {
    this.#view = view;
    this.#step = step;
    this.#schedule = schedule;
    this.#runs = new Map(view.open.map((run) => [run, run]));
  }

  get #until(): number {
    return this.#view.now + micro(this.#step.ttlMs);
  }

  /** It was granted before, and the answer was lost. */
  again(): void {
    const mine = this.#view.open.find(
      ({ token, state }) => token === this.#step.token && state === "running",
    );
    if (mine) this.claimed = this.#change(mine, { until: this.#until });
  }

  takeOver(): void {
    const { open, now, free } = this.#view;
    if (this.claimed || !open.some(({ until }) => until <= now)) return;
    if (!free) return void (this.need = "free");
    const { attempts, token, holder } = this.#step;
    for (const run of open.filter((each) => free.has(each))) {
      if (run.state === "running" && run.attempt >= attempts) {
        const error = "Its process died, or did not renew its claim in time, and no attempt is left";
        this.#change(run, { state: "failed", ended: now, error });
        this.#died.push(run.tick);
        continue;
      }
      const fence = this.#fence();
      if (fence === undefined) return;
      const again = { attempt: run.attempt + 1, fence, token, holder, started: now, until: this.#until };
      this.claimed = this.#change(run, { ...again, state: "running", ended: undefined });
      return;
    }
  }

  /** Decides upon the tick that is due, or begins a run by hand. */
  begin(): void {
    const { wish } = this.#step;
    const manual = typeof wish !== "object";
    const tick = manual ? this.#byHand() : micro(wish.tick);
    if (tick === undefined) return;
    const overlaps = this.#step.overlap !== "allow" && [...this.#runs.values()].some(isOpen);
    if (!manual && !wish.run) this.#decideUpon(tick);
    else if (!overlaps) this.#insert(this.#begun(tick, manual));
    else this.#leave(tick, manual, this.#step.overlap);
    this.#clean(this.#inserted?.tick);
  }

  decided(): StepDecided {
    const schedule = { ...this.#schedule, decisions: this.#schedule.decisions + 1 };
    const changed = [...this.#runs].filter(([before, after]) => before !== after);
    const inserted = this.#inserted ? [this.#inserted] : [];
    const open = [...this.#runs.values(), ...inserted].filter(isOpen);
    const more = { skipped: this.#skipped, died: this.#died, claimed: this.claimed };
    return {
      verdicts: verdict(this.#view, schedule, open, more),
      writes: {
        schedule,
        insert: inserted,
        update: changed.map(([, after]) => after),
        forget: this.#forget,
      },
    };
  }

  #change(run: StoredRun, to: Partial<StoredRun>): StoredRun {
    const changed = { ...run, ...to };
    this.#runs.set(run, changed);
    return changed;
  }

  #fence(): number | undefined {
    const { fence } = this.#view;
    if (fence === undefined) this.need = "fence";
    return fence;
  }

  #decideUpon(tick: number): void {
    this.#schedule = { ...this.#schedule, last: tick };
  }

  #insert(run: StoredRun | undefined): void {
    if (!run) return;
    this.#inserted = run;
    if (run.state !== "skipped") this.claimed = run;
    if (!run.manual) this.#decideUpon(run.tick);
  }

  #begun(tick: number, manual: boolean): StoredRun | undefined {
    const fence = this.#fence();
    if (fence === undefined) return undefined;
    const { as, schedule, token, holder } = this.#step;
    const { now } = this.#view;
    return {
      schedule,
      tick,
      manual,
      attempt: 1,
      fence,
      token,
      holder,
      previous: this.#schedule.last,
      started: now,
      until: this.#until,
      state: typeof as === "object" ? "failed" : as,
      ended: as === "running" ? undefined : now,
      error: typeof as === "object" ? as.failed : undefined,
    };
  }

  /** Another run is open. */
  #leave(tick: number, manual: boolean, overlap: Overlap): void {
    this.#skipped = manual || overlap === "skip";
    if (manual || overlap !== "skip") return;
    const { schedule, holder } = this.#step;
    const { now } = this.#view;
    this.#insert({
      schedule,
      tick,
      manual,
      state: "skipped",
      attempt: 0,
      fence: 0,
      token: "",
      holder,
      previous: this.#schedule.last,
      started: now,
      until: now,
      ended: now,
      error: undefined,
    });
  }

  #byHand(): number | undefined {
    const { manual, now } = this.#view;
    if (!manual) {
      this.need = "manual";
      return undefined;
    }
    const taken = new Set(manual);
    let tick = floorMs(now);
    while (taken.has(tick)) tick += millisecond;
    return tick;
  }

  /** Of those that are over, what is older than the tick that comes after the newest `keep` ones. */
  #clean(inserted: number | undefined): void {
    const { edge } = this.#view;
    if (!edge) return void (this.need ??= "edge");
    const [last, next] = edge;
    if (inserted === undefined) this.#forget = next;
    // With one more, each that is older is one place further down.
    else if (last !== undefined && inserted > last) this.#forget = last;
    else if (last !== undefined) this.#forget = Math.max(inserted, next ?? inserted);
  }
}

/** `theirs`: somebody's transaction has the row. */
export interface RunView {
  readonly now: number;
  readonly run: StoredRun | undefined;
  readonly lock: "ours" | "theirs";
}

/** The run, if whoever has this fence still has it. */
const heldBy = (fence: number, run: StoredRun | undefined): StoredRun | undefined =>
  run?.fence === fence && run.state === "running" ? run : undefined;

export function decideRenew(
  { now, run, lock }: RunView,
  { fence, ttlMs }: { readonly fence: number; readonly ttlMs: number },
): { readonly verdict: "renewed" | "locked" | "done" | "lost"; readonly update?: StoredRun } {
  const held = heldBy(fence, run);
  if (held)
    return lock === "theirs"
      ? { verdict: "locked" }
      : { verdict: "renewed", update: { ...held, until: now + micro(ttlMs) } };
  return { verdict: run?.fence === fence && run.state === "done" ? "done" : "lost" };
}

export function decideEnd(
  { now, run }: Omit<RunView, "lock">,
  fence: number,
  ending: RunEnding,
): { readonly verdict: "ended" | "before" | "lost"; readonly update?: StoredRun } {
  const held = heldBy(fence, run);
  if (!held) {
    const same = run?.fence === fence && (run.state === "done") === (ending.state === "done");
    return { verdict: same ? "before" : "lost" };
  }
  if (ending.state === "done")
    return { verdict: "ended", update: { ...held, state: "done", ended: now, error: undefined } };
  const { error, retryInMs, uncounted } = ending;
  const attempt = uncounted ? held.attempt - 1 : held.attempt;
  const failed = { ...held, ended: now, error, attempt };
  const update: StoredRun =
    retryInMs === undefined
      ? { ...failed, state: "failed" }
      : { ...failed, state: "waiting", until: now + micro(retryInMs) };
  return { verdict: "ended", update };
}

/** With the first tick that is missed if it is granted, and the first that is not. */
export interface ScheduleWish extends Due {
  readonly missed: readonly [number, number];
}

/** Ticks around a moment, in milliseconds. */
export interface Candidates {
  /** The newest that was decided upon. */
  readonly after: number;
  readonly now: number;
  /** The first one after `after`. */
  readonly first: number;
  /** The newest until now; of a backlog that is worked off, the next of it. */
  readonly tick: number;
  /** The first one that makes `tick` out of date. */
  readonly next: number | undefined;
}

/**
 * Which tick is asked for, and how. "all": each, in order, whenever that is. "last": the newest, for all that were missed, as
 * long as it is not out of date. "none": the newest too, and it is run if it is not older than its grace; else it is passed
 * over.
 */
export function wishFor(
  catchUp: "none" | "last" | "all",
  graceMs: number,
  { after, now, first, tick, next }: Candidates,
): ScheduleWish {
  if (catchUp === "all") return { tick, after, before: undefined, run: true, missed: [first, tick] };
  if (catchUp === "last") return { tick, after, before: next, run: true, missed: [first, tick] };
  const run = now - tick <= graceMs;
  const before = run ? Math.min(next ?? Infinity, tick + graceMs + 1) : next;
  return { tick, after, before, run, missed: [first, run ? tick : tick + 1] };
}
