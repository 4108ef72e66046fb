/** Histories of objects that do not exist, and a check of them that is too simple to be wrong. */
import { isDeepStrictEqual } from "node:util";
import type { Operation } from "holdfast/testing";

export type Made = Pick<Operation, "process" | "call" | "start" | "end"> &
  Partial<Pick<Operation, "key" | "input" | "output" | "outcome">>;

export function made(operation: Made): Operation {
  return { key: "k", input: undefined, output: undefined, outcome: "returned", ...operation };
}

/** One that was called, and never came back. */
export function lost(process: string, start: number, call: string, input?: unknown): Operation {
  return made({ process, call, input, start, end: Infinity, outcome: "unknown" });
}

/** What really happens if `call` is made; `process` is who calls. */
export interface Thing {
  apply(call: string, input: unknown, process: string): unknown;
}

export interface Workload {
  readonly name: string;
  make(): Thing;
  /** The next call of a process; `undefined` if it has none now. */
  next(random: () => number, process: string, n: number): { call: string; input?: unknown } | undefined;
}

export interface Simulated {
  readonly operations: number;
  readonly processes: number;
  readonly random: () => number;
  /** How many of a thousand calls are never heard of again. */
  readonly lost?: number;
}

interface Open {
  readonly process: number;
  readonly call: string;
  readonly input: unknown;
  readonly start: number;
  applied: boolean;
  output: unknown;
}

/** Each call takes effect at one moment between its begin and its end. */
export function simulate(
  workload: Workload,
  { operations, processes, random, lost: share = 0 }: Simulated,
): Operation[] {
  const thing = workload.make();
  const open = new Map<number, Open>();
  const done: Operation[] = [];
  const lives = Array.from({ length: processes }, () => 0);
  const name = (process: number) => `p${process}${lives[process] ? `.${lives[process]}` : ""}`;
  let time = 0;
  let begun = 0;
  while (done.length < operations) {
    const process = Math.floor(random() * processes);
    const mine = open.get(process);
    time++;
    if (!mine) {
      if (begun >= operations) {
        if (open.size === 0) break;
        continue;
      }
      const next = workload.next(random, name(process), begun);
      if (!next) continue;
      begun++;
      open.set(process, {
        process,
        call: next.call,
        input: next.input,
        start: time,
        applied: false,
        output: undefined,
      });
    } else if (random() * 1000 < share) {
      // Killed, before or after it took effect; whoever comes next is somebody else.
      done.push(lost(name(process), mine.start, mine.call, mine.input));
      lives[process] = (lives[process] ?? 0) + 1;
      open.delete(process);
    } else if (!mine.applied) {
      mine.output = thing.apply(mine.call, mine.input, name(process));
      mine.applied = true;
    } else {
      const { call, input, output, start } = mine;
      done.push(made({ process: name(process), call, input, output, start, end: time }));
      open.delete(process);
    }
  }
  return done.toSorted((a, b) => a.start - b.start);
}

function pick<T>(random: () => number, list: readonly T[]): T {
  return list[Math.floor(random() * list.length)] as T;
}

/** `values`: of how many there are to choose; few make for histories with many explanations. */
export function registerOf(values = Infinity): Workload {
  return {
    name: "register",
    make() {
      let value: unknown = null;
      return {
        apply(call, input) {
          if (call === "read") return value;
          if (call === "write") {
            value = input;
            return undefined;
          }
          const { from, to } = input as { from: unknown; to: unknown };
          const fits = isDeepStrictEqual(value, from);
          if (fits) value = to;
          return fits;
        },
      };
    },
    next(random, _, n) {
      const value = () => (values === Infinity ? n : Math.floor(random() * values));
      const chance = random();
      if (chance < 0.45) return { call: "read" };
      if (chance < 0.85) return { call: "write", input: value() };
      const from = values === Infinity ? n - Math.floor(random() * 4) : Math.floor(random() * values);
      return { call: "compareAndSet", input: { from, to: value() } };
    },
  };
}

