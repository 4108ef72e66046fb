/** What `explore` reads from the text of statements. */
import { describe, expect, test } from "vitest";
import { Equivalence } from "../../packages/holdfast/src/testing/explore/equivalence.ts";
import { footprint, labelOf } from "../../packages/holdfast/src/testing/explore/statement.ts";

describe("what a statement touches", () => {
  const of = (text: string) => {
    const { kind, reads, writes, any } = footprint(text);
    return [kind, [...reads].toSorted().join(), [...writes].toSorted().join(), any];
  };

  test.for([
    ["SELECT a FROM t WHERE b = 'FROM x'", ["read", "t", "", false]],
    ['select sum("n") from "public"."t" as x join u on u.id = x.id', ["read", "t,u", "", false]],
    ["SELECT 1 FROM t FOR UPDATE", ["read", "t", "t", false]],
    ["SELECT * FROM `t` LOCK IN SHARE MODE", ["read", "t", "t", false]],
    ["INSERT INTO t (a) VALUES (1) ON CONFLICT (a) DO UPDATE SET a = 2", ["insert", "", "t", false]],
    ["insert into t (a) select b from u where not exists (select 1 from v)", ["insert", "u,v", "t", false]],
    ["UPDATE t SET a = (SELECT max(b) FROM u) WHERE c = 1", ["write", "u", "t", false]],
    ["DELETE FROM t WHERE a IN (SELECT b FROM u)", ["write", "t,u", "t", false]],
    ["WITH x AS (UPDATE t SET a = 1 RETURNING *) SELECT * FROM x", ["write", "x", "t", false]],
    ["SELECT pg_advisory_xact_lock(1)", ["read", "", "", true]],
    ["SELECT nextval('s') FROM t", ["read", "t", "", true]],
    ["SELECT * FROM t, u", ["read", "t,u", "", false]],
    ["LOCK TABLE t", ["other", "", "", true]],
    ["BEGIN; SELECT 1", ["other", "", "", true]],
    ["START TRANSACTION READ WRITE", ["begin", "", "", false]],
    ["COMMIT;", ["commit", "", "", false]],
    ["ROLLBACK TO SAVEPOINT a", ["other", "", "", true]],
    ["SET @a = (SELECT max(n) FROM t)", ["other", "t", "", true]],
  ] as const)("%s", ([text, expected]) => {
    expect(of(text)).toEqual(expected);
  });

  // Of each, some were missed once, and what is missed is taken to come to the same in any order.
  test.for([
    ["all", "SELECT * FROM (t JOIN u ON t.id = u.id)", "t,u", ""],
    ["all", "SELECT * FROM t x, u AS y JOIN v ON y.id = v.id, w WHERE a IN (1, 2)", "t,u,v,w", ""],
    ["all", "SELECT * FROM t LEFT JOIN (u, v) ON t.id = u.id, w", "t,u,v,w", ""],
    ["all", "SELECT * FROM ((t, u))", "t,u", ""],
    ["all", "SELECT * FROM t WHERE n = (SELECT max(n) FROM u, v) OR 1 IN (SELECT 1 FROM w)", "t,u,v,w", ""],
    ["all", "SELECT * FROM (SELECT * FROM u) x, t", "t,u", ""],
    ["all", "(SELECT 1 FROM t) UNION (SELECT 1 FROM u, v)", "t,u,v", ""],
    ["all", "SELECT extract(year FROM at), n FROM t ORDER BY n, at LIMIT 1", "t", ""],
    ["all", "SELECT a -- FROM x\n FROM/* no */t/* FROM y */, u", "t,u", ""],
    ["all", "WITH t AS (SELECT 1 FROM u) INSERT INTO t SELECT * FROM t", "t,u", "t"],
    ["all", "SELECT * FROM t, u FOR UPDATE", "t,u", "t,u"],
    ["all", "INSERT INTO shop.t (a) SELECT b FROM other.u, v", "u,v", "t"],
    ["postgres", 'SELECT * FROM "My Shop"."a.b c", "T"', "a.b c,t", ""],
    ["postgres", "SELECT * FROM ONLY t, LATERAL (SELECT * FROM u) x, v", "t,u,v", ""],
    ["postgres", "TABLE t", "t", ""],
    ["postgres", "INSERT INTO t TABLE u", "u", "t"],
    ["postgres", "SELECT a IS DISTINCT FROM b FROM t", "t", ""],
    ["postgres", "UPDATE ONLY t AS x SET n = 1 FROM u, v WHERE x.id = u.id", "u,v", "t"],
    ["postgres", "DELETE FROM t USING u, v WHERE t.id = u.id", "t,u,v", "t,u,v"],
    ["postgres", "MERGE INTO t x USING u ON x.id = u.id WHEN MATCHED THEN UPDATE SET n = 1", "u", "t"],
    [
      "postgres",
      "WITH x AS (DELETE FROM t RETURNING *), y AS (INSERT INTO u SELECT * FROM x) SELECT 1",
      "t,x",
      "t,u",
    ],
    ["postgres", "SELECT a #> '{b}' FROM t, u", "t,u", ""],
    [
      "postgres",
      String.raw`SELECT * FROM t WHERE a = '\' AND b IN (SELECT b FROM u WHERE c = '\')`,
      "t,u",
      "",
    ],
    ["mysql", "INSERT t VALUES (1)", "", "t"],
    ["mysql", "INSERT LOW_PRIORITY IGNORE t (a) SELECT b FROM u", "u", "t"],
    ["mysql", "REPLACE t SET a = 1", "", "t"],
    ["mysql", "REPLACE INTO t TABLE u", "u", "t"],
    ["mysql", "UPDATE t, u SET t.n = 1, u.n = 2 WHERE t.id = u.id", "", "t,u"],
    ["mysql", "UPDATE IGNORE t x JOIN u ON x.id = u.id, v SET u.n = 1", "u,v", "t,u,v"],
    ["mysql", "DELETE x, y.* FROM t AS x JOIN u AS y USING (id)", "t,u", "t,u,x,y"],
    ["mysql", "DELETE FROM x USING t AS x, u WHERE x.id = u.id", "t,u,x", "t,u,x"],
    ["mysql", "SELECT * FROM t STRAIGHT_JOIN u USE INDEX FOR JOIN (a), v", "t,u,v", ""],
    ["mysql", "SELECT * FROM `a ``b`, `c.d`.`e f`", "a `b,e f", ""],
    ["mysql", "SELECT a.from, b.update FROM t a, u b", "t,u", ""],
    ["mysql", "SELECT max(n) FROM t INTO @a, @b", "t", ""],
    [
      "mysql",
      String.raw`SELECT * FROM t WHERE a = 'it\'s' AND b IN (SELECT b FROM u WHERE c = 'x\'')`,
      "t,u",
      "",
    ],
    ["sqlite", "INSERT OR IGNORE INTO t VALUES (1)", "", "t"],
    ["sqlite", "UPDATE OR REPLACE t SET a = 1", "", "t"],
  ] as const)("on %s: %s", ([, text, reads, writes]) => {
    const [, ...found] = of(text);
    expect(found).toEqual([reads, writes, false]);
  });

  test.for([
    ["postgres", "SELECT * INTO t FROM u"],
    ["postgres", "SELECT $$it's$$ FROM t"],
    ["postgres", "SELECT * FROM t, book(1)"],
    ["postgres", String.raw`SELECT * FROM U&"\0074"`],
    ["postgres", "SELECT 1 /* a /* b */ ' */ FROM t, u --'"],
    ["postgres", "COPY t FROM STDIN"],
    ["postgres", "TRUNCATE t, u"],
    ["postgres", "CREATE TABLE t AS SELECT * FROM u"],
    ["postgres", "EXPLAIN ANALYZE DELETE FROM t"],
    ["mysql", "SELECT * FROM 2fa"],
    ["mysql", "SELECT * FROM shop.2fa"],
    ["mysql", "SELECT * FROM { OJ t LEFT OUTER JOIN u ON t.id = u.id }"],
    ["mysql", "SELECT 5--1, '--' FROM t"],
    ["mysql", "SELECT 1 # it's\n FROM t, u WHERE a = 'x'"],
    ["mysql", "SELECT * FROM t /*!80000 , u */"],
    ["mysql", "SELECT * FROM t /*M! , u */"],
    ["mysql", "SELECT NEXT VALUE FOR s"],
    ["mysql", "SELECT * FROM t INTO OUTFILE 'x'"],
    ["mysql", "HANDLER t READ FIRST"],
    ["mysql", "SET @a = 1, SESSION autocommit = 1"],
    ["sqlite", "SELECT * FROM [t u], [v]"],
    ["sqlite", "SELECT * FROM 't'"],
  ] as const)("on %s it may touch anything: %s", ([, text]) => {
    expect(of(text)[3]).toBe(true);
  });

  test("values are no part of its name", () => {
    expect(labelOf("INSERT INTO t VALUES (1, 'it''s', $3)")).toBe(
      labelOf("insert into  t values (22, 'x', $3)"),
    );
  });
});

