/** Two orders come to the same only where nothing that they have exchanged can tell. */
import { describe, expect, test } from "vitest";
import { Equivalence, type SentStatement } from "../../packages/holdfast/src/testing/explore/equivalence.ts";
import { SeenTables } from "../../packages/holdfast/src/testing/explore/seen-tables.ts";

const [A, B] = [0, 1];
const sent = (actor: number, text: string, more: Partial<SentStatement> = {}): SentStatement => ({
  actor,
  text,
  ...more,
});

function same(
  first: readonly SentStatement[],
  second: readonly SentStatement[],
  equivalence = new Equivalence([]),
): boolean {
  return equivalence.key(first) === equivalence.key(second);
}

describe("orders that do not come to the same", () => {
  test("a function in FROM, and one with a schema, may do anything", () => {
    for (const text of ["SELECT * FROM book(1)", "SELECT shop.max(1)"]) {
      const [a, b] = [sent(A, text), sent(B, "UPDATE seat SET n = 1")];
      expect(same([a, b], [b, a])).toBe(false);
    }
  });

  test("on one connection a transaction is open, on the other one it is not", () => {
    const open = [sent(A, "BEGIN", { connection: 1 }), sent(A, "UPDATE x SET n = 1", { connection: 1 })];
    const other = [sent(A, "BEGIN", { connection: 2 }), sent(A, "SELECT n FROM y", { connection: 2 })];
    const commit = sent(A, "COMMIT", { connection: 1 });
    const read = sent(B, "SELECT n FROM x", { connection: 3 });
    expect(same([...open, ...other, commit, read], [...open, ...other, read, commit])).toBe(false);
  });

  test("a BEGIN ends what is open, where the server says so", () => {
    const open = [sent(A, "BEGIN"), sent(A, "UPDATE x SET n = 1")];
    const [begin, read] = [sent(A, "BEGIN"), sent(B, "SELECT n FROM x")];
    expect(same([...open, begin, read], [...open, read, begin])).toBe(false);
  });

  test("a BEGIN that takes a snapshot", () => {
    const [begin, write] = [
      sent(A, "START TRANSACTION WITH CONSISTENT SNAPSHOT"),
      sent(B, "UPDATE x SET n = 1"),
    ];
    expect(same([begin, write], [write, begin])).toBe(false);
  });

  test("a snapshot that is taken by the first statement which reads without a lock", () => {
    const locked = [sent(A, "BEGIN"), sent(A, "SELECT n FROM x FOR UPDATE")];
    const [read, write] = [sent(A, "SELECT n FROM y"), sent(B, "UPDATE z SET n = 1")];
    const late = new Equivalence([], { lateSnapshot: true });
    expect(same([...locked, read, write], [...locked, write, read], late)).toBe(false);
    expect(same([...locked, read, write], [...locked, write, read])).toBe(true);
  });

  test("LOCK TABLE takes no snapshot, the statement after it does", () => {
    const locked = [sent(A, "BEGIN"), sent(A, "LOCK TABLE x IN SHARE MODE")];
    const [read, write] = [sent(A, "SELECT n FROM y"), sent(B, "UPDATE z SET n = 1")];
    expect(same([...locked, read, write], [...locked, write, read])).toBe(false);
  });

  test("times, where somebody looks at them", () => {
    const times = new SeenTables([{ table: "note", kind: "clock" }], []);
    const equivalence = new Equivalence([], { times });
    const [a, b] = [sent(A, "BEGIN"), sent(B, "BEGIN")];
    const [x, y] = [sent(A, "INSERT INTO note (body) VALUES (1)"), sent(B, "UPDATE other SET at = now()")];
    for (const [first, second] of [
      [a, b],
      [x, y],
    ] as const)
      expect(same([first, second], [second, first], equivalence)).toBe(true);
    times.saw("SELECT body FROM note ORDER BY at");
    for (const [first, second] of [
      [a, b],
      [x, y],
    ] as const)
      expect(same([first, second], [second, first], equivalence)).toBe(false);
  });

  test("what befalls an actor may undo anything", () => {
    const [a, b] = [sent(A, "SELECT n FROM x", { fault: true }), sent(B, "SELECT n FROM y")];
    expect(same([a, b], [b, a])).toBe(false);
  });
});

describe("what somebody has to have read", () => {
  const tables = () => new SeenTables([{ table: "event", kind: "numbers" }], []);

  test("numbers matter once their table is read, and then only once more has to be tried", () => {
    const seen = tables();
    seen.saw("INSERT INTO event (body) VALUES (1)");
    seen.saw("SELECT pg_advisory_xact_lock(7)");
    seen.saw("BEGIN; SET LOCAL lock_timeout = 5; SELECT pg_catalog.pg_advisory_xact_lock(7)");
    expect(seen.ordered("event")).toBe(false);
    seen.saw("SELECT id FROM event");
    seen.saw("SELECT id FROM event");
    expect([seen.ordered("event"), seen.learned]).toEqual([true, 1]);
  });

  test("a row may be overlooked, and then met, by a statement that reads its table and writes", () => {
    const seen = tables();
    seen.saw("SELECT count(*) FROM event");
    seen.saw("UPDATE note SET body = 1");
    seen.saw("DELETE FROM event WHERE id = 1");
    expect(seen.overtaken("event")).toBe(false);
    seen.saw("INSERT INTO note SELECT 1 WHERE NOT EXISTS (SELECT * FROM event)");
    expect([seen.overtaken("event"), seen.overtaken("note"), seen.learned]).toEqual([true, false, 1]);
    seen.saw("INSERT INTO event (body) VALUES (1)");
    expect(seen.learned).toBe(2);
  });

  test("and by any that writes with a snapshot from before, unless that is taken late", () => {
    const [early, late] = [tables(), new SeenTables([], [], { lateSnapshot: true })];
    for (const each of [early, late]) each.saw("BEGIN ISOLATION LEVEL REPEATABLE READ");
    expect([early.overtaken("event"), late.overtaken("event")]).toEqual([true, false]);
  });

  test("a function may read any table", () => {
    const seen = tables();
    seen.saw("SELECT poll()");
    expect(seen.ordered("event")).toBe(true);
  });
});
