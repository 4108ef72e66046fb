import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import {
  type LineRow,
  deltaOf,
  isElsewhere,
  milliseconds,
  never,
  standingOf,
  unlimited,
} from "../../../quota/decide/rows.ts";
import type { QuotaEntry, QuotaLists } from "../../../quota/store.ts";
import type { QuotaRows } from "./rows.ts";
import { quotaBuckets, quotaGrants } from "./tables.ts";

/** So many are counted. */
const mostCounted = 100_000;

const here = sql`${sql.id("moved_to")} IS NULL AND ${sql.id("moved_from")} IS NULL`;

export function quotaLists<C extends SqlConnection>(rows: QuotaRows<C>): QuotaLists<C> {
  return {
    async names(connection) {
      const { dialect } = rows.rows;
      const found = await rows.rows.look(
        connection,
        sql`SELECT ${sql.id("quota")} AS ${sql.id("name")}, count(*) AS ${sql.id("subjects")} FROM ${dialect.table(quotaBuckets.name)} WHERE ${rows.rows.reading(here)} GROUP BY ${sql.id("quota")} ORDER BY ${sql.id("quota")}`,
      );
      return found.map((row) => ({
        name: String(row["name"]),
        subjects: Math.min(mostCounted, Number(row["subjects"])),
      }));
    },

    async subjects(connection, quota, { after, most, of }) {
      const which = of
        ? rows.rows.matching(
            quotaBuckets,
            of.map((subject) => ({ subject })),
          )
        : rows.rows.compare(quotaBuckets, "subject", ">", after ?? "");
      const where = sql`${rows.rows.is(quotaBuckets, "quota", quota)} AND ${which} AND ${here}`;
      const order = rows.rows.order(quotaBuckets);
      const found = await rows.rows.select(connection, quotaBuckets, where, { order, limit: most });
      return found.map(({ subject, used, held, credit, own_limit, plan, version, since, parts }) => ({
        subject,
        used,
        held,
        credit,
        limit: orInfinity(own_limit),
        plan,
        version,
        since: since === undefined ? undefined : milliseconds(since),
        parts: parts && parts.length - 1,
      }));
    },

    async grants(connection, bucket) {
      const row = await rows.bucket(connection, bucket);
      if (!row || isElsewhere(row)) return [];
      const { quota, subject } = bucket;
      const order = sql.join(["priority", "until", "id"].map((column) => sql`${sql.id(column)}`));
      const where = rows.rows.matching(quotaGrants, [{ quota, subject }]);
      const found = await rows.rows.select(connection, quotaGrants, where, { order });
      const now = await rows.rows.clock(connection);
      const wanted = found.map(({ id }) => ({ bucket: row.id, id }));
      const lines = (await rows.lines(connection, wanted, false)).get(row.id);
      return found.map(({ id, amount, spent, priority, until }) => {
        const at = lines?.get(id)?.at;
        return {
          id,
          amount,
          spent,
          priority,
          until:
            until === never
              ? undefined
              : // Later ones are not exact to the microsecond.
                until < never
                ? milliseconds(until)
                : Math.round(milliseconds(until)),
          over: until <= now,
          at: at === undefined ? undefined : milliseconds(at),
        };
      });
    },

    async entries(connection, bucket, { below, most }) {
      const row = await rows.bucket(connection, bucket);
      return row && !isElsewhere(row)
        ? (await rows.linesBelow(connection, row.id, below, most)).map(entryOf)
        : [];
    },
  };
}

function entryOf(line: LineRow): QuotaEntry {
  const { kind, id, entry, version, first, forgotten, refunded, details } = line;
  return {
    ...standingOf(line),
    kind,
    id,
    of: entry,
    amount: orInfinity(line.amount) ?? 0,
    delta: deltaOf(line),
    first: first ?? version,
    forgotten: forgotten ?? 0,
    refunded: refunded ?? 0,
    details: details as QuotaEntry["details"],
  };
}

const orInfinity = (amount: number | undefined): number | undefined =>
  amount !== undefined && amount >= unlimited ? Infinity : amount;
