/** Of a stock after many calls: everything adds up, and who was told that something was done finds it. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import type { Pool } from "pg";
import { expect } from "vitest";
import { type Answer, shopOf } from "../workers/stock-random.ts";

interface Row {
  level: string;
  sku: string;
  location: string;
  version: number;
  quantity: number;
  balance: number;
  parts: number;
  kind: string;
  id: string;
  origin: string | null;
}

function groups<T>(items: readonly T[], by: (item: T) => string): Map<string, T[]> {
  const found = new Map<string, T[]>();
  for (const item of items) {
    const name = by(item);
    found.set(name, [...(found.get(name) ?? []), item]);
  }
  return found;
}

const sumOf = (rows: readonly { readonly quantity: number }[]) =>
  rows.reduce((sum, { quantity }) => sum + quantity, 0);

export async function checkStock(pool: Pool, answers: readonly Answer[], hint: string): Promise<void> {
  const { rows: levels } = await pool.query(
    `SELECT t.id::text AS level, on_hand::int, reserved::int, min_level::int, version::int,
      (SELECT coalesce(sum(quantity), 0)::int FROM holdfast.stock_reserved x WHERE x.level = t.id) AS open
      FROM holdfast.stock_level t`,
  );
  const { rows } = await pool.query<Row>(
    `SELECT m.level::text, sku, location, m.version::int, quantity::int, balance::int, parts, kind, external_id AS id, origin
      FROM holdfast.stock_movement m JOIN holdfast.stock_level t ON t.id = m.level ORDER BY m.level, m.version`,
  );
  const byLevel = groups(rows, ({ level }) => level);
  for (const { level, on_hand: onHand, reserved, min_level: min, version, open } of levels) {
    const own = byLevel.get(level) ?? [];
    // Movements add up, without gaps, and each follows from the one before; at no time was there less than nothing.
    expect(sumOf(own), hint).toBe(onHand);
    expect(
      own.map((each) => each.version),
      hint,
    ).toEqual(own.map((_, i) => i + 1));
    expect(version, hint).toBe(own.length);
    let before = 0;
    for (const { quantity, balance } of own) {
      expect(balance, hint).toBe(before + quantity);
      expect(balance, hint).toBeGreaterThanOrEqual(0);
      before = balance;
    }
    expect(onHand - reserved, hint).toBeGreaterThanOrEqual(min);
    expect(reserved, hint).toBe(open);
  }
  // Each id once per level, and whole: as many movements as its call had lines.
  const byId = groups(rows, ({ id }) => id);
  for (const [, own] of byId) {
    expect(new Set(own.map(({ level }) => level)).size, hint).toBe(own.length);
    expect(own.length, hint).toBe(own[0]?.parts);
  }
  // Nothing came back that was not sold.
  const returns = groups(
    rows.filter(({ origin }) => origin !== null),
    ({ origin, level }) => `${origin} ${level}`,
  );
  for (const [, own] of returns) {
    const sale = byId.get(own[0]?.origin ?? "")?.find(({ level }) => level === own[0]?.level);
    expect(sumOf(own), hint).toBeLessThanOrEqual(-(sale?.quantity ?? 0));
  }
  // Reservations that are open have their lines, and those that were committed their movements.
  const { rows: kept } = await pool.query(
    `SELECT id, state, cardinality(levels) AS parts, until <= clock_timestamp() AS over,
      (SELECT count(*)::int FROM holdfast.stock_reserved x WHERE x.reservation = r.id) AS open FROM holdfast.stock_reservation r`,
  );
  for (const { id, state, parts, over, open } of kept) {
    if (state === "open" && !over) expect(open, hint).toBe(parts);
    if (state !== "open") expect(open, hint).toBe(0);
    expect(byId.get(`commit:${id}`)?.length ?? 0, hint).toBe(state === "committed" ? parts : 0);
  }
  // Who was told that it was done finds its movements, with the same answer as everybody.
  for (const { externalId, lines } of answers)
    for (const { sku, location, quantity, onHand, version } of lines)
      expect(
        byId.get(externalId)?.find((row) => row.sku === sku && row.location === location),
        hint,
      ).toMatchObject({ quantity, balance: onHand, version });
  expect(await shopOf(holdfast(fromPg(pool))).reconcile(), hint).toMatchObject({ ok: true });
}
