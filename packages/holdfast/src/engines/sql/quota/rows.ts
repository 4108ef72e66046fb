/** What decisions about quotas read, and how what they come to is written. */
import type { SqlConnection } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import {
  type BucketRow,
  type CountedUses,
  type GrantRow,
  type HoldRow,
  type LineRow,
  type QuotaWrites,
  compareNames,
} from "../../../quota/decide/rows.ts";
import { countedKinds } from "../../../quota/decide/windows.ts";
import type { BucketName } from "../../../quota/store.ts";
import type { StoreDialect } from "../dialect.ts";
import { quotaBuckets, quotaGrants, quotaHolds, quotaLines } from "./tables.ts";
import { StoredRows } from "../rows.ts";
import { RowsMissing } from "../exchange.ts";

export type NamedBucket = BucketName;

/** In one statement: values of a statement are limited, and who asks for many by name at once may be read a whole table. */
const atOnce = 100;

/** What is left of a line's use in its window, as `leftOf` says it. */
const left = (() => {
  const amount = sql`${sql.id("amount")}`;
  const delta = sql`coalesce(${sql.id("delta")}, ${amount})`;
  const back = sql`coalesce(${sql.id("refunded")}, 0) - (${amount} - ${delta})`;
  return sql`(${delta} - CASE WHEN ${back} > 0 THEN ${back} ELSE 0 END)`;
})();

/**
 * How buckets that are missing are made: by a transaction of their own ({@link RowsMissing}), or in the caller's transaction, which cannot
 * begin again: there each bucket is locked or made before the next one, so that all are locked in everybody's order.
 */
export type MissingBuckets = "apart" | "in turn";

export class QuotaRows<C extends SqlConnection> {
  readonly rows: StoredRows<C>;

  constructor(dialect: StoreDialect<C>) {
    this.rows = new StoredRows(dialect);
  }

  /** Returns one row per name, in that order, and makes the missing ones. `locked`: nobody else changes them until the end. */
  async buckets(
    connection: C,
    named: readonly NamedBucket[],
    locked: boolean | MissingBuckets,
    moments: number[] = [],
  ): Promise<readonly BucketRow[]> {
    const ordered = named.toSorted(compareNamed);
    const found = new Map<string, BucketRow>();
    const read = async (wanted: readonly NamedBucket[]) => {
      for (const some of chunks(wanted)) {
        const where = this.rows.matching(quotaBuckets, some.map(nameOnly));
        const locking = locked ? "update" : undefined;
        const order = this.rows.order(quotaBuckets);
        const options = { order, locking, moments } as const;
        for (const row of await this.rows.select(connection, quotaBuckets, where, options))
          found.set(nameOf(row), row);
      }
    };
    const present = (each: NamedBucket): BucketRow => {
      const row = found.get(nameOf(each));
      if (!row) throw this.rows.hidden(quotaBuckets);
      return row;
    };
    const zero = { used: 0, held: 0, credit: 0, version: 0, reset: 0 };
    const make = async (wanted: readonly NamedBucket[]) => {
      for (const each of wanted)
        await this.rows.insertMissing(connection, quotaBuckets, [{ ...nameOnly(each), ...zero }]);
      await read(wanted);
      wanted.forEach(present);
    };
    for (const some of locked === "in turn" ? ordered.map((each) => [each]) : [ordered]) {
      await read(some);
      const missing = some.filter((each) => !found.has(nameOf(each)));
      if (locked === "apart" && missing.length > 0)
        throw new RowsMissing(missing.map(nameOf), () => make(missing));
      await make(missing);
    }
    return named.map(present);
  }

  /** Without making it. */
  async bucket(connection: C, named: NamedBucket, locked = false): Promise<BucketRow | undefined> {
    const where = this.rows.matching(quotaBuckets, [nameOnly(named)]);
    const locking = locked ? ("update" as const) : undefined;
    const [row] = await this.rows.select(connection, quotaBuckets, where, { locking });
    return row;
  }

