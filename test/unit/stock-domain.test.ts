/** The rules of stock, without a database; random orders against the plainest way to say the same. */
import { describe, expect, inject, test } from "vitest";
import type { Facts, OrderLine } from "../../packages/holdfast/src/stock/store.ts";
import {
  type Level,
  compareSpots,
  explain,
  room,
  sameLines,
  shortages,
  splitOrder,
  spotName,
  sumLines,
  take,
} from "../../packages/holdfast/src/stock/domain.ts";
import { random } from "../harness/random.ts";

const level = (sku: string, onHand: number, more: Partial<Level> = {}): Level => ({
  sku,
  location: "main",
  onHand,
  reserved: 0,
  min: 0,
  ...more,
});
const line = (sku: string, quantity: number, location = "main"): OrderLine => ({ sku, location, quantity });
const byName = (levels: readonly Level[]) => new Map(levels.map((each) => [spotName(each), each]));

describe("an order", () => {
  test("room is what is neither reserved nor has to stay", () => {
    expect(room(level("a", 10, { reserved: 3, min: 2 }))).toBe(5);
    expect(room(level("a", 0, { min: -4 }))).toBe(4);
  });

  test("lines of one spot are summed, and come in one order", () => {
    expect(sumLines([line("b", -1), line("a", -2), line("b", -3), line("a", -1, "x")])).toEqual([
      line("a", -2),
      line("a", -1, "x"),
      line("b", -4),
    ]);
  });

  test("the order is that of bytes, as the database has it", () => {
    // UTF-16 has the second before the first.
    const names = ["\uffee", "\u{1F600}"];
    expect(names.toSorted()).toEqual(names.toReversed());
    expect(names.map((sku) => line(sku, 1)).toSorted(compareSpots)).toEqual(names.map((sku) => line(sku, 1)));
    expect(["b", "B", "a"].map((sku) => line(sku, 1)).toSorted(compareSpots)[0]?.sku).toBe("B");
  });

  test("all that is short is named", () => {
    const levels = byName([level("a", 1), level("b", 5, { reserved: 4 }), level("c", 9)]);
    const found = shortages(
      [line("a", -2), line("b", -3), line("c", -9), line("d", -1), line("e", 1)],
      (spot) => levels.get(spotName(spot)),
    );
    expect(found.map(({ sku, available, short }) => [sku, available, short])).toEqual([
      ["a", 1, 1],
      ["b", 1, 2],
      ["d", 0, 1],
    ]);
  });

  test("the same lines are the same whatever the order in which they came", () => {
    const lines = [line("b", -1), line("a", -2)];
    expect(sameLines(sumLines(lines), sumLines(lines.toReversed()))).toBe(true);
    expect(sameLines(lines, lines.slice(1))).toBe(false);
    expect(sameLines([line("a", -1)], [line("a", -1, "x")])).toBe(false);
  });
});

describe("split", () => {
  const levels = [
    level("a", 3, { location: "east" }),
    level("a", 5, { location: "west" }),
    level("a", 4, { location: "far", reserved: 4 }),
  ];

  test("the first that has it all, else of each in turn", () => {
    const locations = ["east", "west", "far"];
    expect(splitOrder([{ sku: "a", quantity: 3 }], levels, locations).lines).toEqual([line("a", -3, "east")]);
    expect(splitOrder([{ sku: "a", quantity: 4 }], levels, locations).lines).toEqual([line("a", -4, "west")]);
    expect(splitOrder([{ sku: "a", quantity: 7 }], levels, locations)).toEqual({
      lines: [line("a", -3, "east"), line("a", -4, "west")],
      short: [],
    });
    expect(splitOrder([{ sku: "a", quantity: 9 }], levels, locations).short).toEqual([
      { sku: "a", location: "east, west, far", requested: 9, available: 8, short: 1 },
    ]);
  });
});

