/** What a history must be to be believed: by hand, and against a check that tries every order. */
import { appendFileSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { CommitUnknownError, HoldfastError } from "holdfast";
import {
  type History,
  type Model,
  type Operation,
  checkHistory,
  expectLinearizable,
  models,
  readHistory,
  recorder,
  sequential,
} from "holdfast/testing";
import { describe, expect, inject, test } from "vitest";
import {
  type Workload,
  bruteForce,
  counterOf,
  lockOf,
  lost,
  made,
  onceOf,
  queueOf,
  registerOf,
  simulate,
  versionedOf,
} from "./harness/histories.ts";
import { random } from "./harness/random.ts";

const seed = inject("seed");

/** `p` did `call input → output` from `start` to `end`. */
function did(
  process: string,
  start: number,
  end: number,
  call: string,
  input?: unknown,
  output?: unknown,
): Operation {
  return made({ process, start, end, call, input, output });
}

interface Pair {
  readonly kind: string;
  readonly model: Model<any>;
  readonly bad: History;
  /** Almost the same, and right. */
  readonly good: History;
}

const { register, counter, lock, fencedRegister, queue, bag, once, versioned } = models;

const pairs: Pair[] = [
  {
    kind: "a stale read",
    model: register(),
    bad: [did("a", 1, 2, "write", 1), did("a", 3, 4, "write", 2), did("b", 5, 6, "read", undefined, 1)],
    good: [did("a", 1, 2, "write", 1), did("a", 3, 6, "write", 2), did("b", 5, 7, "read", undefined, 1)],
  },
  {
    kind: "a read of a value that nobody wrote",
    model: register(),
    bad: [did("a", 1, 2, "write", 1), did("b", 3, 4, "read", undefined, 7)],
    good: [did("a", 1, 2, "write", 1), lost("c", 2, "write", 7), did("b", 3, 4, "read", undefined, 7)],
  },
  {
    kind: "a write that is seen before its call",
    model: register(),
    bad: [did("b", 1, 2, "read", undefined, 5), did("a", 3, 4, "write", 5)],
    good: [did("b", 1, 4, "read", undefined, 5), did("a", 3, 6, "write", 5)],
  },
  {
    kind: "reads that go back and forth between processes",
    model: register({ initial: 0 }),
    bad: [
      did("w", 1, 20, "write", 1),
      did("a", 2, 3, "read", undefined, 1),
      did("b", 4, 5, "read", undefined, 0),
    ],
    good: [
      did("w", 1, 20, "write", 1),
      did("a", 2, 5, "read", undefined, 1),
      did("b", 4, 6, "read", undefined, 0),
    ],
  },
  {
    kind: "two that compared and set the same value",
    model: register({ initial: 0 }),
    bad: [
      did("a", 1, 5, "compareAndSet", { from: 0, to: 1 }, true),
      did("b", 2, 4, "compareAndSet", { from: 0, to: 2 }, true),
    ],
    good: [
      did("a", 1, 5, "compareAndSet", { from: 0, to: 1 }, true),
      did("b", 2, 4, "compareAndSet", { from: 0, to: 2 }, false),
    ],
  },
  {
    kind: "a lost update",
    model: counter(),
    bad: [did("a", 1, 4, "take", 1, 1), did("b", 2, 5, "take", 1, 1)],
    good: [did("a", 1, 4, "take", 1, 2), did("b", 2, 5, "take", 1, 1)],
  },
  {
    kind: "101 of 100",
    model: counter({ limit: 100 }),
    bad: Array.from({ length: 101 }, (_, i) => did(`p${i % 5}`, 10 * i, 10 * i + 35, "take", 1, true)),
    good: Array.from({ length: 101 }, (_, i) => did(`p${i % 5}`, 10 * i, 10 * i + 35, "take", 1, i !== 98)),
  },
  {
    kind: "refused though there was room",
    model: counter({ limit: 3 }),
    bad: [did("a", 1, 2, "take", 2, true), did("b", 3, 4, "take", 1, false)],
    good: [did("a", 1, 2, "take", 2, true), lost("c", 1, "take", 1), did("b", 3, 4, "take", 1, false)],
  },
  {
    kind: "a refund that came twice",
    model: counter({ limit: 3 }),
    bad: [
      did("a", 1, 2, "take", 2, true),
      did("a", 3, 4, "refund", 2, true),
      did("b", 3, 5, "refund", 2, true),
    ],
    good: [
      did("a", 1, 2, "take", 2, true),
      did("a", 3, 4, "refund", 2, true),
      did("b", 3, 5, "refund", 2, false),
    ],
  },
  {
    kind: "two holders of a lock",
    model: lock(),
    bad: [did("a", 1, 2, "acquire"), did("b", 3, 4, "acquire"), did("a", 5, 6, "release")],
    good: [did("a", 1, 2, "acquire"), did("b", 3, 6, "acquire"), did("a", 4, 7, "release")],
  },
  {
    kind: "a release by one who is not the holder",
    model: lock(),
    bad: [did("a", 1, 2, "acquire"), did("b", 3, 4, "release", undefined, true)],
    good: [did("a", 1, 2, "acquire"), did("b", 3, 4, "release", undefined, false)],
  },
  {
    kind: "a lock that was said to be taken, and was free",
    model: lock(),
    bad: [
      did("a", 1, 2, "acquire"),
      did("a", 3, 4, "release"),
      did("b", 5, 6, "tryAcquire", undefined, false),
    ],
    good: [
      did("a", 1, 2, "acquire"),
      did("a", 3, 6, "release"),
      did("b", 5, 7, "tryAcquire", undefined, false),
    ],
  },
  {
    kind: "a fence that goes back",
    model: lock(),
    bad: [
      did("a", 1, 2, "acquire", undefined, { fence: 7 }),
      did("a", 3, 4, "release"),
      did("b", 5, 6, "acquire", undefined, { fence: 6 }),
    ],
    good: [
      did("a", 1, 2, "acquire", undefined, { fence: 7 }),
      did("a", 3, 4, "release"),
      did("b", 5, 6, "acquire", undefined, { fence: 9 }),
    ],
  },
  {
    kind: "a lease that was given before its time",
    model: lock({ ttl: 1 }),
    bad: [did("a", 0, 10, "acquire"), did("b", 20, 900_000, "acquire")],
    good: [did("a", 0, 10, "acquire"), did("b", 20, 1_000_000, "acquire")],
  },
  {
    kind: "a late write under an old fence",
    model: fencedRegister(),
    bad: [
      did("a", 1, 2, "acquire", undefined, { fence: 1 }),
      did("b", 3, 4, "acquire", undefined, { fence: 2 }),
      did("a", 5, 6, "write", { fence: 1, value: "late" }),
    ],
    good: [
      did("a", 1, 2, "acquire", undefined, { fence: 1 }),
      did("b", 3, 4, "acquire", undefined, { fence: 2 }),
      did("a", 5, 6, "write", { fence: 1, value: "late" }, false),
      did("b", 7, 8, "read", undefined, null),
    ],
  },
  {
    kind: "an item that came out twice",
    model: queue(),
    bad: [
      did("a", 1, 2, "enqueue", "x"),
      did("b", 3, 4, "dequeue", undefined, "x"),
      did("c", 3, 5, "dequeue", undefined, "x"),
    ],
    good: [
      did("a", 1, 2, "enqueue", "x"),
      did("b", 3, 4, "dequeue", undefined, "x"),
      did("c", 3, 5, "dequeue", undefined, null),
    ],
  },
  {
    kind: "items out of order",
    model: queue(),
    bad: [
      did("a", 1, 2, "enqueue", "x"),
      did("a", 3, 4, "enqueue", "y"),
      did("b", 5, 6, "dequeue", undefined, "y"),
    ],
    good: [
      did("a", 1, 4, "enqueue", "x"),
      did("c", 3, 4, "enqueue", "y"),
      did("b", 5, 6, "dequeue", undefined, "y"),
    ],
  },
  {
    kind: "an item that was lost",
    model: queue(),
    bad: [did("a", 1, 2, "enqueue", "x"), did("b", 3, 4, "dequeue", undefined, null)],
    good: [
      did("a", 1, 2, "enqueue", "x"),
      lost("c", 1, "dequeue"),
      did("b", 3, 4, "dequeue", undefined, null),
    ],
  },
  {
    kind: "an item of a bag that came out twice",
    model: bag(),
    bad: [
      did("a", 1, 2, "enqueue", "x"),
      did("a", 3, 4, "enqueue", "y"),
      did("b", 5, 6, "dequeue", undefined, "y"),
      did("b", 7, 8, "dequeue", undefined, "y"),
    ],
    good: [
      did("a", 1, 2, "enqueue", "x"),
      did("a", 3, 4, "enqueue", "y"),
      did("b", 5, 6, "dequeue", undefined, "y"),
      did("b", 7, 8, "dequeue", undefined, "x"),
    ],
  },
  {
    kind: "an effect that happened twice",
    model: once(),
    bad: [
      did("a", 1, 4, "run", undefined, { value: 1, replayed: false }),
      did("b", 2, 5, "run", undefined, { value: 2, replayed: false }),
    ],
    good: [
      did("a", 1, 4, "run", undefined, { value: 1, replayed: false }),
      did("b", 2, 5, "run", undefined, { value: 1, replayed: true }),
    ],
  },
  {
    kind: "a replay with another answer",
    model: once(),
    bad: [
      did("a", 1, 2, "run", undefined, { value: 1, replayed: false }),
      did("b", 3, 4, "run", undefined, { value: 2, replayed: true }),
    ],
    good: [
      lost("a", 1, "run"),
      did("b", 3, 4, "run", undefined, { value: 2, replayed: true }),
      did("b", 5, 6, "effects", undefined, 1),
    ],
  },
  {
    kind: "a conflict that was told, and the effect is there",
    model: versioned({ initial: "old" }),
    bad: [
      did("a", 1, 2, "update", { expected: 0, value: "new" }, false),
      did("b", 3, 4, "read", undefined, { version: 1, value: "new" }),
    ],
    good: [
      did("c", 0, 2, "update", { expected: 0, value: "new" }, 1),
      did("a", 1, 2, "update", { expected: 0, value: "new" }, false),
      did("b", 3, 4, "read", undefined, { version: 1, value: "new" }),
    ],
  },
  {
    kind: "a version that was used twice",
    model: versioned(),
    bad: [
      did("a", 1, 4, "update", { expected: 0, value: "a" }, 1),
      did("b", 2, 5, "update", { expected: 0, value: "b" }, 1),
    ],
    good: [
      did("a", 1, 4, "update", { expected: 0, value: "a" }, 1),
      did("b", 2, 5, "update", { expected: 1, value: "b" }, 2),
    ],
  },
];

describe("by hand", () => {
  test.each(pairs)("$kind is rejected", ({ model, bad }) => {
    const report = checkHistory(bad, model);
    expect(report.verdict).toBe("violation");
    expect(report.counterexample?.operations.length).toBeLessThanOrEqual(8);
    expect(() => expectLinearizable(bad, model)).toThrow("cannot be explained");
  });

  test.each(pairs)("$kind: what is almost the same, and right, is accepted", ({ model, good }) => {
    expect(checkHistory(good, model)).toMatchObject({ verdict: "ok" });
  });

  test("keys have nothing to do with each other", () => {
    const history = [
      { ...did("a", 1, 2, "write", 1), key: "x" },
      { ...did("b", 3, 4, "read", undefined, null), key: "y" },
    ];
    expect(expectLinearizable(history, register())).toMatchObject({ keys: 2, operations: 2 });
  });

  test("what failed did nothing", () => {
    const failed: Operation = { ...did("a", 1, 2, "write", 1), outcome: "failed" };
    expect(checkHistory([failed, did("b", 3, 4, "read", undefined, null)], register()).verdict).toBe("ok");
    expect(checkHistory([failed, did("b", 3, 4, "read", undefined, 1)], register()).verdict).toBe(
      "violation",
    );
  });

  test("a model of one's own", () => {
    const stack = sequential<readonly number[], number | undefined, number | null>({
      name: "stack",
      initial: () => [],
      apply: (state, call, input) =>
        call === "push" ? [[...state, input ?? 0], null] : [state.slice(0, -1), state.at(-1) ?? null],
    });
    const pushed = [did("a", 1, 2, "push", 1, null), did("a", 3, 4, "push", 2, null)];
    expect(checkHistory([...pushed, did("b", 5, 6, "pop", undefined, 2)], stack).verdict).toBe("ok");
    expect(checkHistory([...pushed, did("b", 5, 6, "pop", undefined, 1)], stack).verdict).toBe("violation");
    expect(
      checkHistory([...pushed, lost("c", 1, "pop"), did("b", 5, 6, "pop", undefined, 1)], stack).verdict,
    ).toBe("ok");
  });

  test("a call that the model does not know is told", () => {
    expect(() => checkHistory([did("a", 1, 2, "increment")], register())).toThrow('there is no "increment"');
  });
});

describe("the counter-example", () => {
  test("is drawn", () => {
    const history = [
      did("p1", 1, 2, "write", 4),
      did("p2", 1, 3, "read", undefined, null),
      did("p1", 4, 9, "write", 5),
      did("p3", 5, 6, "read", undefined, 4),
      did("p2", 7, 8, "read", undefined, 3),
    ];
    const { counterexample } = checkHistory(history, register());
    expect(counterexample?.text).toBe(
      [
        'No order of the operations on "k" explains this. At first: the value is null.',
        "",
        "p1  ├─ write 4 ─┤ ├─ write 5 ────…",
        "p2                  ├─ read → 3 ─┤ ✗",
        "",
        "read → 3 by p2 cannot be explained: until it came back, all that was possible is: the value is 4 or the value is 5.",
      ].join("\n"),
    );
  });

  test("of 3,000 operations is a handful", () => {
    const history = simulate(registerOf(), { operations: 3000, processes: 5, random: random(seed) });
    const at = history.findLastIndex(({ call, start }) => call === "read" && start > 1000);
    const bad = history.with(at, { ...(history[at] as Operation), output: "nobody wrote this" });
    const { counterexample } = checkHistory(bad, register());
    expect(counterexample?.culprit).toBe(bad[at]);
    expect(counterexample?.operations.length, `seed ${seed}`).toBeLessThanOrEqual(20);
    expect(counterexample?.earlier).toBeGreaterThan(1000);
  });
});

interface Kind {
  readonly workload: Workload;
  readonly model: Model<any>;
  readonly initial: unknown;
  /** What may come of a call, told in the simplest way. */
  readonly outcomes: (state: any, operation: Operation) => readonly (readonly [unknown, unknown])[];
}

const kinds: Kind[] = [
  {
    workload: registerOf(3),
    model: register(),
    initial: null,
    outcomes(state, { call, input }) {
      if (call === "read") return [[state, state]];
      if (call === "write") return [[undefined, input]];
      const { from, to } = input as { from: unknown; to: unknown };
      return [from === state ? [true, to] : [false, state]];
    },
  },
  {
    workload: counterOf(4),
    model: counter({ limit: 4 }),
    initial: 0,
    outcomes(state: number, { call, input }) {
      if (call === "read") return [[state, state]];
      const next = call === "take" ? state + (input as number) : state - (input as number);
      return [next >= 0 && next <= 4 ? [true, next] : [false, state]];
    },
  },
  {
    workload: lockOf(),
    model: lock(),
    initial: { owner: null, fence: 0 },
    outcomes(state: { owner: string | null; fence: number }, { call, process, outcome, output }) {
      if (call === "release")
        return [state.owner === process ? [true, { ...state, owner: null }] : [false, state]];
      if (state.owner !== null) return [[false, state]];
      // Any that is larger; nobody knows that of a lost one.
      const given = (output as { fence?: number } | undefined)?.fence ?? 0;
      const fence = outcome === "unknown" ? state.fence : Math.max(given, state.fence + 1);
      return [[{ fence }, { owner: process, fence }]];
    },
  },
  {
    workload: queueOf(true, 3),
    model: queue(),
    initial: [],
    outcomes: (state: unknown[], { call, input }) =>
      call === "enqueue" ? [[undefined, [...state, input]]] : [[state[0] ?? null, state.slice(1)]],
  },
  {
    workload: queueOf(true),
    model: queue(),
    initial: [],
    outcomes: (state: unknown[], { call, input }) =>
      call === "enqueue" ? [[undefined, [...state, input]]] : [[state[0] ?? null, state.slice(1)]],
  },
  {
    workload: queueOf(false, 3),
    model: bag(),
    initial: [],
    outcomes(state: unknown[], { call, input }) {
      if (call === "enqueue") return [[undefined, [...state, input]]];
      return state.length === 0 ? [[null, state]] : state.map((item, i) => [item, state.toSpliced(i, 1)]);
    },
  },
  {
    workload: onceOf(),
    model: once(),
    initial: null,
    outcomes(state: { value: unknown } | null, { call, outcome, output }) {
      if (call === "effects") return [[state === null ? 0 : 1, state]];
      if (state !== null) return [[{ ...state, replayed: true }, state]];
      // The first one decides; of a lost one, any of those that may be told later.
      const values = outcome === "unknown" ? [1, 2, 3, 4, 5, 6, 7] : [(output as { value: unknown }).value];
      return values.map((value) => [{ value, replayed: false }, { value }]);
    },
  },
  {
    workload: versionedOf(3),
    model: versioned(),
    initial: { version: 0, value: null },
    outcomes(state: { version: number; value: unknown }, { call, input }) {
      if (call === "read") return [[state, state]];
      const { expected, value } = input as { expected: number; value: unknown };
      if (expected !== state.version) return [[false, state]];
      return [[state.version + 1, { version: state.version + 1, value }]];
    },
  },
];

/** Another result, another time, or one that is not there: mostly wrong then, not always. */
function changed(history: History, next: () => number): History {
  const at = Math.floor(next() * history.length);
  const one = history[at] as Operation;
  const other = history[Math.floor(next() * history.length)] as Operation;
  switch (Math.floor(next() * 4)) {
    case 0: {
      const same = history.filter(({ call, outcome }) => call === one.call && outcome === "returned");
      const from = same[Math.floor(next() * same.length)];
      return from && one.outcome === "returned" ? history.with(at, { ...one, output: from.output }) : history;
    }
    case 1: {
      const length = one.end - one.start;
      return history.with(at, {
        ...one,
        start: other.start + 0.5,
        end: other.start + 0.5 + Math.max(1, length / 2),
      });
    }
    case 2:
      return history.toSpliced(at, 1);
    default:
      return one.outcome === "returned" ? history.with(at, { ...one, end: one.start + 0.25 }) : history;
  }
}

describe(`against a check that tries every order (seed ${seed})`, () => {
  test.each(kinds)("the verdicts on small histories are the same: $workload.name", (kind) => {
    const { workload, model, initial, outcomes } = kind;
    const next = random(seed);
    const verdicts = { ok: 0, violation: 0, unknown: 0 };
    for (let i = 0; i < 1500; i++) {
      const size = { operations: 3 + Math.floor(next() * 5), processes: 2 + Math.floor(next() * 3) };
      let history: History = simulate(workload, { ...size, random: next, lost: i % 3 === 0 ? 120 : 0 });
      expect(checkHistory(history, model).verdict, shownHistory(history)).toBe("ok");
      for (let n = Math.floor(next() * 4); n > 0 && history.length > 1; n--) history = changed(history, next);
      const { verdict } = checkHistory(history, model);
      const expected = bruteForce(history, initial, outcomes) ? "ok" : "violation";
      expect(verdict, `seed ${seed}, round ${i}: ${shownHistory(history)}`).toBe(expected);
      verdicts[verdict]++;
    }
    expect(verdicts.violation).toBeGreaterThan(100);
    expect(verdicts.ok).toBeGreaterThan(100);
  });

  // Few values, and many whose outcome nobody knows: what is decided without trying orders.
  const items = kinds.filter(({ model }) => model.decide);

  test.each(items)("and where much is unknown: $workload.name, $model.name", (kind) => {
    const { workload, model, initial, outcomes } = kind;
    const next = random(seed + 3);
    const verdicts = { ok: 0, violation: 0, unknown: 0 };
    for (let i = 0; i < 1500; i++) {
      const size = { operations: 4 + Math.floor(next() * 5), processes: 2 + Math.floor(next() * 3) };
      let history: History = simulate(workload, { ...size, random: next, lost: (i % 4) * 120 });
      for (let n = Math.floor(next() * 3); n > 0 && history.length > 1; n--) history = changed(history, next);
      const { verdict, counterexample } = checkHistory(history, model);
      const expected = bruteForce(history, initial, outcomes) ? "ok" : "violation";
      expect(verdict, `seed ${seed}, round ${i}: ${shownHistory(history)}`).toBe(expected);
      verdicts[verdict]++;
      if (!counterexample || counterexample.earlier > 0) continue;
      // What is shown has no explanation by itself: those that were still open may have done what they say, or nothing.
      const { operations, culprit } = counterexample;
      const open = operations.filter(
        ({ start, end, outcome }) => start <= culprit.end && end > culprit.end && outcome === "returned",
      );
      for (let chosen = 0; chosen < 2 ** open.length; chosen++) {
        const some = operations.filter((each) => !open.includes(each) || chosen & (1 << open.indexOf(each)));
        expect(bruteForce(some, initial, outcomes), `${shownHistory(history)}${shownHistory(some)}`).toBe(
          false,
        );
      }
    }
    expect(verdicts.violation).toBeGreaterThan(30);
    expect(verdicts.ok).toBeGreaterThan(100);
  });

  // The same without what models say to make it faster: `step` alone must do.
  test.each(kinds)("and with `step` alone: $workload.name", ({ workload, model, initial, outcomes }) => {
    const next = random(seed + 1);
    const { name, anyProcess: _, effect: __, mayWait: ___, decide: ____, ...rest } = model;
    const bare = { ...rest, name };
    for (let i = 0; i < 300; i++) {
      const size = { operations: 3 + Math.floor(next() * 4), processes: 3 };
      let history: History = simulate(workload, { ...size, random: next, lost: i % 3 === 0 ? 120 : 0 });
      for (let n = Math.floor(next() * 4); n > 0 && history.length > 1; n--) history = changed(history, next);
      const expected = bruteForce(history, initial, outcomes) ? "ok" : "violation";
      expect(checkHistory(history, bare).verdict, `seed ${seed}, round ${i}: ${shownHistory(history)}`).toBe(
        expected,
      );
    }
  });

  test.each(kinds)("a counter-example is one: $workload.name", ({ workload, model, initial, outcomes }) => {
    const next = random(seed + 2);
    let seen = 0;
    for (let i = 0; i < 300; i++) {
      let history: History = simulate(workload, { operations: 7, processes: 3, random: next });
      for (let n = 3; n > 0; n--) history = changed(history, next);
      const { counterexample } = checkHistory(history, model);
      if (counterexample?.earlier !== 0) continue;
      seen++;
      // Those that were still open may have done what they say, or nothing.
      const { operations, culprit } = counterexample;
      const open = operations.filter(({ end }) => end > culprit.end);
      for (let chosen = 0; chosen < 2 ** open.length; chosen++) {
        const some = operations.filter((each) => !open.includes(each) || chosen & (1 << open.indexOf(each)));
        expect(bruteForce(some, initial, outcomes), shownHistory(operations)).toBe(false);
      }
    }
    expect(seen).toBeGreaterThan(10);
  });
});

function shownHistory(history: History): string {
  return `\n${history.map((each) => JSON.stringify(each)).join("\n")}\n`;
}

describe(`10,000 operations on one key, 10 at a time (seed ${seed})`, () => {
  const large: [Workload, Model<any>][] = [
    [registerOf(), register()],
    [counterOf(100), counter({ limit: 100 })],
    [lockOf(), lock()],
    [queueOf(), queue()],
    [queueOf(false), bag()],
    [onceOf(), once()],
    [versionedOf(), versioned()],
  ];

  test.each(large)("%o", (workload, model) => {
    const history = simulate(workload, { operations: 10_000, processes: 10, random: random(seed) });
    expect(checkHistory(history, model, { maxMs: 100_000 })).toMatchObject({
      verdict: "ok",
      operations: 10_000,
    });
  });

  const lies: [Workload, Model<any>, string, unknown][] = [
    [registerOf(), register(), "read", -1],
    [lockOf(), lock(), "tryAcquire", { fence: 1 }],
    [queueOf(), queue(), "dequeue", -1],
    [onceOf(), once(), "run", { value: -1, replayed: true }],
    [versionedOf(), versioned(), "read", { version: 1, value: -1 }],
  ];

  test.each(lies)("one lie among them is found: %o", (workload, model, call, output) => {
    const history = simulate(workload, { operations: 10_000, processes: 10, random: random(seed) });
    // The lie is told of a call that changed nothing: one that took the lock would leave those that it turned away,
    // and that ended before it, without their reason.
    const at = history.findLastIndex(
      (each) => each.call === call && each.start < 20_000 && (call !== "tryAcquire" || each.output === false),
    );
    const bad = history.with(at, { ...(history[at] as Operation), output });
    const { counterexample } = checkHistory(bad, model, { maxMs: 100_000 });
    // An item that nobody took may be in the way of another one before that.
    if (call !== "dequeue") expect(counterexample?.culprit).toBe(bad[at]);
    expect(counterexample?.operations.length, `seed ${seed}`).toBeLessThanOrEqual(60);
  });

  test("with too little time the verdict is unknown", () => {
    const history = simulate(counterOf(100), { operations: 10_000, processes: 10, random: random(seed) });
    const report = checkHistory(history, counter({ limit: 100 }), { maxMs: 0 });
    expect(report).toMatchObject({ verdict: "unknown", undecided: ["k"] });
    expect(() => expectLinearizable(history, counter({ limit: 100 }), { maxMs: 0 })).toThrow("not decided");
  });
});

/** Slightly wrong, late in the history. */
const broken: Record<string, (history: History, next: () => number) => History> = {
  "nothing is wrong": (history) => history,
  "one comes out twice"(history, next) {
    const [at, later] = twoTakes(history, next);
    return history.with(later, {
      ...(history[later] as Operation),
      output: (history[at] as Operation).output,
    });
  },
  "two change places"(history, next) {
    const [at, later] = twoTakes(history, next);
    const [one, two] = [history[at] as Operation, history[later] as Operation];
    return history.with(at, { ...one, output: two.output }).with(later, { ...two, output: one.output });
  },
  "one finds nothing"(history, next) {
    const [at] = twoTakes(history, next);
    return history.with(at, { ...(history[at] as Operation), output: null });
  },
  "one is not brought": (history) =>
    history.toSpliced(
      history.findIndex(({ call, start }) => call === "enqueue" && start > 4000),
      1,
    ),
  "one is not taken": (history, next) => history.toSpliced(twoTakes(history, next)[0], 1),
};

function twoTakes(history: History, next: () => number): [number, number] {
  const takes = history.flatMap(({ call, outcome, output, start }, i) =>
    call === "dequeue" && outcome === "returned" && output !== null && start > 4000 ? [i] : [],
  );
  const at = takes[Math.floor((next() * takes.length) / 2)] as number;
  const one = history[at] as Operation;
  const later = takes.find(
    (i) => (history[i] as Operation).start > one.end && (history[i] as Operation).output !== one.output,
  );
  return [at, later as number];
}

describe(`a queue whose values repeat, 2,000 operations of 10 callers (seed ${seed})`, () => {
  const cases = [2, 3, 5, 20, 200].flatMap((values) =>
    Object.keys(broken).map((what) => [values, what] as const),
  );

  test.each(cases)("%i values, %s: decided", (values, what) => {
    const next = random(seed);
    const right = simulate(queueOf(true, values), { operations: 2000, processes: 10, random: next });
    const history = broken[what]?.(right, next) ?? right;
    // It takes a second or two.
    const { verdict, counterexample } = checkHistory(history, queue(), { maxMs: 60_000 });
    expect(verdict, `seed ${seed}`).not.toBe("unknown");
    if (what === "nothing is wrong") expect(verdict).toBe("ok");
    // One that finds nothing, with dozens of items there, is wrong whatever their values are.
    if (what === "one finds nothing" && backlog(history) > 20) expect(verdict).toBe("violation");
    expect(counterexample === undefined).toBe(verdict === "ok");
  });

  test.each([2, 5, 20])("%i values, some calls unknown: that it is right is found", (values) => {
    const size = { operations: 2000, processes: 10, random: random(seed), lost: 4 };
    const history = simulate(queueOf(true, values), size);
    expect(checkHistory(history, queue(), { maxMs: 60_000 }).verdict, `seed ${seed}`).toBe("ok");
  });
});

/** How many items there were at least, from the time on at which `broken` breaks something. */
function backlog(history: History): number {
  let least = Infinity;
  let there = 0;
  const events = history
    .filter(({ outcome, output, call }) => outcome === "returned" && (call === "enqueue" || output !== null))
    .map(({ call, start, end }) => (call === "enqueue" ? { at: end, by: 1 } : { at: start, by: -1 }));
  for (const { at, by } of events.toSorted((a, b) => a.at - b.at)) {
    there += by;
    if (at > 4000) least = Math.min(least, there);
  }
  return least;
}

describe(`a bag of which an item came out twice, with unknown outcomes (seed ${seed})`, () => {
  test.each(Array.from({ length: 16 }, (_, i) => seed + i))("is refuted by counting: %i", (each) => {
    const next = random(each);
    const size = { operations: 2000, processes: 10, random: next, lost: 10 };
    const history = simulate(queueOf(false), size);
    expect(history.filter(({ outcome }) => outcome === "unknown").length).toBeGreaterThan(3);
    const takes = history.filter(({ call, output }) => call === "dequeue" && typeof output === "number");
    const one = takes[Math.floor(next() * takes.length * 0.9)] as Operation;
    const at = history.findIndex((other) => takes.includes(other) && other.start > one.end);
    const bad = history.with(at, { ...(history[at] as Operation), output: one.output });
    const { verdict, counterexample } = checkHistory(bad, bag());
    expect(verdict).toBe("violation");
    expect(counterexample?.operations.map(itemOf)).toEqual([one.output, one.output, one.output]);
    expect(counterexample?.text).toContain("whatever 1,9");
  });

  test("and so is one that found nothing, though something was there", () => {
    const history = [
      lost("x", 0, "dequeue"),
      did("a", 1, 2, "enqueue", "one"),
      did("a", 3, 4, "enqueue", "two"),
      did("b", 5, 6, "dequeue", undefined, null),
    ];
    expect(checkHistory(history, bag()).verdict).toBe("violation");
    expect(checkHistory([lost("y", 0, "dequeue"), ...history], bag()).verdict).toBe("ok");
    // Who took "two" is known: nobody else did.
    const later = did("c", 7, 8, "dequeue", undefined, "two");
    expect(checkHistory([lost("y", 0, "dequeue"), ...history, later], bag()).verdict).toBe("violation");
  });
});

const itemOf = ({ call, input, output }: Operation) => (call === "enqueue" ? input : output);

describe("the recorder", () => {
  test("keeps what was called, what came back and what did not", async () => {
    const record = recorder(undefined, { process: "p1" });
    expect(await record("x", "write", 1, async () => "done", { output: () => undefined })).toBe("done");
    await expect(
      record("x", "write", 2, () => Promise.reject(new HoldfastError("HF_LOCK_TIMEOUT", "in vain"))),
    ).rejects.toThrow("in vain");
    await expect(
      record("x", "write", 3, () => Promise.reject(new CommitUnknownError("nobody knows", undefined))),
    ).rejects.toThrow("COMMIT");
    await expect(record("x", "write", 4, () => Promise.reject(new Error("other")))).rejects.toThrow("other");
    record.began("x", "write", 5, { process: "p2" });
    expect(await record("x", "read", undefined, () => 5n)).toBe(5n);
    const history = record.history();
    expect(history.map(({ call, input, outcome, output }) => [call, input, outcome, output])).toEqual([
      ["write", 1, "returned", undefined],
      ["write", 2, "failed", undefined],
      ["write", 3, "unknown", undefined],
      ["write", 4, "unknown", undefined],
      ["write", 5, "unknown", undefined],
      ["read", undefined, "returned", 5],
    ]);
    expect(history.map(({ process }) => process)).toEqual(["p1", "p1", "p1", "p1", "p2", "p1"]);
    expectLinearizable(history, register());
    for (const { start, end } of history) expect(end).toBeGreaterThanOrEqual(start);
  });

  test("says itself which errors are certain, if it is asked to", async () => {
    const record = recorder(undefined, { definite: (error) => (error as Error).message === "refused" });
    await expect(record("x", "write", 1, () => Promise.reject(new Error("refused")))).rejects.toThrow();
    expect(record.history()[0]).toMatchObject({ outcome: "failed", error: "refused" });
  });

  test("leaves a file that can be read after a kill, and gone on with", async () => {
    const folder = mkdtempSync(join(tmpdir(), "holdfast-history-"));
    try {
      const [one, two] = [join(folder, "one.jsonl"), join(folder, "two.jsonl")];
      const first = recorder(one, { process: "p1" });
      await first("x", "write", 1, async () => {});
      first.began("x", "write", 2);
      first.close();
      // The kill came in the middle of a line.
      appendFileSync(one, '{"run":"a","id":9,"process":"p1","key":"x","ca');
      const second = recorder(one, { process: "p1" });
      await second("x", "read", undefined, async () => 2);
      second.close();
      const other = recorder(two, { process: "p2" });
      await other("x", "read", undefined, async () => 2);
      other.close();
      expect(() => other.history()).toThrow("readHistory");
      const history = readHistory(two, one);
      expect(history.map(({ process, call, outcome }) => [process, call, outcome])).toEqual([
        ["p1", "write", "returned"],
        ["p1", "write", "unknown"],
        ["p1", "read", "returned"],
        ["p2", "read", "returned"],
      ]);
      expectLinearizable(history, register());
      expect(readFileSync(one, "utf8").split("\n").length).toBeGreaterThan(5);
    } finally {
      rmSync(folder, { recursive: true });
    }
  });
});