  /** By bucket, then by id. */
  async lines(
    connection: C,
    wanted: readonly { readonly bucket: number; readonly id: string }[],
    current: boolean,
  ): Promise<ReadonlyMap<number, ReadonlyMap<string, LineRow>>> {
    const found = new Map<number, Map<string, LineRow>>();
    for (const { bucket } of wanted) found.set(bucket, new Map());
    for (const some of chunks(wanted)) {
      const where = this.rows.matching(quotaLines, some);
      for (const line of await this.#lines(connection, where, { current }))
        found.get(line.bucket)?.set(line.id, line);
    }
    return found;
  }

  /** In the order of their versions, from one on; some of them. */
  async linesFrom(
    connection: C,
    bucket: number,
    from: number,
    most: number,
    current: boolean,
  ): Promise<readonly LineRow[]> {
    const where = sql`${this.rows.is(quotaLines, "bucket", bucket)} AND ${this.rows.compare(quotaLines, "version", ">=", from)}`;
    return this.#lines(connection, where, { order: sql`${sql.id("version")}`, limit: most, current });
  }

  /** Newest first, below a version. */
  async linesBelow(
    connection: C,
    bucket: number,
    below: number | undefined,
    most: number,
  ): Promise<readonly LineRow[]> {
    const older =
      below === undefined ? sql`` : sql` AND ${this.rows.compare(quotaLines, "version", "<", below)}`;
    const where = sql`${this.rows.is(quotaLines, "bucket", bucket)}${older}`;
    return this.#lines(connection, where, { order: sql`${sql.id("version")} DESC`, limit: most });
  }

  async #lines(
    connection: C,
    where: Statement,
    { current = false, ...options }: { current?: boolean; order?: Statement; limit?: number },
  ): Promise<readonly LineRow[]> {
    const locking = current ? ("current" as const) : undefined;
    const lines = await this.rows.select(connection, quotaLines, where, { ...options, locking });
    return lines.map((line) => ({ ...line, drains: line.drains as LineRow["drains"] }));
  }

  /** Those that are over, and those with these ids. */
  async holds(
    connection: C,
    { quota, subject }: NamedBucket,
    { now, ids }: { readonly now: number; readonly ids: readonly string[] },
    current: boolean,
  ): Promise<readonly HoldRow[]> {
    const over = this.rows.compare(quotaHolds, "until", "<=", now);
    const named = ids.map((id) => this.rows.is(quotaHolds, "id", id));
    const which = sql`(${sql.join([over, ...named], " OR ")})`;
    const where = sql`${this.rows.matching(quotaHolds, [{ quota, subject }])} AND ${which}`;
    return this.rows.select(connection, quotaHolds, where, { locking: current ? "current" : undefined });
  }

  /** Those that are over or not spent, or all. */
  async grants(
    connection: C,
    { quota, subject }: NamedBucket,
    { now, all }: { readonly now: number; readonly all: boolean },
    current: boolean,
  ): Promise<readonly GrantRow[]> {
    const over = this.rows.compare(quotaGrants, "until", "<=", now);
    const which = all ? sql`` : sql` AND (${over} OR ${sql.id("spent")} < ${sql.id("amount")})`;
    const where = sql`${this.rows.matching(quotaGrants, [{ quota, subject }])}${which}`;
    return this.rows.select(connection, quotaGrants, where, { locking: current ? "current" : undefined });
  }

