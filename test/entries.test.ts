/** The ledger of quotas and the movements of stock in SQL: the same columns, and the same rows, on every engine. */
import { holdfast, sql } from "holdfast";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { execute } from "holdfast/testing";
import { describe, expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";

const chosen = ["pg", "mysql2 on MySQL", "mysql2 on MariaDB", "better-sqlite3", "libsql", "duckdb"];

/** On PostgreSQL they are in a schema, elsewhere they have it in their names. */
const view = (backend: string, name: string) =>
  backend === "pg" ? sql`${sql.id("holdfast", name)}` : sql`${sql.id(`holdfast_${name}`)}`;

const columns = {
  quota_entry:
    "quota subject version kind id entry amount delta forgotten refunded used held credit max since at first drains details",
  stock_entry:
    "book sku location version kind quantity balance at source external_id reference_type reference_id user_id note origin",
};

describe.each(backends.filter(({ name }) => chosen.includes(name)))("$name", (backend: Backend) => {
  test("has the views, with the names of what was moved", async ({ skip }) => {
    const why = missing(backend);
    skip(why !== undefined, why);
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database);
    try {
      await hf.migrate();
      const before = Date.now();
      const credits = quota(hf, { name: "credits", limit: 0 });
      for (const subject of ["Ada", "ada"]) await credits.grant(subject, 10);
      await credits.consume("Ada", 4);
      const shelf = stock(hf, { name: "articles" });
      await shelf.increase("Käse", 3);
      await shelf.decrease("Käse", 1, { source: "ORDER", reference: { type: "order", id: "7" } });

      const ask = (text: typeof columns.quota_entry, from: keyof typeof columns) =>
        execute(
          site,
          sql`SELECT ${sql.join(text.split(" ").map((name) => sql.id(name)))} FROM ${view(backend.name, from)} ORDER BY version`,
        );
      for (const from of ["quota_entry", "stock_entry"] as const) {
        expect((await ask(columns[from], from)).length).toBeGreaterThan(1);
        // A date and time of MySQL's has no zone, and clients take it for one of theirs.
        const shown = backend.name.includes(" on ") ? sql`CONCAT(at, 'Z')` : sql`${sql.id("at")}`;
        for (const row of await execute(
          site,
          sql`SELECT ${shown} AS ${sql.id("at")} FROM ${view(backend.name, from)}`,
        )) {
          const at = typeof row["at"] === "string" ? row["at"] : String(row["at"] ?? "");
          // DuckDB's client hands out an object that is written without `T` and with an offset.
          const moment = row["at"] instanceof Date ? row["at"] : new Date(at.replace(/([+-]\d\d)$/, "$1:00"));
          expect(Math.abs(moment.getTime() - before), `${from}: ${at}`).toBeLessThan(600_000);
        }
      }
      const ledger = await execute(
        site,
        sql`SELECT subject, kind, amount, delta, credit, used FROM ${view(backend.name, "quota_entry")} WHERE quota = 'credits' AND subject = 'Ada' ORDER BY version`,
      );
      const plain = (rows: readonly Readonly<Record<string, unknown>>[]) =>
        rows.map((row) => Object.values(row).map((value) => (value === null ? null : String(value))));
      expect(plain(ledger)).toEqual([
        ["Ada", "grant", "10", "0", "10", "0"],
        ["Ada", "consume", "4", "0", "6", "0"],
      ]);
      const movements = await execute(
        site,
        sql`SELECT sku, location, kind, quantity, balance, source, reference_id FROM ${view(backend.name, "stock_entry")} WHERE book = 'articles' AND sku = 'Käse' ORDER BY version`,
      );
      expect(plain(movements)).toEqual([
        ["Käse", "main", "apply", "3", "3", expect.any(String), null],
        ["Käse", "main", "apply", "-1", "2", "ORDER", "7"],
      ]);
      // Once more: nothing is to be done.
      expect(await hf.migrate()).toEqual([]);
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  });
});

test("the backends are there", () => {
  expect(backends.map(({ name }) => name)).toEqual(expect.arrayContaining(chosen));
});
