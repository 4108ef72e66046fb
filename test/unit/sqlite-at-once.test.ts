/** What is decided in one go comes to the same as what goes the way of every engine: the same batches, on two files. */
import Database from "better-sqlite3";
import { holdfast } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, inject, test } from "vitest";
import { type SqliteConnection, sqlite } from "../../packages/holdfast/src/engines/sqlite/index.ts";
import type { Quotas } from "../../packages/holdfast/src/quota/store.ts";
import type { StockStore } from "../../packages/holdfast/src/stock/store.ts";
import { random } from "../harness/random.ts";

const folder = mkdtempSync(join(tmpdir(), "holdfast-at-once-"));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const quotas = sqlite.quotas as Quotas<SqliteConnection>;
const stock = sqlite.stock as StockStore<SqliteConnection>;
const how = { waitMs: 1000, free: true, make: true, look: true };

type Ask = Required<SqliteConnection>["atOnce"];

/** `asked`: statements that were answered at once. */
async function open(name: string, atOnce: boolean) {
  const file = join(folder, name);
  const database = fromBetterSqlite3(() => {
    const db = new Database(file);
    db.pragma("synchronous = OFF");
    return db;
  });
  await holdfast(database).migrate();
  const signal = new AbortController().signal;
  const pinned = await database.connect?.({ use: "session", locks: [], wait: 1000, signal });
  const connection = pinned?.connection as SqliteConnection & { atOnce: Ask | undefined };
  const ask = connection.atOnce as Ask;
  const asked = { count: 0 };
  connection.atOnce = atOnce
    ? (...statement) => {
        asked.count++;
        return ask.apply(connection, statement);
      }
    : undefined;
  const rows = (table: string) => {
    const db = new Database(file, { readonly: true });
    const found = db.prepare(`SELECT * FROM holdfast_${table}`).all() as object[];
    db.close();
    return found.map(withoutTime);
  };
  return { connection, asked, rows };
}

/** Times are by the clock, and not the same for both. */
function withoutTime(row: object): object {
  const times = new Set(["at", "until", "made_at"]);
  return Object.fromEntries(Object.entries(row).filter(([name]) => !times.has(name)));
}

/** Few of them come again, if any: after one that does, all are looked for, for a second. */
function idsOf(next: () => number) {
  let made = 0;
  return (most: number, plain: boolean) => {
    const count = 1 + Math.floor(next() * most);
    const number = () => (!plain && next() < 0.002 ? Math.floor(next() * made) : ++made);
    return [...new Set(Array.from({ length: count }, () => `id-${number()}`))];
  };
}

/** Plain ones first; then ids come again, some with another amount; there are holds, what is refused, and subjects that are new. */
function uses(connection: SqliteConnection, next: () => number) {
  const any = (most: number) => Math.floor(next() * most);
  const ids = idsOf(next);
  return async (plain: boolean): Promise<unknown> => {
    const subjects = [...new Set(Array.from({ length: 1 + any(3) }, () => `user-${any(5)}`))];
    const held = !plain && next() < 0.1;
    const answer = await quotas.consume(
      connection,
      {
        ...how,
        definitions: [{ rule: { window: "none" }, plans: undefined, over: 0 }],
        buckets: subjects.map((subject) => ({ quota: "units", subject, definition: 0, limit: 900 })),
        uses: ids(90, plain).map((id, group) => ({
          bucket: any(subjects.length),
          id,
          amount: 1 + any(2),
          group,
          holdMs: held ? 60_000 : undefined,
          details: undefined,
        })),
      },
      how,
    );
    return answer.missing ? answer.elsewhere : answer.verdicts.map(withoutTime);
  };
}

/** The same of stock: what is put in and taken, what is short, and reservations. */
function orders(connection: SqliteConnection, next: () => number) {
  const any = (most: number) => Math.floor(next() * most);
  const about = {
    source: "TEST",
    referenceType: undefined,
    referenceId: undefined,
    by: undefined,
    note: undefined,
  };
  const ids = idsOf(next);
  return async (plain: boolean): Promise<unknown> => {
    const reserves = !plain && next() < 0.1;
    const verdicts = await stock.decide(
      connection,
      { name: "shop", table: undefined },
      ids(12, plain).map((id) => ({
        kind: reserves ? ("reserve" as const) : ("apply" as const),
        id,
        lines: [
          {
            sku: `sku-${any(4)}`,
            location: "here",
            quantity: reserves ? 1 : next() < 0.35 ? 1 + any(5) : -1 - any(2),
          },
        ],
        about,
        ttlMs: reserves ? 60_000 : undefined,
      })),
      how,
    );
    return verdicts?.map(withoutTime);
  };
}

test.each([
  { what: "quota", calls: uses, tables: ["quota_bucket", "quota_line", "quota_hold"] },
  { what: "stock", calls: orders, tables: ["stock_level", "stock_movement", "stock_reserved"] },
])("$what", async ({ what, calls, tables }) => {
  const seed = inject("seed");
  const [one, other] = [await open(`${what}-one.db`, true), await open(`${what}-other.db`, false)];
  const [first, second] = [calls(one.connection, random(seed)), calls(other.connection, random(seed))];
  for (let i = 0; i < 150; i++) expect(await first(i < 40), `seed ${seed}`).toEqual(await second(i < 40));
  for (const table of tables) expect(one.rows(table), `seed ${seed}`).toEqual(other.rows(table));
  expect(one.asked.count).toBeGreaterThan(50);
  expect(other.asked.count).toBe(0);
});
