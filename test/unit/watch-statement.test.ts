import { expect, test } from "vitest";
import { lexis } from "../../packages/holdfast/src/engines/mysql/dialect.ts";
import { redacted } from "../../packages/holdfast/src/seam/redact.ts";
import { shownStatement, tablesOf } from "../../packages/holdfast/src/watch/statement.ts";

test.each([
  ["UPDATE stock SET n = 1", ["stock"]],
  ["update `public`.`Stock` set n = 1", ["stock"]],
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
  expect(tablesOf(redacted(text, lexis))).toEqual(tables);
});

test("what is too long is cut", () => {
  expect(shownStatement(`SELECT ${"a, ".repeat(200)} b`)).toHaveLength(200);
});
