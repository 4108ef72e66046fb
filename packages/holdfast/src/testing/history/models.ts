/** Models of what people build on databases. */
import { UsageError } from "../../seam/errors.ts";
import { decideBag, decideQueue, foundNothing } from "./items.ts";
import type { Model } from "./model.ts";
import { type Operation, textOf } from "./operation.ts";

function unheardOf(model: string, { call }: Operation, known: string): UsageError {
  return new UsageError(`models.${model}: there is no "${call}"; it knows ${known}`);
}

const isUnknown = ({ outcome }: Operation): boolean => outcome === "unknown";

/** `read` → value; `write` value; `compareAndSet` { from, to } → whether it did. */
export function register(options: { readonly initial?: unknown } = {}): Model<string> {
  const change = ({ input }: Operation) => input as { readonly from: unknown; readonly to: unknown };
  return {
    name: "register",
    anyProcess: true,
    initial: () => textOf(options.initial ?? null),
    step(state, operation) {
      const { call, input, output } = operation;
      if (call === "write") return [textOf(input ?? null)];
      if (call === "read") return isUnknown(operation) || textOf(output ?? null) === state ? [state] : [];
      if (call !== "compareAndSet")
        throw unheardOf("register", operation, "read, write and compareAndSet { from, to }");
      const fits = textOf(change(operation).from ?? null) === state;
      if (!isUnknown(operation) && fits !== output) return [];
      return [fits ? textOf(change(operation).to ?? null) : state];
    },
    key: (state) => state,
    show: (state) => `the value is ${state}`,
    effect({ call, output }) {
      if (call === "write") return "write";
      return call === "read" || output === false ? "read" : undefined;
    },
  };
}

function amount({ input }: Operation): number {
  if (input === undefined || input === null) return 1;
  if (typeof input === "number") return input;
  const { n } = input as { readonly n?: unknown };
  if (typeof n !== "number") throw new UsageError("models.counter: the input is a number, or { n }");
  return n;
}

/**
 * Never more than `limit`. `take` n → granted or not, or what is used afterwards; `refund` n → `false` if so much was
 * not used; `read` → what is used. The input is a number or `{ n }`; none is 1.
 */
export function counter(options: { readonly limit?: number; readonly initial?: number } = {}): Model<number> {
  const { limit = Infinity, initial = 0 } = options;
  const granted = (operation: Operation) => operation.call === "take" && operation.output !== false;
  const blank = (operation: Operation) => isUnknown(operation) || typeof operation.output !== "number";
  return {
    name: "counter",
    anyProcess: true,
    initial: () => initial,
    step(used, operation) {
      const { call, output } = operation;
      if (call === "read") return isUnknown(operation) || output === used ? [used] : [];
      if (call !== "take" && call !== "refund")
        throw unheardOf("counter", operation, "take, refund and read");
      const next = call === "take" ? used + amount(operation) : used - amount(operation);
      const possible = next <= limit && next >= 0;
      if (isUnknown(operation)) return possible ? [next] : [];
      if (output === false) return possible ? [] : [used];
      return possible && (typeof output !== "number" || output === next) ? [next] : [];
    },
    key: String,
    show: (used) => `${used} used${limit === Infinity ? "" : ` of ${limit}`}`,
    effect: ({ call, outcome, output }) =>
      call === "read" || (outcome === "returned" && output === false) ? "read" : undefined,
    // What fits after another one fits before it. One that says what is used afterwards does not.
    mayWait: (first, second) =>
      blank(first) &&
      blank(second) &&
      first.call === second.call &&
      (first.call === "refund"
        ? first.output !== false && second.output !== false
        : first.call === "take" && granted(second)),
  };
}

export interface LockState {
  readonly owner: string | null;
  /** The largest that was given. */
  readonly fence: number;
  readonly since: number;
}

interface LockInput {
  readonly owner?: unknown;
  readonly fence?: unknown;
}

