/** Whether stock adds up, and its repair, for any engine with a dialect. */
import type { SqlConnection } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import type { How } from "../../../seam/store.ts";
import {
  type StockLedger,
  addsUp,
  decideRepair,
  emptyLedger,
  extend,
  factsOf,
} from "../../../stock/decide/ledger.ts";
import type { LevelRow } from "../../../stock/decide/rows.ts";
import type { StockBook, Facts, FactsPage, Spot, StockUpkeep } from "../../../stock/store.ts";
import { type StoredRows, chunksOf } from "../rows.ts";
import { stockLevel, stockMovement, stockReserved } from "./tables.ts";

/** Movements of a read. */
const page = 5000;

export function stockUpkeep<C extends SqlConnection>(rows: StoredRows<C>): StockUpkeep<C> {
  const { dialect } = rows;
  const within = <T>(connection: C, { free, waitMs }: How, work: () => Promise<T>): Promise<T> =>
    free ? dialect.transaction(connection, waitMs, work) : dialect.inside(connection, waitMs, work);
  const locked = async (
    connection: C,
    book: StockBook,
    { sku, location }: Spot,
  ): Promise<LevelRow | undefined> => {
    const where = rows.matching(stockLevel, [{ book: book.name, sku, location }]);
    const [level] = await rows.select(connection, stockLevel, where, { locking: "update" });
    return level;
  };
  /** Of a level that is locked: a snapshot of the caller's may be older than its movements. */
  const look = async (connection: C, level: LevelRow) => {
    const history = await ledgers(rows, connection, [level], "current");
    const open = await openOf(rows, connection, [level], "current");
    return { ledger: history.get(level.id) ?? emptyLedger, open: open.get(level.id) ?? 0 };
  };
  return {
    facts: (connection, book, which, how) =>
      rows.present(connection, "A table of stock", async () => {
        const levels = await rows.select(connection, stockLevel, onPage(rows, book, which), {
          order: rows.order(stockLevel),
          limit: which.most,
        });
        const [history, open] = [
          await ledgers(rows, connection, levels),
          await openOf(rows, connection, levels),
        ];
        const found: Facts[] = [];
        for (const level of levels) {
          const facts = factsOf(level, history.get(level.id) ?? emptyLedger, open.get(level.id) ?? 0);
          // Something may have come in between: what does not add up is looked at again while nobody changes it.
          const again = addsUp(facts)
            ? facts
            : await within(connection, how, async () => {
                const now = await locked(connection, book, level);
                if (!now) return undefined;
                const { ledger, open: kept } = await look(connection, now);
                return factsOf(now, ledger, kept);
              });
          if (again) found.push(again);
        }
        return found;
      }),

    repair: (connection, book, spot, repair, how) =>
      rows.present(connection, "A table of stock", () => {
        return within(connection, how, async () => {
          const level = await locked(connection, book, spot);
          if (!level) return;
          const done = rows.matching(stockMovement, [{ external_id: repair.id, level: level.id }]);
          const before = await rows.select(connection, stockMovement, done, { locking: "current" });
          if (before.length > 0) return;
          const { ledger, open } = await look(connection, level);
          const mended = decideRepair(level, ledger, open, await rows.clock(connection), repair);
          const { on_hand, reserved, version } = mended.level;
          const where = rows.is(stockLevel, "id", level.id);
          await rows.update(connection, stockLevel, where, { on_hand, reserved, version });
          await rows.insert(connection, stockMovement, [mended.movement]);
        });
      }),
  };
}

function onPage<C extends SqlConnection>(
  rows: StoredRows<C>,
  book: StockBook,
  { sku, location, after }: FactsPage,
): Statement {
  const conditions = [rows.is(stockLevel, "book", book.name)];
  if (sku !== undefined) conditions.push(rows.is(stockLevel, "sku", sku));
  if (location !== undefined) conditions.push(rows.is(stockLevel, "location", location));
  if (after)
    conditions.push(
      sql`(${rows.compare(stockLevel, "sku", ">", after.sku)} OR (${rows.is(stockLevel, "sku", after.sku)} AND ${rows.compare(stockLevel, "location", ">", after.location)}))`,
    );
  return sql.join(conditions, " AND ");
}

/** Whole histories, by the number of the level: a page at a time. */
async function ledgers<C extends SqlConnection>(
  rows: StoredRows<C>,
  connection: C,
  levels: readonly LevelRow[],
  locking?: "current",
): Promise<Map<number, StockLedger>> {
  const found = new Map<number, StockLedger>();
  for (const some of chunksOf(levels)) {
    const these = rows.among(
      stockMovement,
      "level",
      some.map(({ id }) => id),
    );
    for (let after: { level: number; version: number } | undefined; ;) {
      const beyond = after
        ? sql` AND (${rows.compare(stockMovement, "level", ">", after.level)} OR (${rows.is(stockMovement, "level", after.level)} AND ${rows.compare(stockMovement, "version", ">", after.version)}))`
        : sql``;
      const movements = await rows.select(connection, stockMovement, sql`${these}${beyond}`, {
        order: rows.order(stockMovement),
        limit: page,
        locking,
      });
      for (const [level, own] of Map.groupBy(movements, (row) => row.level))
        found.set(level, extend(found.get(level) ?? emptyLedger, own));
      after = movements.at(-1);
      if (movements.length < page) break;
    }
  }
  return found;
}

/** What lines of reservations come to, by the number of the level. */
async function openOf<C extends SqlConnection>(
  rows: StoredRows<C>,
  connection: C,
  levels: readonly LevelRow[],
  locking?: "current",
): Promise<Map<number, number>> {
  const found = new Map<number, number>();
  for (const some of chunksOf(levels)) {
    const where = rows.among(
      stockReserved,
      "level",
      some.map(({ id }) => id),
    );
    for (const { level, quantity } of await rows.select(connection, stockReserved, where, { locking }))
      found.set(level, (found.get(level) ?? 0) + quantity);
  }
  return found;
}
