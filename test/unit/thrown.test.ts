/** What was thrown may be anything. Nothing that looks at it may throw. */
import { describe, expect, test } from "vitest";
import { failureOf, isLockTimeout, isRetryable, isUniqueViolation } from "holdfast";
import { postgres } from "../../packages/holdfast/src/engines/postgres/index.ts";
import { chain, classify } from "../../packages/holdfast/src/seam/failure.ts";
import { described, message } from "../../packages/holdfast/src/seam/thrown.ts";
import { thrown } from "../../packages/holdfast/src/testing/explore/verdict.ts";
import { describe as inTheCommand } from "../../packages/cli/src/describe.ts";
import { odd } from "../harness/odd-values.ts";

describe.each(odd)("$name", ({ make, shows }) => {
  test("is shown, within bounds", () => {
    const text = described(make(), 4000);
    expect(text).toMatch(shows);
    expect(text.length).toBeLessThanOrEqual(4000);
    expect(text).not.toContain("\0");
    expect(text.isWellFormed()).toBe(true);
  });

  test("also inside of another one", () => {
    const error = new Error("outer", { cause: make() });
    expect(described(error, 4000)).toMatch(/^Error: outer\n/);
    expect(described(new AggregateError([make(), error], "both"), 4000)).toMatch(/^AggregateError: both/);
  });

  test("in a few words", () => {
    expect(message(make())).toBeTypeOf("string");
    expect(inTheCommand(make())).toBeTypeOf("string");
    expect(described(make(), 100, { stack: false }).length).toBeLessThanOrEqual(100);
  });

  test("is no failure of a server", () => {
    for (const error of [make(), new Error("outer", { cause: make() })]) {
      expect(classify({ engine: postgres }, error)).toBeUndefined();
      expect(failureOf(error)).toBeUndefined();
      expect([isLockTimeout(error), isRetryable(error), isUniqueViolation(error)]).toEqual([
        false,
        false,
        false,
      ]);
      expect([...chain(error)].length).toBeLessThan(6);
    }
  });

  test("can be told to another thread", () => {
    expect(structuredClone(thrown(make()))).toMatchObject({ message: expect.any(String) as string });
  });
});

test("many causes, many errors: the first of them", () => {
  let error = new Error("the last");
  for (let i = 0; i < 50; i++) error = new Error(`number ${i}`, { cause: error });
  const text = described(error, 4000);
  expect(text).toMatch(/^Error: number 49\n/);
  expect(text.match(/caused by: /g)).toHaveLength(5);
  const many = new AggregateError(Array.from({ length: 1000 }, (_, i) => new Error(`number ${i}`)));
  expect(described(many, 4000).match(/\d+ of 1000: /g)).toHaveLength(5);
});

test("a message that was changed later is the one that is shown", () => {
  const error = new Error("first");
  void error.stack;
  error.message = "second";
  expect(described(error, 4000)).toMatch(/^Error: second\n/);
});
