import { createHash } from "node:crypto";
import * as fc from "fast-check";
import { describe, expect, inject, test } from "vitest";
import { UsageError } from "../../packages/holdfast/src/seam/errors.ts";
import {
  type Key,
  type KeyPart,
  type Lockable,
  canonical,
  key,
  shared,
} from "../../packages/holdfast/src/seam/key.ts";

// Printed by fast-check with a counterexample: HOLDFAST_SEED repeats it.
fc.configureGlobal({ seed: inject("seed"), numRuns: 2000 });

/** Short texts of what the encoding is made of, so that confusions would happen if they could. */
const confusable = fc.stringMatching(/^[0-9:aé😀]{1,8}$/u);
const parts = fc.array(fc.oneof(confusable, fc.bigInt({ min: -20n, max: 200n })), {
  minLength: 1,
  maxLength: 5,
});

function make([first, ...rest]: readonly KeyPart[]): Key {
  return key(String(first), ...rest);
}

function badKey(call: () => unknown): string {
  let thrown: unknown;
  try {
    call();
  } catch (error) {
    thrown = error;
  }
  expect(thrown).toBeInstanceOf(UsageError);
  expect(thrown).toMatchObject({ code: "HF_BAD_KEY" });
  return (thrown as UsageError).message;
}

describe("identity", () => {
  test("is the parts, each with its length, and nothing else", () => {
    fc.assert(
      fc.property(parts, parts, (a, b) => {
        const same = JSON.stringify(a.map(String)) === JSON.stringify(b.map(String));
        expect(make(a).id === make(b).id).toBe(same);
      }),
    );
  });

  test("tells apart what reads the same when written in a row", () => {
    // One text cut in two different ways, with and without what could be taken for a separator.
    const cut = (text: string, at: readonly number[]) =>
      [0, ...at].map((from, i) => text.slice(from, at[i])).filter((part) => part !== "");
    const places = fc
      .uniqueArray(fc.integer({ min: 1, max: 7 }), { maxLength: 4 })
      .map((all) => all.toSorted((a, b) => a - b));
    fc.assert(
      fc.property(
        fc.stringMatching(/^[0-9:a]{2,8}$/),
        places,
        places,
        fc.constantFrom("", ":"),
        (text, x, y, end) => {
          const [a, b] = [cut(text, x), cut(text, y)].map((list) => list.map((part) => part + end));
          expect(make(a ?? []).id === make(b ?? []).id).toBe(JSON.stringify(a) === JSON.stringify(b));
        },
      ),
    );
    expect(key("a", "b:c").id).not.toBe(key("a:b", "c").id);
    expect(key("a", "b").id).not.toBe(key("a1:b").id);
    expect(key("ab").id).not.toBe(key("a", "b").id);
  });

  test("is the documented one: SHA-256 of the prefixed bytes, the first eight", () => {
    fc.assert(
      fc.property(fc.array(confusable, { minLength: 1, maxLength: 4 }), (list) => {
        const hash = createHash("sha256");
        for (const part of list) hash.update(`${Buffer.from(part).length}:`).update(Buffer.from(part));
        expect(make(list).form).toEqual({ kind: "name", hash: hash.digest().readBigInt64BE() });
      }),
    );
    // Written down once: a change would let two versions of a program hold "the same" lock at the same time.
    expect(key("image-upload", 42).form).toEqual({ kind: "name", hash: 2_939_424_002_059_277_525n });
  });

  test("does not tell numbers from their decimal text", () => {
    fc.assert(
      fc.property(fc.maxSafeInteger(), (n) => {
        expect(key("a", n).id).toBe(key("a", String(n)).id);
        expect(key("a", BigInt(n)).id).toBe(key("a", n).id);
      }),
    );
    expect(key("a", -0).id).toBe(key("a", "0").id);
    expect(key("a", 2n ** 80n).id).toBe(key("a", String(2n ** 80n)).id);
  });

  test("is not folded in case, trimmed or normalized", () => {
    const spellings = ["a", "A", " a", "a ", "\u00e9", "e\u0301", "\0", "a\0"];
    expect(new Set(spellings.map((text) => key("n", text).id)).size).toBe(spellings.length);
  });

  test("of a name is the one of the number it stands for", () => {
    const named = key("image-upload", 42);
    expect(named.form.kind === "name" && key.bigint(named.form.hash).id).toBe(named.id);
  });

  test("of other spellings is theirs alone", () => {
    expect(key.hashtext("a").id).toBe(key.hashtext("a").id);
    expect(key.hashtextextended("a").id).toBe(key.hashtextextended("a", 0).id);
    const different = [
      key("a"),
      key.bigint(1),
      key.bigint(12),
      key.int(1, 2),
      key.int(12, 0),
      key.int(-1, 2),
      key.hashtext("a"),
      key.hashtext("a", "b"),
      key.hashtext("a1:b"),
      key.hashtext("a", "1:b"),
      key.hashtext("a1", "b"),
      key.hashtextextended("a"),
      key.hashtextextended("a", 1),
      key.hashtextextended("1:a"),
    ];
    expect(new Set(different.map(({ id }) => id)).size).toBe(different.length);
  });

  test("of one hashed text is never that of two", () => {
    fc.assert(
      fc.property(confusable, confusable, (a, b) => {
        const pair = key.hashtext(a, b).id;
        for (const one of [a + b, `${a}:${b}`, `${a}1:${b}`, `${a}${b.length}:${b}`, `${a.length}:${a}`])
          expect(key.hashtext(one).id).not.toBe(pair);
      }),
    );
  });
});

