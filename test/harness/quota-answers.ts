import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import type { Pool } from "pg";
import { expect } from "vitest";
import { type Answer, definitions, names, quotasOf, subjects, together } from "../workers/quota-random.ts";
import { type Line, checkLedger, linesQuery } from "./quota-ledger.ts";

/** What many were told is what the ledger says, and that is whole. Resolves to the kinds of its entries. */
export async function checkAnswers(
  pool: Pool,
  answers: readonly Answer[],
  hint: string,
): Promise<Set<string>> {
  const all = quotasOf(holdfast(fromPg(pool)));
  const kinds = new Set<string>();
  for (const subject of subjects) {
    const sets = new Map<string, Line[]>();
    for (const name of names) {
      const { rows } = await pool.query<Line>(linesQuery, [name, subject]);
      const where = `${hint} ${name} of ${subject}`;
      checkLedger(definitions[name], rows, where);
      expect(await all[name].reconcile(subject), where).toMatchObject({ ok: true });
      // What is counted is what the last entry says.
      const last = rows.at(-1);
      const { rows: buckets } = await pool.query(
        `SELECT version::int, held::int, credit::int,
          (SELECT coalesce(sum(amount), 0)::int FROM holdfast.quota_hold h WHERE h.quota = b.quota AND h.subject = b.subject) AS open,
          (SELECT coalesce(sum(amount - spent), 0)::int FROM holdfast.quota_grant g WHERE g.quota = b.quota AND g.subject = b.subject) AS left
          FROM holdfast.quota_bucket b WHERE quota = $1 AND subject = $2`,
        [name, subject],
      );
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