export function counterOf(limit: number): Workload {
  return {
    name: "counter",
    make() {
      let used = 0;
      const move = (by: number) => {
        const fits = used + by <= limit && used + by >= 0;
        if (fits) used += by;
        return fits;
      };
      return {
        apply(call, input) {
          if (call === "read") return used;
          return move(call === "take" ? (input as number) : -(input as number));
        },
      };
    },
    next(random) {
      const chance = random();
      if (chance < 0.15) return { call: "read" };
      const n = 1 + Math.floor(random() * 3);
      return { call: chance < 0.65 ? "take" : "refund", input: n };
    },
  };
}

export function lockOf(): Workload {
  return {
    name: "lock",
    make() {
      let owner: string | undefined;
      let fence = 0;
      return {
        apply(call, _, process) {
          if (call === "release") {
            if (owner !== process) return false;
            owner = undefined;
            return true;
          }
          if (owner !== undefined) return false;
          owner = process;
          return { fence: ++fence };
        },
      };
    },
    next: (random) => ({ call: random() < 0.5 ? "tryAcquire" : "release" }),
  };
}

export function queueOf(fifo = true, values = Infinity): Workload {
  return {
    name: fifo ? "queue" : "bag",
    make() {
      const items: unknown[] = [];
      return {
        apply(call, input) {
          if (call === "enqueue") {
            items.push(input);
            return undefined;
          }
          const at = fifo ? 0 : Math.floor(items.length / 2);
          return items.length === 0 ? null : items.splice(at, 1)[0];
        },
      };
    },
    next: (random, _, n) =>
      random() < 0.51
        ? { call: "enqueue", input: values === Infinity ? n : Math.floor(random() * values) }
        : { call: "dequeue" },
  };
}

export function onceOf(): Workload {
  return {
    name: "once",
    make() {
      let value: unknown;
      let calls = 0;
      return {
        apply(call) {
          if (call === "effects") return value === undefined ? 0 : 1;
          const replayed = value !== undefined;
          value ??= ++calls;
          return { value, replayed };
        },
      };
    },
    next: (random) => ({ call: random() < 0.7 ? "run" : "effects" }),
  };
}

export function versionedOf(values = Infinity): Workload {
  let newest = 0;
  return {
    name: "versioned",
    make() {
      let version = 0;
      let value: unknown = null;
      newest = 0;
      return {
        apply(call, input) {
          if (call === "read") return { version, value };
          const wanted = input as { expected: number; value: unknown };
          if (wanted.expected !== version) return false;
          value = wanted.value;
          newest = ++version;
          return version;
        },
      };
    },
    next(random, _, n) {
      if (random() < 0.4) return { call: "read" };
      const value = values === Infinity ? n : Math.floor(random() * values);
      return { call: "update", input: { expected: Math.max(0, newest - pick(random, [0, 0, 0, 1])), value } };
    },
  };
}

/**
 * Tries every order. `outcomes`: all that a call may have come to in a state (a copy of which is passed, and may be
 * changed): the output, and the state after it.
 */
export function bruteForce<S>(
  operations: readonly Operation[],
  initial: S,
  outcomes: (state: S, operation: Operation) => readonly (readonly [output: unknown, next: S])[],
): boolean {
  const left = operations.filter(({ outcome }) => outcome !== "failed");
  const search = (state: S, rest: readonly Operation[]): boolean => {
    if (rest.every(({ outcome }) => outcome === "unknown")) return true;
    const firstEnd = Math.min(...rest.map(({ end }) => end));
    return rest.some((operation) => {
      // Somebody was done before this one was called.
      if (operation.start > firstEnd) return false;
      const others = rest.filter((other) => other !== operation);
      return outcomes(structuredClone(state), operation).some(
        ([output, next]) =>
          (operation.outcome === "unknown" || isDeepStrictEqual(output, operation.output)) &&
          search(next, others),
      );
    });
  };
  return search(initial, left);
}
