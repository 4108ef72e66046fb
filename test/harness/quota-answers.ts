import { holdfast, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { expect } from "vitest";
import { type Answer, definitions, names, quotasOf, subjects, together } from "../workers/quota-random.ts";
import { type Line, checkLedger, linesOf } from "./quota-ledger.ts";
import { type Site, ourTable } from "./sites.ts";

/** What many were told is what the ledger says, and that is whole. Resolves to the kinds of its entries. */
export async function checkAnswers(
  backend: string,
  site: Pick<Site, "database">,
  answers: readonly Answer[],
  hint: string,
): Promise<Set<string>> {
  const all = quotasOf(holdfast(site.database));
  const kinds = new Set<string>();
  for (const subject of subjects) {
    const sets = new Map<string, Line[]>();
    for (const name of names) {
      const rows = await linesOf(backend, site, name, subject);
      const where = `${hint} ${name} of ${subject}`;
      checkLedger(definitions[name], rows, where);
      expect(await all[name].reconcile(subject), where).toMatchObject({ ok: true });
      // What is counted is what the last entry says.
      const last = rows.at(-1);
      const theirs = (table: string) =>
        sql`FROM ${ourTable(backend, table)} x WHERE x.quota = b.quota AND x.subject = b.subject`;
      const found = await execute(
        site,
        sql`SELECT version, held, credit, (SELECT sum(amount) ${theirs("quota_hold")}) AS unsettled,
  (SELECT sum(amount - spent) ${theirs("quota_grant")}) AS unspent
  FROM ${ourTable(backend, "quota_bucket")} b WHERE quota = ${name} AND subject = ${subject}`,
      );
      const buckets = found.map((row) => ({
        version: Number(row["version"]),
        held: Number(row["held"]),
        credit: Number(row["credit"]),
        open: Number(row["unsettled"]),
        left: Number(row["unspent"]),
      }));
      expect(buckets, where).toEqual([
        {
          version: last?.version,
          held: last?.held,
          credit: last?.credit,
          open: last?.held,
          left: last?.credit,
        },
      ]);
      // Who was told that it was granted finds its entry, with the same answer as everybody.
      const byId = new Map(rows.map((line) => [line.id, line]));
      for (const { id, granted, quota: of, subject: whose, amount, used, at } of answers) {
        if (of !== name || whose !== subject || !granted) continue;
        const line = byId.get(id);
        expect(line, `${where} ${id}`).toMatchObject({ kind: "consume", amount, used });
        expect(Math.floor((line?.at ?? 0) / 1000), `${where} ${id}`).toBe(at);
      }
      for (const line of rows) {
        kinds.add(line.kind);
        if (line.id.startsWith("set-")) sets.set(line.id, [...(sets.get(line.id) ?? []), line]);
      }
    }
    // All of them, or none.
    for (const [id, lines] of sets) {
      expect(lines.length, `${hint} ${id} of ${subject}`).toBe(together.length);
      expect(new Set(lines.map(({ amount }) => amount)).size, `${hint} ${id} of ${subject}`).toBe(1);
    }
  }
  return kinds;
}
