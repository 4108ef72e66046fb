import * as fc from "fast-check";
import { describe, expect, inject, test } from "vitest";
import { UsageError } from "../../packages/holdfast/src/seam/errors.ts";
import { type Statement, sql } from "../../packages/holdfast/src/seam/sql.ts";
import { render as mysql } from "../../packages/holdfast/src/engines/mysql/index.ts";
import { render as postgres } from "../../packages/holdfast/src/engines/postgres/index.ts";
import { render as sqlite } from "../../packages/holdfast/src/engines/sqlite/index.ts";

fc.configureGlobal({ seed: inject("seed"), numRuns: 500 });

describe("values", () => {
  test("are bound, in order, and never written into the text", () => {
    const statement = sql`SELECT ${1}, ${"a'; DROP TABLE t; --"} WHERE x = ${null} AND y = ${undefined}`;
    expect(postgres(statement)).toEqual({
      text: "SELECT $1, $2 WHERE x = $3 AND y = $4",
      values: [1, "a'; DROP TABLE t; --", null, undefined],
    });
    expect(mysql(statement).text).toBe("SELECT ?, ? WHERE x = ? AND y = ?");
    expect(sqlite(sql`SELECT ${1}, ${"a'; --"} WHERE x = ${null}`)).toEqual({
      text: "SELECT ?, ? WHERE x = ?",
      values: [1n, "a'; --", null],
    });
  });

  test("keep what looks like a placeholder", () => {
    expect(postgres(sql`SELECT '$1 ?' || ${"$2"}`)).toEqual({ text: "SELECT '$1 ?' || $1", values: ["$2"] });
    expect(postgres(sql`SELECT a ? 'b'`).text).toBe("SELECT a ? 'b'");
  });

  test("that only look like a statement are values", () => {
    const forged = JSON.parse('{"parts":["DROP TABLE t"],"values":[]}') as unknown;
    expect(postgres(sql`SELECT ${forged}`)).toEqual({ text: "SELECT $1", values: [forged] });
    expect(postgres(sql`SELECT ${{ path: ["t"] }}`).text).toBe("SELECT $1");
  });
});

describe("fragments", () => {
  test("nest", () => {
    const inner = sql`b = ${2} OR c = ${3}`;
    const outer = sql`SELECT ${1} WHERE (${inner}) AND d = ${4}`;
    expect(postgres(outer)).toEqual({
      text: "SELECT $1 WHERE (b = $2 OR c = $3) AND d = $4",
      values: [1, 2, 3, 4],
    });
    // Used twice it is bound twice.
    expect(postgres(sql`${inner}/${inner}`).values).toEqual([2, 3, 2, 3]);
  });

  test("say the same however they are put together", () => {
    interface Tree {
      readonly statement: Statement;
      readonly text: string;
      readonly values: readonly unknown[];
    }
    const leaf = fc.oneof(
      fc.integer().map((n): Tree => ({ statement: sql`${n}`, text: "?", values: [n] })),
      fc
        .constantFrom("a", " = ", "?", "")
        .map((text): Tree => ({ statement: sql.raw(text), text, values: [] })),
      fc.constantFrom("x", "x`y").map((name): Tree => {
        const text = `\`${name.replaceAll("`", "``")}\``;
        return { statement: sql`${sql.id(name)}`, text, values: [] };
      }),
    );
    const { tree } = fc.letrec<{ tree: Tree }>((tie) => ({
      tree: fc.oneof(
        { maxDepth: 4 },
        leaf,
        fc.tuple(tie("tree"), tie("tree")).map(([a, b]): Tree => ({
          statement: sql`(${a.statement} AND ${b.statement})`,
          text: `(${a.text} AND ${b.text})`,
          values: [...a.values, ...b.values],
        })),
        fc.array(tie("tree"), { maxLength: 4 }).map((list): Tree => ({
          statement: sql.join(list.map(({ statement }) => statement)),
          text: list.map(({ text }) => text).join(", "),
          values: list.flatMap(({ values }) => values),
        })),
      ),
    }));
    fc.assert(
      fc.property(tree, ({ statement, text, values }) => {
        expect(mysql(statement)).toEqual({ text, values });
        expect(statement.parts).toHaveLength(statement.values.length + 1);
      }),
    );
  });

  test("join with a separator, and without items are nothing", () => {
    expect(postgres(sql.join([1, sql.id("a"), sql`f(${2})`])).text).toBe('$1, "a", f($2)');
    expect(postgres(sql.join([sql`a`, sql`b`], " AND ")).text).toBe("a AND b");
    expect(postgres(sql`x${sql.join([])}y`)).toEqual({ text: "xy", values: [] });
  });

  test("repeated have the same text around other values", () => {
    const pairs = sql`VALUES ${sql.repeat(["(", ", ", ")"], ", ", [1, "a", 2, "b"])}`;
    expect(postgres(pairs)).toEqual({ text: "VALUES ($1, $2), ($3, $4)", values: [1, "a", 2, "b"] });
    expect(sqlite(sql.repeat(["", ""], ", ", [1])).text).toBe("?");
    const names = sql.repeat(["", " = ", ""], " OR ", [sql.id("a"), 1, sql.id("b"), 2]);
    expect(mysql(names)).toEqual({ text: "`a` = ? OR `b` = ?", values: [1, 2] });
  });

  test("cannot be changed afterwards", () => {
    expect(() => Object.assign(sql`SELECT 1`, { parts: ["DROP TABLE t"] })).toThrow(TypeError);
  });

  test("of raw text are that text", () => {
    expect(postgres(sql.raw("SELECT '${x}' $1"))).toEqual({ text: "SELECT '${x}' $1", values: [] });
  });
});

describe("names", () => {
  test("are quoted as the engine quotes them, and end where they end", () => {
    const statement = sql`SELECT * FROM ${sql.id('my "table"', "a`b")}`;
    expect(postgres(statement).text).toBe('SELECT * FROM "my ""table"""."a`b"');
    expect(sqlite(statement).text).toBe('SELECT * FROM "my ""table"""."a`b"');
    expect(mysql(statement).text).toBe('SELECT * FROM `my "table"`.`a``b`');
    expect(postgres(statement).text).toBe('SELECT * FROM "my ""table"""."a`b"');
  });

  test.each([
    ["empty", [""]],
    ["of no text", [undefined]],
    ["with a NUL", ["a\0b"]],
    ["an object", [{}]],
    ["none", []],
  ])("that cannot be: %s", (_, path) => {
    expect(() => sql.id(...(path as string[]))).toThrow(UsageError);
  });
});
