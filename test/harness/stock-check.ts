/** Of a stock after many calls: everything adds up, and who was told that something was done finds it. */
import { holdfast, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { expect } from "vitest";
import { type Answer, shopOf } from "../workers/stock-random.ts";
import { type Site, json, microseconds, ourTable } from "./sites.ts";

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

export async function checkStock(
  backend: string,
  site: Pick<Site, "database">,
  answers: readonly Answer[],
  hint: string,
): Promise<void> {
  const table = (name: string) => ourTable(backend, name);
  const levels = await execute(
    site,
    sql`SELECT t.id, on_hand, reserved, min_level, version,
  (SELECT sum(quantity) FROM ${table("stock_reserved")} x WHERE x.level = t.id) AS unsettled FROM ${table("stock_level")} t`,
  );
  const found = await execute(
    site,
    sql`SELECT m.level, t.sku, t.location, m.version, quantity, balance, parts, kind, external_id, origin
  FROM ${table("stock_movement")} m JOIN ${table("stock_level")} t ON t.id = m.level ORDER BY m.level, m.version`,
  );
  const rows = found.map((row): Row => ({
    level: String(row["level"]),
    sku: String(row["sku"]),
    location: String(row["location"]),
    version: Number(row["version"]),
    quantity: Number(row["quantity"]),
    balance: Number(row["balance"]),
    parts: Number(row["parts"]),
    kind: String(row["kind"]),
    id: String(row["external_id"]),
    origin: row["origin"] === null ? null : String(row["origin"]),
  }));
  const byLevel = groups(rows, ({ level }) => level);
  for (const each of levels) {
    const of = (column: string) => Number(each[column]);
    const [onHand, reserved] = [of("on_hand"), of("reserved")];
    const own = byLevel.get(String(each["id"])) ?? [];
    // Movements add up, without gaps, and each follows from the one before; at no time was there less than nothing.
    expect(sumOf(own), hint).toBe(onHand);
    expect(
      own.map(({ version }) => version),
      hint,
    ).toEqual(own.map((_, i) => i + 1));
    expect(of("version"), hint).toBe(own.length);
    let before = 0;
    for (const { quantity, balance } of own) {
      expect(balance, hint).toBe(before + quantity);
      expect(balance, hint).toBeGreaterThanOrEqual(0);
      before = balance;
    }
    expect(onHand - reserved, hint).toBeGreaterThanOrEqual(of("min_level"));
    expect(reserved, hint).toBe(of("unsettled"));
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
  const kept = await execute(
    site,
    sql`SELECT id, state, levels, ${microseconds(backend, "until")} AS until,
  (SELECT count(*) FROM ${table("stock_reserved")} x WHERE x.reservation = r.id) AS unsettled FROM ${table("stock_reservation")} r`,
  );
  for (const each of kept) {
    const [id, state] = [String(each["id"]), String(each["state"])];
    const [over, open] = [Number(each["until"]) / 1000 <= Date.now(), Number(each["unsettled"])];
    const parts = (json(each["levels"]) as readonly unknown[]).length;
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
  expect(await shopOf(holdfast(site.database)).reconcile(), hint).toMatchObject({ ok: true });
}