function field(value: unknown, name: keyof LockInput): unknown {
  return typeof value === "object" && value !== null ? (value as LockInput)[name] : undefined;
}

function ownerOf({ input, process }: Operation): string {
  return String(field(input, "owner") ?? process);
}

/** A grant that nobody heard of has a fence too: larger than those before it, and smaller than those after. */
function nextFence(operation: Operation, fence: number): number | undefined {
  if (isUnknown(operation)) return Math.floor(fence) + 0.5;
  const given = field(operation.output, "fence");
  if (given === undefined) return fence;
  return Number(given) > fence ? Number(given) : undefined;
}

function fenceText(fence: number): string {
  return fence === 0 ? "" : `, fence ${Number.isInteger(fence) ? fence : `above ${Math.floor(fence)}`}`;
}

/**
 * One owner at a time. `acquire` and `tryAcquire` → `false` if it was taken, else anything, `{ fence }` if it has one:
 * fences must grow. `release` → `false` if it was not the owner's. The owner is `input.owner`, or the process.
 *
 * With `ttl` (milliseconds) a lock is a lease: another one may get it so long after it was granted.
 */
export function lock(options: { readonly ttl?: number } = {}): Model<LockState> {
  const ttl = options.ttl === undefined ? Infinity : options.ttl * 1e6;
  return {
    name: "lock",
    initial: () => ({ owner: null, fence: 0, since: 0 }),
    step(state, operation) {
      const { call, output, start, end } = operation;
      const owner = ownerOf(operation);
      if (call === "release") {
        const mine = state.owner === owner;
        if (output === false) return mine ? [] : [state];
        return mine ? [{ ...state, owner: null }] : [];
      }
      if (call !== "acquire" && call !== "tryAcquire")
        throw unheardOf("lock", operation, "acquire, tryAcquire and release");
      const taken = state.owner !== null;
      if (output === false) return taken ? [state] : [];
      const over = ttl !== Infinity && end >= state.since + ttl;
      const fence = nextFence(operation, state.fence);
      if ((taken && !over) || fence === undefined) return [];
      return [{ owner, fence, since: ttl === Infinity ? 0 : start }];
    },
    key: ({ owner, fence, since }) => `${owner === null ? "" : `=${owner}`}|${fence}|${since}`,
    show: ({ owner, fence }) => `${owner === null ? "free" : `held by ${owner}`}${fenceText(fence)}`,
    effect: ({ outcome, output }) => (outcome === "returned" && output === false ? "read" : undefined),
  };
}

export interface FencedState {
  readonly fence: number;
  /** Whether the newest lease has not been given back. */
  readonly open: boolean;
  readonly since: number;
  readonly value: string;
}

/**
 * A value that only the newest lease may write, whatever became of the others. `acquire` → `{ fence }`, which must grow,
 * or `false`; `write` { fence, value } → `false` if it was refused; `read` → value; `release` { fence } → `false` if it
 * was over. With `ttl` (milliseconds) nobody is granted it sooner than that, unless it was released.
 */
export function fencedRegister(
  options: { readonly initial?: unknown; readonly ttl?: number } = {},
): Model<FencedState> {
  const ttl = options.ttl === undefined ? 0 : options.ttl * 1e6;
  return {
    name: "fenced register",
    anyProcess: true,
    initial: () => ({ fence: 0, open: false, since: 0, value: textOf(options.initial ?? null) }),
    step(state, operation) {
      const { call, input, output, start, end } = operation;
      const newest = state.open && state.fence === field(input, "fence");
      switch (call) {
        case "read":
          return isUnknown(operation) || textOf(output ?? null) === state.value ? [state] : [];
        case "acquire": {
          // It may be refused for many reasons: another one stands in line, or has just gone.
          if (output === false) return [state];
          const fence = nextFence(operation, state.fence);
          if (fence === undefined || (state.open && end < state.since + ttl)) return [];
          return [{ ...state, fence, open: true, since: ttl === 0 ? 0 : start }];
        }
        case "write": {
          // One whose time is over may be refused, or not, as long as there is no other.
          if (output === false) return newest && end < state.since + ttl ? [] : [state];
          const { value } = input as { readonly value?: unknown };
          return newest ? [{ ...state, value: textOf(value ?? null) }] : [];
        }
        case "release":
          if (output === false) return [state];
          return newest ? [{ ...state, open: false }] : [];
        default:
          throw unheardOf("fencedRegister", operation, "acquire, write, read and release");
      }
    },
    key: ({ fence, open, since, value }) => `${fence}|${open}|${since}|${value}`,
    show: ({ fence, open, value }) =>
      `the value is ${value}${fenceText(fence)}${fence > 0 && !open ? ", released" : ""}`,
    effect: ({ call, outcome, output }) =>
      call === "read" || (outcome === "returned" && output === false) ? "read" : undefined,
  };
}

