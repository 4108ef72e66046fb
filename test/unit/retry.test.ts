import * as fc from "fast-check";
import { afterEach, describe, expect, inject, test, vi } from "vitest";
import { UsageError } from "../../packages/holdfast/src/seam/errors.ts";
import { pause, retryPolicy } from "../../packages/holdfast/src/transaction/retry.ts";
import { checkWait, longest, milliseconds } from "../../packages/holdfast/src/waiting/wait.ts";

fc.configureGlobal({ seed: inject("seed") });
afterEach(() => vi.restoreAllMocks());

describe("the policy", () => {
  const usual = ["deadlock", "lost", "serialization", "unavailable"];

  test("has bounds unless told otherwise", () => {
    const { on, ...rest } = retryPolicy(undefined);
    expect(rest).toEqual({ attempts: 5, attemptsAtCommit: 50, baseMs: 20, maxMs: 1000, afterKill: false });
    expect([...on].toSorted()).toEqual(usual);
    expect(retryPolicy({})).toEqual(retryPolicy(undefined));
    expect(retryPolicy({ attempts: 2 })).toEqual({
      ...retryPolicy(undefined),
      attempts: 2,
      attemptsAtCommit: 2,
    });
  });

  test("false runs the body once", () => {
    expect(retryPolicy(false).attempts).toBe(1);
    expect(retryPolicy(false, retryPolicy({ attempts: 9 })).attempts).toBe(1);
  });

  test("is the instance's where a call says nothing, and the call's where it does", () => {
    const instance = retryPolicy({ attempts: 9 });
    expect(retryPolicy(undefined, instance)).toBe(instance);
    expect(retryPolicy({ baseMs: 1 }, instance).baseMs).toBe(1);
  });

  test("adds lock timeouts, and nothing that a second run cannot mend", () => {
    expect([...retryPolicy({ on: ["lock-timeout"] }).on].toSorted()).toEqual(
      [...usual, "lock-timeout"].toSorted(),
    );
    for (const extra of ["unique", "check", "canceled", "deadline", "", undefined])
      expect(() => retryPolicy({ on: [extra as "lock-timeout"] })).toThrow(UsageError);
  });

  test.each([
    { attempts: 0 },
    { attempts: -1 },
    { attempts: 1.5 },
    { attempts: NaN },
    { attempts: Infinity },
    { attempts: "3" },
    { attempts: null },
    { baseMs: -1 },
    { baseMs: NaN },
    { baseMs: "20" },
    { maxMs: Infinity },
    { maxMs: -5 },
  ])("refuses %o", (options) => {
    expect(() => retryPolicy(options as never)).toThrow(UsageError);
    expect(() => retryPolicy(options as never)).toThrow(/^retry\./);
  });

  test.each([3, "3", true, null, { attemps: 3 }])(
    "refuses %o, which it would otherwise leave unread",
    (options) => {
      expect(() => retryPolicy(options as never)).toThrow(UsageError);
    },
  );
});

describe("the pause", () => {
  test("is random from nothing to a bound that doubles, up to the longest", () => {
    const policy = retryPolicy({ baseMs: 20, maxMs: 1000 });
    const bounds = [1, 2, 3, 4, 5, 6, 7, 8, 2000].map((attempt) => {
      vi.spyOn(Math, "random").mockReturnValue(0.5);
      return 2 * pause(policy, attempt);
    });
    expect(bounds).toEqual([20, 40, 80, 160, 320, 640, 1000, 1000, 1000]);
    vi.spyOn(Math, "random").mockReturnValue(0);
    expect(pause(policy, 5)).toBe(0);
  });

  test("is a time, whatever the numbers", () => {
    const ms = fc.integer({ min: 1, max: longest });
    fc.assert(
      fc.property(ms, ms, fc.integer({ min: 1, max: 2000 }), (baseMs, maxMs, attempt) => {
        const paused = pause(retryPolicy({ baseMs, maxMs }), attempt);
        expect(paused).toBeGreaterThanOrEqual(0);
        expect(paused).toBeLessThanOrEqual(maxMs);
      }),
      {
        examples: [
          [1, 1000, 1],
          [longest, longest, 2000],
        ],
      },
    );
  });

  test("is none where none is wanted, after however many attempts", () => {
    expect(pause(retryPolicy({ baseMs: 0 }), 2000)).toBe(0);
  });
});

describe("times", () => {
  test("are whole milliseconds that timers and servers take", () => {
    expect(milliseconds(0, "x")).toBe(0);
    expect(milliseconds(0.2, "x")).toBe(1);
    expect(milliseconds(longest, "x")).toBe(longest);
    for (const value of [
      -1,
      longest + 1,
      NaN,
      Infinity,
      -Infinity,
      "1",
      1n,
      null,
      undefined,
      {},
      [],
      new Date(),
      true,
    ])
      expect(() => milliseconds(value, "x")).toThrow(/^x must be a number of milliseconds/);
    expect(() => milliseconds(0, "x", 1)).toThrow(UsageError);
  });

  test("a wait of nothing is no wait, and none is without end", () => {
    expect(checkWait("nowait")).toBe("nowait");
    expect(checkWait(0)).toBe("nowait");
    expect(checkWait(0.5)).toBe(1);
    for (const value of ["", "later", "5000", "5s", "skip", NaN, -1, Infinity, null, {}, true])
      expect(() => checkWait(value)).toThrow(/^wait must be/);
  });
});