describe("what is no key", () => {
  const circular: unknown[] = [];
  circular.push(circular);
  const bad: readonly [string, unknown][] = [
    ["empty text", ""],
    ["undefined", undefined],
    ["null", null],
    ["NaN", NaN],
    ["a fraction", 1.5],
    ["infinity", Infinity],
    ["a number that is not exact", 2 ** 53],
    ["a boolean", true],
    ["an object", { id: 1 }],
    ["an object without prototype", Object.create(null)],
    ["a list", ["a"]],
    ["a list that holds itself", circular],
    ["a date", new Date(0)],
    ["a symbol", Symbol("a")],
    ["a function", () => "a"],
    ["a high surrogate alone", "a\ud800"],
    ["a low surrogate alone", "\udc00a"],
    ["surrogates the wrong way round", "\udc00\ud800"],
  ];

  test.each(bad)("%s", (_, value) => {
    expect(badKey(() => key(value as string))).toMatch(/^key: its namespace /);
    expect(badKey(() => key("a", value as string))).toMatch(/^key: part 2 /);
    badKey(() => key("a", "b", value as string));
  });

  test("no parts at all", () => {
    badKey(() => (key as unknown as () => unknown)());
  });

  test("numbers that do not fit, and texts that the server cannot hold", () => {
    for (const value of [2n ** 63n, -(2n ** 63n) - 1n, 1.5, NaN, "1", undefined, null])
      badKey(() => key.bigint(value as bigint));
    expect(key.bigint(2n ** 63n - 1n).id).not.toBe(key.bigint(-(2n ** 63n)).id);
    for (const value of [2 ** 31, -(2 ** 31) - 1, 0.5, NaN, "1", undefined]) {
      badKey(() => key.int(value as number, 1));
      badKey(() => key.int(1, value as number));
    }
    for (const value of ["", "a\0b", "\ud800", undefined, 1]) {
      badKey(() => key.hashtext(value as string));
      badKey(() => key.hashtextextended(value as string));
    }
    badKey(() => key.hashtext("a", ""));
    badKey(() => key.hashtextextended("a", 2n ** 63n));
    badKey(() => shared("a" as never));
    badKey(() => shared(shared(key("a")) as never));
  });
});

describe("the name for people", () => {
  test("is the parts with colons, as printable ASCII", () => {
    expect(key("image-upload", 42, "x y").name).toBe("image-upload:42:x y");
    expect(key("a", "é😀\n\0\u001b[31m").name).toBe("a:?????[31m");
    expect(key("a:b").name).toBe(key("a", "b").name);
  });

  test("is cut short, and the identity is not", () => {
    const long = "x".repeat(10_240);
    const [one, two] = [key("a", `${long}1`), key("a", `${long}2`)];
    expect(one.name).toBe(`a:${"x".repeat(115)}...`);
    expect(one.id).not.toBe(two.id);
    expect(key("a", "x".repeat(118)).name).toBe(`a:${"x".repeat(118)}`);
    expect(key("a", "é".repeat(5_000)).name).toHaveLength(120);
  });
});

describe("canonical", () => {
  const locks = fc.array(
    fc.tuple(fc.constantFrom("a", "b", "c", "d", "e"), fc.boolean()).map(([name, exclusive]) => {
      const made = key("n", name);
      return exclusive ? made : shared(made);
    }),
    { minLength: 1, maxLength: 8 },
  );
  const shuffled = locks.chain((list) =>
    fc.tuple(fc.constant(list), fc.shuffledSubarray(list, { minLength: list.length })),
  );

  test("is the same for everybody, in whatever order they ask", () => {
    fc.assert(
      fc.property(shuffled, ([one, other]) => {
        const show = (list: readonly Lockable[]) =>
          canonical(list).map(({ key, mode }) => `${key.id} ${mode}`);
        expect(show(one)).toEqual(show(other));
        expect(show(canonical(one))).toEqual(show(one));
      }),
    );
  });

  test("holds each key once, sorted, and exclusively if anybody asked so", () => {
    fc.assert(
      fc.property(locks, (list) => {
        const made = canonical(list);
        const ids = made.map(({ key }) => key.id);
        expect(ids).toEqual([...new Set(ids)].toSorted());
        const asked = list.map((lock) => ("mode" in lock ? lock : { key: lock, mode: "exclusive" }));
        expect(new Set(ids)).toEqual(new Set(asked.map(({ key }) => key.id)));
        for (const { key, mode } of made) {
          const exclusive = asked.some((lock) => lock.key.id === key.id && lock.mode === "exclusive");
          expect(mode).toBe(exclusive ? "exclusive" : "shared");
        }
      }),
    );
  });

  test("takes one lock, or a list", () => {
    const made = key("a");
    expect(canonical(made)).toEqual([{ key: made, mode: "exclusive" }]);
    expect(canonical(shared(made))).toEqual([{ key: made, mode: "shared" }]);
    expect(canonical([shared(made), made, shared(made)])).toEqual([{ key: made, mode: "exclusive" }]);
  });

  test.each([
    ["text", "a"],
    ["null", null],
    ["a number", 1],
    ["an empty list", []],
    ["a list with a hole", [undefined]],
    ["text in a list", [key("a"), "b"]],
    ["a list in a list", [[key("a")]]],
    ["what only looks like a key", { ...key("a") }],
    ["a request for such", { key: { ...key("a") }, mode: "shared" }],
    ["a promise", Promise.resolve(key("a"))],
  ])("refuses %s", (_, value) => {
    badKey(() => canonical(value as never));
  });

  test("tells who wrote text how to write a key", () => {
    expect(badKey(() => canonical("user 1" as never))).toContain('write key("user 1")');
  });
});