  /** What holds, and what is left of grants, come to: of those that end after a moment, or of all. */
  async sums(
    connection: C,
    { quota, subject }: NamedBucket,
    after: number | undefined,
    current: boolean,
  ): Promise<{ readonly held: number; readonly credit: number }> {
    const total = async (of: typeof quotaHolds | typeof quotaGrants, amount: Statement) => {
      const later = after === undefined ? sql`` : sql` AND ${this.rows.compare(of, "until", ">", after)}`;
      return this.#total(
        connection,
        of.name,
        amount,
        sql`${this.rows.matching(of, [{ quota, subject }])}${later}`,
        current,
      );
    };
    return {
      held: await total(quotaHolds, sql`${sql.id("amount")}`),
      credit: await total(quotaGrants, sql`${sql.id("amount")} - ${sql.id("spent")}`),
    };
  }

  /** What an exact sliding window counts, as `counts` says it. */
  async counted(connection: C, bucket: number, span: RowSpan, current: boolean): Promise<number> {
    const where = await this.#counting(connection, bucket, span, current);
    return this.#total(connection, quotaLines.name, left, where, current);
  }

  /** The same, one by one. */
  async uses(
    connection: C,
    bucket: number,
    span: RowSpan,
    current: boolean,
  ): Promise<readonly CountedUses[]> {
    const where = await this.#counting(connection, bucket, span, current);
    const { dialect } = this.rows;
    const rows = await this.rows.look(
      connection,
      sql`SELECT ${dialect.read("moment", sql`${sql.id("at")}`)} AS ${sql.id("at")}, ${left} AS ${sql.id("rest")} FROM ${dialect.table(quotaLines.name)} WHERE ${this.rows.reading(where)} ORDER BY ${sql.id("version")}${current ? sql` ${dialect.locking("current", connection)}` : sql``}`,
    );
    return rows.map((row) => ({ at: Number(row["at"]), left: Number(row["rest"]) }));
  }

  /** The lines after the newest that ends the count: backwards by the key, so that what was before it costs nothing. */
  async #counting(
    connection: C,
    bucket: number,
    { per, now }: RowSpan,
    current: boolean,
  ): Promise<Statement> {
    const ours = this.rows.is(quotaLines, "bucket", bucket);
    const ends = sql`(${this.rows.compare(quotaLines, "at", "<=", now - per)} OR ${this.rows.is(quotaLines, "kind", "reset")})`;
    const [last] = await this.#lines(connection, sql`${ours} AND ${ends}`, {
      order: sql`${sql.id("version")} DESC`,
      limit: 1,
      current,
    });
    const kinds = countedKinds.map((kind) => this.rows.is(quotaLines, "kind", kind));
    return sql`${ours} AND ${this.rows.compare(quotaLines, "version", ">", last?.version ?? 0)} AND (${sql.join(kinds, " OR ")})`;
  }

  async #total(
    connection: C,
    of: string,
    amount: Statement,
    where: Statement,
    current: boolean,
  ): Promise<number> {
    const { dialect } = this.rows;
    const rows = await this.rows.look(
      connection,
      sql`SELECT coalesce(sum(${amount}), 0) AS ${sql.id("total")} FROM ${dialect.table(of)} WHERE ${this.rows.reading(where)}${current ? sql` ${dialect.locking("current", connection)}` : sql``}`,
    );
    return Number(rows[0]?.["total"]);
  }

  /** `unless`: a condition that has to hold besides; false: it does not, of one of them. */
  async writeBucket(connection: C, row: BucketRow, also?: Statement): Promise<boolean> {
    const { quota, subject, ...set } = counted(row);
    const where = this.rows.matching(quotaBuckets, [{ quota, subject }]);
    const changed = await this.rows.update(
      connection,
      quotaBuckets,
      also ? sql`${where} AND ${also}` : where,
      set,
    );
    return changed === 1;
  }

  /** Those that are locked: the buckets of each quota in one statement. One by one they were most of what a batch costs. */
  async writeBuckets(connection: C, buckets: readonly BucketRow[]): Promise<void> {
    const quotas = Map.groupBy(buckets, ({ quota }) => quota);
    for (const [quota, all] of quotas)
      for (const some of chunks(all)) {
        const rows = some.map((row) => {
          const { quota: _, ...set } = counted(row);
          return set;
        });
        await this.rows.updateAll(
          connection,
          quotaBuckets,
          "subject",
          rows,
          this.rows.is(quotaBuckets, "quota", quota),
        );
      }
  }

  /** All but the buckets. */
  async write(connection: C, { lines, holds, grants }: QuotaWrites): Promise<void> {
    const { rows } = this;
    for (const [from, gone] of [
      [quotaHolds, holds.delete],
      [quotaGrants, grants.delete],
    ] as const)
      for (const some of chunks(gone)) await rows.removeRows(connection, from, some);
    for (const grant of grants.update)
      await rows.update(connection, quotaGrants, rows.matching(quotaGrants, [keyOf(grant)]), {
        spent: grant.spent,
      });
    for (const { bucket, version, refunded } of lines.update)
      await rows.update(connection, quotaLines, rows.matching(quotaLines, [{ bucket, version }]), {
        refunded,
      });
    for (const some of chunks(lines.insert)) await rows.insert(connection, quotaLines, some);
    for (const some of chunks(holds.insert)) await rows.insert(connection, quotaHolds, some);
    for (const some of chunks(grants.insert)) await rows.insert(connection, quotaGrants, some);
  }
}

/** Of an exact sliding window, in microseconds. */
export interface RowSpan {
  readonly per: number;
  readonly now: number;
}

/** All but what stays as it is while it counts here; how far it is rolled up may change meanwhile, without a version. */
export function counted(bucket: BucketRow) {
  const { id: _id, moves: _moves, moved_to: _to, moved_from: _from, rolled: _rolled, ...row } = bucket;
  return row;
}

export const nameOf = ({ quota, subject }: NamedBucket): string => `${quota}\0${subject}`;

const nameOnly = ({ quota, subject }: NamedBucket): NamedBucket => ({ quota, subject });

const keyOf = ({ quota, subject, id }: NamedBucket & { readonly id: string }) => ({ quota, subject, id });

/** The order in which buckets are locked, by everybody. */
export function compareNamed(a: NamedBucket, b: NamedBucket): number {
  return compareNames(a.quota, b.quota) || compareNames(a.subject, b.subject);
}

function* chunks<T>(items: readonly T[]): Generator<readonly T[]> {
  for (let from = 0; from < items.length; from += atOnce) yield items.slice(from, from + atOnce);
}
