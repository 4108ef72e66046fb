import { describe, expect, test } from "vitest";
import { writtenBy } from "../../packages/holdfast/src/testing/explore/written.ts";

const tables = (text: string) => {
  const { anything, tables: found } = writtenBy([text]);
  return anything ? "anything" : [...found].toSorted();
};

describe("which tables a statement may have written", () => {
  test.each([
    ["SELECT * FROM image WHERE note = 'update stock'", []],
    ["SELECT * FROM image FOR UPDATE OF image", []],
    ["SELECT * FROM image FOR NO KEY UPDATE", []],
    ["INSERT INTO image (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET n = 1", ["image"]],
    ["INSERT INTO image SET id = 1 ON DUPLICATE KEY UPDATE n = 1", ["image"]],
    [
      'INSERT INTO "Shop"."My Table" ("user") VALUES ($1) RETURNING "Shop"."My Table"."id"',
      ["shop.my table"],
    ],
    ["insert ignore into `order-items` values (1)", ["order-items"]],
    ["REPLACE INTO café VALUES (1)", ["café"]],
    ["SELECT replace(name, 'a', 'b') FROM image", []],
    ["UPDATE ONLY a.b.image AS i SET n = 1 FROM stock WHERE i.id = stock.id", ["b.image"]],
    ["UPDATE image i JOIN stock s ON s.id = i.id SET s.n = 1", ["image", "stock"]],
    ["UPDATE image, stock SET image.n = 1", ["image", "stock"]],
    ["DELETE FROM image WHERE id IN (SELECT id FROM stock)", ["image"]],
    ["DELETE i FROM image AS i JOIN stock s ON s.id = i.id WHERE s.n = 0", ["i", "image", "stock"]],
    ["DELETE FROM image USING stock WHERE stock.id = image.id", ["image", "stock"]],
    [
      "WITH gone AS (DELETE FROM image RETURNING *) INSERT INTO archive SELECT * FROM gone",
      ["archive", "image"],
    ],
    ["MERGE INTO stock USING image ON true WHEN MATCHED THEN UPDATE SET n = 1", ["stock"]],
    ["BEGIN; SET LOCAL lock_timeout = 1; SELECT pg_advisory_xact_lock(1)", []],
    ["BEGIN; INSERT INTO image VALUES ('a;b', 1); COMMIT", ["image"]],
    ["-- update stock\nUPDATE image SET n = 1 /* delete from stock */", ["image"]],
    ["INSERT INTO image VALUES ('it\\'s'); DELETE FROM stock", ["image", "stock"]],
    ["INSERT image VALUES (1)", ["image"]],
    ["SAVEPOINT a", []],
    ["ROLLBACK TO SAVEPOINT a", []],
    ["DO RELEASE_LOCK('pen')", []],
    ["SET SESSION autocommit = 0", []],
    ["LOCK TABLE image", []],
  ])("%s", (text, found) => {
    expect(tables(text)).toEqual(found);
  });

  test.each([
    "",
    "S_1",
    "execute #12",
    "CALL refill()",
    "TRUNCATE image",
    "COPY image FROM STDIN",
    "CREATE TABLE image (id int)",
    "DO $$ BEGIN DELETE FROM image; END $$",
    "DO 'BEGIN DELETE FROM image; END'",
    "EXPLAIN ANALYZE DELETE FROM image",
    "PREPARE p AS DELETE FROM image",
    "USE other",
    "SET search_path TO other",
    "SELECT set_config('search_path', 'other', true)",
    "SELECT nextval($1)",
    "/*!50000 DELETE FROM image */",
    String.raw`SELECT 'a\' || '; DELETE FROM stock -- '`,
    "SELECT * INTO copy FROM image",
    "SELECT 'a",
    'INSERT INTO "a.b" VALUES (1)',
  ])("may be anything: %s", (text) => {
    expect(tables(text)).toBe("anything");
  });

  test("with the functions that it calls, and the sequences that it asks", () => {
    const { calls, sequences } = writtenBy([
      'SELECT shop.sell(1), "Refill"(2)',
      "SELECT nextval('shop.\"Number\"'), setval('other', 1)",
    ]);
    expect([...calls].toSorted()).toEqual(["nextval", "refill", "sell", "setval"]);
    expect([...sequences].toSorted()).toEqual(["other", "shop.number"]);
  });
});