interface Item {
  readonly value: string;
  readonly start: number;
  readonly end: number;
  readonly text: string;
}

type Items = readonly Item[];

export interface QueueState {
  readonly items: Items;
  /** Values that are known to be got by somebody, as often as they were brought: nobody else has got them. */
  readonly claimed: ReadonlySet<string>;
}

function claimed(operations: readonly Operation[]): Set<string> {
  const left = new Map<string, number>();
  const count = (value: unknown, by: number) => left.set(textOf(value), (left.get(textOf(value)) ?? 0) + by);
  for (const { call, input, output, outcome } of operations) {
    if (call === "enqueue" && outcome !== "failed") count(input, 1);
    if (call === "dequeue" && outcome === "returned") count(output, -1);
  }
  return new Set([...left].filter(([, n]) => n <= 0).map(([value]) => value));
}

/**
 * Items are kept with the times of the calls that brought them, and not in an order: of two that were brought at the same
 * time either may be the first, until one is taken. So the orders that are possible need not be tried one by one.
 * An item may leave if none is there that was certainly before it. That is exactly FIFO: whatever order the items leave
 * in agrees with the calls, and so do points in time for these.
 */
function items(name: string, inOrder: boolean): Model<QueueState> {
  const mayLeave = (item: Item, all: Items): boolean => {
    // They are in the order of their start: whoever began later cannot have ended before.
    for (const other of all) {
      if (!inOrder || other.start >= item.start) break;
      if (other.end < item.start) return false;
    }
    return true;
  };
  const removing = (state: QueueState, fits: (item: Item) => boolean): QueueState[] =>
    state.items.flatMap((item, i) =>
      fits(item) && mayLeave(item, state.items) ? [{ ...state, items: state.items.toSpliced(i, 1) }] : [],
    );
  return {
    name,
    anyProcess: true,
    initial: (_, operations) => ({ items: [], claimed: claimed(operations) }),
    step(state, operation) {
      const { call, input, output, start } = operation;
      if (call === "enqueue") {
        const value = textOf(input);
        const end = isUnknown(operation) ? Infinity : operation.end;
        const item = { value, start, end, text: `${value}@${start}` };
        const at = state.items.findLastIndex(
          (other) => other.start < start || (other.start === start && other.value <= value),
        );
        return [{ ...state, items: state.items.toSpliced(at + 1, 0, item) }];
      }
      if (call !== "dequeue") throw unheardOf(name, operation, "enqueue and dequeue");
      if (isUnknown(operation)) return removing(state, ({ value }) => !state.claimed.has(value));
      if (foundNothing(operation)) return state.items.length === 0 ? [state] : [];
      const wanted = textOf(output);
      return removing(state, ({ value }) => value === wanted);
    },
    key: (state) => state.items.map(({ text }) => text).join("\n"),
    show({ items }) {
      const shown = items.slice(0, 8).map(({ value }) => value);
      return `[${shown.join(", ")}${items.length > 8 ? `, and ${items.length - 8} more` : ""}]`;
    },
    effect: (operation) => (foundNothing(operation) ? "read" : undefined),
    decide: inOrder ? decideQueue : decideBag,
    mayWait(first, second) {
      if (first.call === "enqueue" && second.call === "enqueue") return true;
      const takes = [first, second].filter(({ call }) => call === "dequeue");
      if (takes.some((take) => isUnknown(take) || foundNothing(take))) return false;
      if (first.call === second.call) return !inOrder && textOf(first.output) !== textOf(second.output);
      const [bring, take] = first.call === "enqueue" ? [first, second] : [second, first];
      return textOf(bring.input) !== textOf(take.output);
    },
  };
}

