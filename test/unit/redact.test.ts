/** Statements as logs and screens may have them: no value of theirs is left, however the server reads them. */
import { describe, expect, test } from "vitest";
import { lexis as duckdb } from "../../packages/holdfast/src/engines/duckdb/dialect.ts";
import { lexis as mysql } from "../../packages/holdfast/src/engines/mysql/dialect.ts";
import { lexis as postgres } from "../../packages/holdfast/src/engines/postgres/dialect.ts";
import { lexis as sqlite } from "../../packages/holdfast/src/engines/sqlite/dialect.ts";
import { type Lexis, redacted } from "../../packages/holdfast/src/seam/redact.ts";

const engines: Readonly<Record<string, Lexis>> = { postgres, mysql, sqlite, duckdb };

describe.each(Object.entries(engines))("%s", (_, lexis) => {
  test.each([
    ["SELECT a FROM t WHERE b = 'secret' AND c = 12.5e3", "SELECT a FROM t WHERE b = ? AND c = ?"],
    ["SELECT 'it''s secret', t1.a FROM t1", "SELECT ?, t1.a FROM t1"],
    ["SELECT a -- it's\nFROM t WHERE b = 'secret'", "SELECT a  \nFROM t WHERE b = ?"],
    ["SELECT a /* it's */ FROM t WHERE b = 'secret'", "SELECT a   FROM t WHERE b = ?"],
    ["SELECT a FROM t WHERE b = 'secret", "SELECT a FROM t WHERE b = …"],
    ["SELECT a FROM t /* secret", "SELECT a FROM t …"],
    ["SELECT a FROM t -- secret", "SELECT a FROM t  "],
    ["SELECT .5, 0x5EC4E7, 1_000", "SELECT ?, ?, ?"],
    ["", ""],
  ])("%s", (text, shown) => {
    expect(redacted(text, lexis)).toBe(shown);
  });
});

/** What a server may read as a value is not shown, whatever its session has set. */
test.each([
  ["'C:\\' , 'secret'", "postgres mysql sqlite duckdb"],
  ["'C:\\\\' , 'secret'", "postgres mysql sqlite duckdb"],
  ["'x\\'' , 'secret'", "postgres mysql"],
  ["'x\\', 'secret', '' , 'secret'", "postgres mysql"],
  ["E'x\\'secret' , 'secret'", "postgres duckdb"],
  ["e'x\\\\' , 'secret'", "postgres duckdb"],
  ["E'a'\n'secret\\'secret'", "postgres"],
  ["$$it's$$, 'secret'", "postgres duckdb"],
  ["$a$ $b$ secret $$ secret' $a$, 'secret'", "postgres duckdb"],
  ["$a$ secret", "postgres duckdb"],
  ["U&'secret' UESCAPE '!'", "postgres"],
  ["/* /* ' */ 'secret' */ 'secret'", "postgres duckdb"],
  ["/* /* ' */ 'secret'", "mysql sqlite"],
  ["/*!50000 'x*/secret' */ 'secret'", "mysql"],
  ["/*! ' */ 'secret' -- '\n, 'secret'", "mysql"],
  ["/*M!100000 ' */ 'secret'", "mysql"],
  ["1 --1'secret'", "postgres mysql sqlite duckdb"],
  ["1 # it's\n, 'secret'", "mysql"],
  ["`it's`, 'secret'", "mysql sqlite"],
  ["[it's], 'secret'", "sqlite"],
  ["\"it's\", 'secret'", "postgres mysql sqlite duckdb"],
  ['"secret", "C:\\", "secret"', "mysql sqlite"],
  ["N'secret', x'5ec4e7'", "postgres mysql sqlite duckdb"],
  ["_utf8mb4'secret'", "mysql"],
  ["1 AS 😀$a$, 'x $a$ secret'", "postgres"],
  ["1 AS\u00a0$a$, 'x $a$ secret'", "postgres"],
  ["1,\u00a0$a$, 'x secret' $a$, 'secret'", "duckdb"],
  ["$😀$ it's $😀$, 'secret'", "postgres duckdb"],
  ["1 -- '\r, 'x', secret' \n, 'secret'", "mysql sqlite"],
  ["1 -- '\r, 'secret'", "postgres duckdb"],
  ["1 # '\r, 'x', secret' \n, 'secret'", "mysql"],
  ["1; CREATE FUNCTION f() LANGUAGE JAVASCRIPT AS $$ it's secret $$", "mysql"],
  ["1; SET app.token = secret", "postgres duckdb"],
  ['1; SET LOCAL app.token TO public, "secret"', "postgres duckdb"],
  ["1; ALTER ROLE app IN DATABASE shop SET app.token = secret", "postgres"],
  ["1; PRAGMA key = secret", "sqlite duckdb"],
  ['1; PRAGMA key("secret")', "sqlite"],
  [`'${"x".repeat(1000)}secret`, "postgres mysql sqlite duckdb"],
])("nothing is left of SELECT %s on %s", (text, on) => {
  for (const engine of on.split(" "))
    expect(redacted(`SELECT ${text}`, engines[engine])).not.toMatch(/secret|5ec4e7/i);
});

test.each([
  [
    postgres,
    `SELECT "name", $1, a$b$ FROM "t" WHERE c = E'\\'x'`,
    `SELECT "name", $1, a$b$ FROM "t" WHERE c = ?`,
  ],
  [
    postgres,
    "SELECT $fn$ it's $fn$, a #>> b, c - -1 /* /* */ ' */ FROM t",
    "SELECT ?, a #>> b, c - -?   FROM t",
  ],
  [postgres, "SELECT 'C:\\' FROM t", "SELECT …"],
  [duckdb, "SELECT 'C:\\' FROM t", "SELECT ? FROM t"],
  [sqlite, "SELECT 'C:\\' FROM t WHERE a = ?1", "SELECT ? FROM t WHERE a = ?1"],
  [sqlite, 'UPDATE "order" SET "a" = "secret"', 'UPDATE "order" SET "…" = "…"'],
  [sqlite, 'SELECT "t"."a", [b], `c` FROM "t"', 'SELECT "t"."a", [b], `c` FROM "t"'],
  [
    mysql,
    'SELECT `a``b` FROM t WHERE c = "secret" # it\'s\nAND d = 1',
    'SELECT `a``b` FROM t WHERE c = "…"  \nAND d = ?',
  ],
  [mysql, "SELECT 1--1, 'a\\\\', b FROM t", "SELECT ?--?, ?, b FROM t"],
  [mysql, "SELECT TRIM(LEADING 'x' FROM \"secret\")", 'SELECT TRIM(LEADING ? FROM "…")'],
  [postgres, "SET a = b, c; UPDATE t SET a = b", "SET a = ?, ?; UPDATE t SET a = b"],
  [postgres, "ALTER TABLE t SET LOGGED; SET ROLE b", "ALTER TABLE t SET LOGGED; SET ROLE b"],
  [mysql, "SET @a = (SELECT b FROM t)", "SET @a = (SELECT b FROM t)"],
  [undefined, "SELECT 1", "…"],
])("%# %s", (lexis, text, shown) => {
  expect(redacted(text, lexis)).toBe(shown);
});