describe("orders that come to the same", () => {
  const key = (related: string[][], order: string) => {
    const texts: Record<string, string[]> = {
      A: ["BEGIN", "SELECT n FROM a", "UPDATE b SET n = 1", "COMMIT"],
      B: ["BEGIN", "SELECT n FROM c", "UPDATE d SET n = 1", "COMMIT"],
    };
    const sent = order.split("").map((letter) => ({
      actor: letter.charCodeAt(0) - 65,
      text: texts[letter]?.shift() ?? "",
    }));
    return new Equivalence(related).key(sent);
  };

  test("nothing in common", () => {
    expect(key([], "ABABAB")).toBe(key([], "AABBAB"));
    expect(key([], "AAABBB")).toBe(key([], "BBBAAA"));
    // A transaction's first statement may take a snapshot, which a COMMIT is in or not.
    expect(key([], "AAAABB")).not.toBe(key([], "BBAAAA"));
  });

  test("tables that belong together", () => {
    expect(key([["b", "d"]], "AAABBB")).not.toBe(key([["b", "d"]], "BBBAAA"));
    expect(
      key(
        [
          ["b", "x"],
          ["x", "y"],
          ["d", "y"],
        ],
        "AAABBB",
      ),
    ).not.toBe(
      key(
        [
          ["b", "x"],
          ["x", "y"],
          ["d", "y"],
        ],
        "BBBAAA",
      ),
    );
    expect(key([["b", "*"]], "AAABBB")).not.toBe(key([["b", "*"]], "BBBAAA"));
  });
});
