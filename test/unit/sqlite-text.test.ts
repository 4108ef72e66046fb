import { describe, expect, test } from "vitest";
import { filled, parts } from "../../packages/holdfast/src/engines/sqlite/text.ts";

describe("values in their places", () => {
  test.each<[string, unknown[], string]>([
    ["SELECT ?, ?", [1, "it's"], "SELECT 1, 'it''s'"],
    ["SELECT ?, ?", [[1n, null]], "SELECT 1, NULL"],
    ["SELECT ?2, ?1", ["a", "b"], "SELECT 'b', 'a'"],
    ["SELECT :a, @b, $c", [{ a: 1, b: 2, $c: 3 }], "SELECT 1, 2, 3"],
    ["SELECT :a, ?", [{ a: 1 }, 2], "SELECT 1, 2"],
    ["SELECT '?', \"?\", [?], `?` -- ?\n, /* ? */ ?", [1], "SELECT '?', \"?\", [?], `?` -- ?\n, /* ? */ 1"],
    ["SELECT ?, ?", [Buffer.from("x"), new Date(0)], "SELECT '…', '1970-01-01T00:00:00.000Z'"],
    // Bound before, where nobody looked.
    ["SELECT ?, :a", [], "SELECT ?, :a"],
  ])("%s", (text, values, expected) => {
    expect(filled(text, values)).toBe(expected);
  });
});

describe("the statements of a script", () => {
  test.each<[string, string[]]>([
    ["BEGIN; COMMIT", ["BEGIN;", " COMMIT"]],
    ["INSERT INTO a VALUES (';');\n-- the end;\n", ["INSERT INTO a VALUES (';');"]],
    ["SELECT 1", ["SELECT 1"]],
    ["", [""]],
    [
      "CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END; SELECT 1",
      ["CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END; SELECT 1"],
    ],
  ])("%s", (script, expected) => {
    expect(parts(script)).toEqual(expected);
  });
});