describe("explain", () => {
  const fine: Facts = {
    sku: "a",
    location: "main",
    onHand: 7,
    reserved: 2,
    version: 3,
    open: 2,
    sum: 7,
    movements: 3,
    newest: { version: 3, balance: 7 },
    breaks: [],
  };

  test("has nothing to say of what adds up", () => {
    expect(explain(fine)).toEqual([]);
    expect(
      explain({ ...fine, onHand: 0, reserved: 0, open: 0, version: 0, sum: 0, newest: undefined }),
    ).toEqual([]);
  });

  test.each<[string, Partial<Facts>, string]>([
    ["level", { onHand: 9 }, "9 on hand, but its movements come to 7"],
    ["level", { onHand: 9, sum: 9 }, "changed by +2 without a movement after version 3"],
    ["version", { version: 4 }, "at version 4, its newest movement at 3"],
    ["reserved", { reserved: 5 }, "5 are kept apart, but open reservations come to 2"],
    [
      "gap",
      { breaks: [{ version: 3, quantity: 1, balance: 7, before: { version: 1, balance: 6 }, at: 0 }] },
      "the movement of version 2 is missing",
    ],
    [
      "chain",
      { breaks: [{ version: 3, quantity: 1, balance: 7, before: { version: 2, balance: 9 }, at: 0 }] },
      "9 before version 3, +1, and 7 after: it was changed by -3",
    ],
  ])("%s", (problem, change, text) => {
    const findings = explain({ ...fine, ...change });
    expect(findings.map((each) => each.problem)).toContain(problem);
    expect(findings.map((each) => each.text).join()).toContain(text);
  });
});

test("random orders: taken whole or not at all, never below the minimum, and what is taken is what is gone", () => {
  const seed = inject("seed");
  for (let i = 0; i < 500; i++) {
    const hint = `HOLDFAST_SEED=${seed} ${i}`;
    const next = random(seed + i);
    const int = (below: number) => Math.floor(next() * below);
    let levels: ReadonlyMap<string, Level> = byName(
      Array.from({ length: 4 }, (_, n) => {
        const reserved = int(3);
        return level(`s${n}`, 5 + int(10), { reserved, min: int(5) - 3 });
      }),
    );
    for (let order = 0; order < 10; order++) {
      const lines = Array.from({ length: 1 + int(5) }, () => line(`s${int(4)}`, int(12) - 8));
      const result = take(levels, lines);
      // One by one, on a copy: no level ends below its minimum, or it is refused.
      const sums = new Map<string, number>();
      for (const { sku, quantity } of lines) sums.set(sku, (sums.get(sku) ?? 0) + quantity);
      const low = [...sums].filter(([sku, quantity]) => {
        const each = levels.get(spotName(line(sku, 0))) as Level;
        return quantity < 0 && each.onHand + quantity - each.reserved < each.min;
      });
      expect("short" in result, hint).toBe(low.length > 0);
      if ("short" in result) {
        expect(result.short.map(({ sku }) => sku).toSorted(), hint).toEqual(
          low.map(([sku]) => sku).toSorted(),
        );
        continue;
      }
      for (const [name, each] of result.levels) {
        const before = levels.get(name) as Level;
        expect(each.onHand - before.onHand, hint).toBe(sums.get(each.sku) ?? 0);
        expect(room(each), hint).toBeGreaterThanOrEqual(0);
      }
      levels = result.levels;
    }
  }
});

test("random splits: as much as there is and no more, never more than a location has", () => {
  const seed = inject("seed");
  for (let i = 0; i < 500; i++) {
    const hint = `HOLDFAST_SEED=${seed} ${i}`;
    const next = random(seed + i);
    const int = (below: number) => Math.floor(next() * below);
    const locations = ["x", "y", "z"];
    const levels = ["a", "b"].flatMap((sku) =>
      locations.map((location) => level(sku, int(8), { location, reserved: int(4), min: int(3) - 1 })),
    );
    const wanted = Array.from({ length: 1 + int(3) }, () => ({
      sku: next() < 0.5 ? "a" : "b",
      quantity: 1 + int(10),
    }));
    const { lines, short } = splitOrder(wanted, levels, locations);
    // What it says can be taken.
    expect(take(byName(levels), lines), hint).toHaveProperty("levels");
    for (const sku of new Set(wanted.map((each) => each.sku))) {
      const asked = wanted
        .filter((each) => each.sku === sku)
        .reduce((sum, { quantity }) => sum + quantity, 0);
      const got =
        0 - lines.filter((each) => each.sku === sku).reduce((sum, { quantity }) => sum + quantity, 0);
      const there = levels
        .filter((each) => each.sku === sku)
        .reduce((sum, each) => sum + Math.max(0, room(each)), 0);
      expect(got, hint).toBe(Math.min(asked, there));
      expect(short.find((each) => each.sku === sku)?.short ?? 0, hint).toBe(asked - got);
    }
  }
});