/** First in, first out. `enqueue` value; `dequeue` → value, or null if there is none. */
export function queue(): Model<QueueState> {
  return items("queue", true);
}

/** The same in no order: every item once. */
export function bag(): Model<QueueState> {
  return items("bag", false);
}

export interface OnceState {
  readonly done: boolean;
  /** Undefined: nobody has heard it yet. */
  readonly value: string | undefined;
}

/**
 * An effect that happens once, for each key. `run` → `{ value, replayed }`: the first one decides the value, all others
 * get the same; `effects` → how often it has happened.
 */
export function once(): Model<OnceState> {
  const replays = ({ call, output }: Operation) =>
    call === "run" && (output as { readonly replayed?: unknown } | undefined)?.replayed === true;
  return {
    name: "once",
    anyProcess: true,
    initial: () => ({ done: false, value: undefined }),
    step(state, operation) {
      const { call, output } = operation;
      if (call === "effects") return isUnknown(operation) || output === Number(state.done) ? [state] : [];
      if (call !== "run") throw unheardOf("once", operation, "run and effects");
      if (isUnknown(operation)) return [{ done: true, value: state.value }];
      const { value, replayed } = output as { readonly value?: unknown; readonly replayed?: unknown };
      if (typeof replayed === "boolean" && replayed !== state.done) return [];
      if (state.value !== undefined && state.value !== textOf(value)) return [];
      return [{ done: true, value: textOf(value) }];
    },
    key: ({ done, value }) => `${done}|${value}`,
    show: ({ done, value }) =>
      done ? `it has happened, with ${value ?? "a result that nobody knows"}` : "it has not happened",
    effect: ({ call }) => (call === "effects" ? "read" : undefined),
    mayWait: (first, second) => replays(first) && (replays(second) || isUnknown(second)),
  };
}

export interface VersionedState {
  readonly version: number;
  readonly value: string;
}

/**
 * A row with a version. `read` → `{ version, value }`; `update` `{ expected, value }` → the new version, which is one
 * more, or `true`; `false` if the version was another one.
 */
export function versioned(
  options: { readonly initial?: unknown; readonly version?: number } = {},
): Model<VersionedState> {
  return {
    name: "versioned",
    anyProcess: true,
    initial: () => ({ version: options.version ?? 0, value: textOf(options.initial ?? null) }),
    step(state, operation) {
      const { call, input, output } = operation;
      if (call === "read") {
        const seen = (output ?? {}) as { readonly version?: unknown; readonly value?: unknown };
        const same = seen.version === state.version && textOf(seen.value ?? null) === state.value;
        return isUnknown(operation) || same ? [state] : [];
      }
      if (call !== "update") throw unheardOf("versioned", operation, "read and update { expected, value }");
      const { expected, value } = input as { readonly expected: unknown; readonly value?: unknown };
      const fits = expected === state.version;
      const next = { version: state.version + 1, value: textOf(value ?? null) };
      if (isUnknown(operation)) return fits ? [next] : [];
      if (output === false) return fits ? [] : [state];
      return fits && (output === true || output === next.version) ? [next] : [];
    },
    key: ({ version, value }) => `${version}|${value}`,
    show: ({ version, value }) => `version ${version}, the value is ${value}`,
    effect: ({ call, outcome, output }) =>
      call === "read" || (outcome === "returned" && output === false) ? "read" : undefined,
  };
}
