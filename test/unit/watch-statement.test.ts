import { expect, test } from "vitest";
import { shownStatement, tablesOf } from "../../packages/holdfast/src/watch/statement.ts";

test.each([
  ["UPDATE stock SET n = 1", ["stock"]],
  ['update "public"."Stock" set n = 1', ["stock"]],
  ["UPDATE ONLY shop.stock AS s SET n = 1 FROM orders o WHERE o.id = s.id", ["stock"]],
  ["UPDATE `till` SET n = 1", ["till"]],
  ["DELETE FROM orders WHERE id = 1", ["orders"]],
  ["SELECT * FROM orders o JOIN stock s ON s.id = o.id FOR UPDATE", ["orders", "stock"]],
  ["SELECT * FROM orders FOR NO KEY UPDATE SKIP LOCKED", ["orders"]],
  ["SELECT * FROM orders LOCK IN SHARE MODE", ["orders"]],
  ["WITH x AS (SELECT 1) UPDATE stock SET n = 1", ["stock"]],
  ["INSERT INTO stock VALUES (1) ON CONFLICT (id) DO UPDATE SET n = 2", ["stock"]],
  ["INSERT INTO stock VALUES (1) ON DUPLICATE KEY UPDATE n = 2", ["stock"]],
  ["MERGE INTO stock USING orders ON true WHEN MATCHED THEN UPDATE SET n = 1", ["stock"]],
  ["REPLACE INTO till VALUES (1)", ["till"]],
  ["INSERT INTO stock VALUES (1)", []],
  ["INSERT INTO stock VALUES (1) ON CONFLICT DO NOTHING", []],
  ["SELECT * FROM orders", []],
  ["SELECT 'UPDATE stock SET n = 1' FROM orders", []],
  ["-- UPDATE stock\nSELECT 1", []],
])("%s locks rows of %j", (text, tables) => {
  expect(tablesOf(text)).toEqual(tables);
});

test.each([
  [
    "SELECT * FROM t WHERE a = 'it''s' AND b = 12.5 AND c = $1",
    "SELECT * FROM t WHERE a = ? AND b = ? AND c = $1",
  ],
  ["SELECT * FROM t1 WHERE a = 'x\\' OR b = 'secret'", "SELECT * FROM t1 WHERE a = …"],
  ['UPDATE "order" SET "a" = "secret"', 'UPDATE "order" SET "…" = "…"'],
  ['SELECT "t"."a" FROM "t"', 'SELECT "t"."a" FROM "t"'],
  ["SELECT $$secret$$ /* secret */ -- secret\n, 1", "SELECT ? , ?"],
])("%s is shown as %s", (text, shown) => {
  expect(shownStatement(text)).toBe(shown);
  expect(shownStatement(text)).not.toContain("secret");
});

test("what is too long is cut", () => {
  expect(shownStatement(`SELECT ${"a, ".repeat(200)} b`)).toHaveLength(200);
});
