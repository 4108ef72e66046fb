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
    ["SELECT * FROM t, u", ["read", "t", "", true]],
    ["LOCK TABLE t", ["other", "", "", true]],
    ["BEGIN; SELECT 1", ["other", "", "", true]],
    ["START TRANSACTION READ WRITE", ["begin", "", "", false]],
    ["COMMIT;", ["commit", "", "", false]],
    ["ROLLBACK TO SAVEPOINT a", ["other", "", "", true]],
    ["SET @a = (SELECT max(n) FROM t)", ["other", "t", "", true]],
  ] as const)("%s", ([text, expected]) => {
    expect(of(text)).toEqual(expected);
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
