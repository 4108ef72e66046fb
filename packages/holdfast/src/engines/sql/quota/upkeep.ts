import type { SqlConnection } from "../../../seam/database.ts";
import { UnsupportedError } from "../../../seam/errors.ts";
import { sql } from "../../../seam/sql.ts";
import type { How } from "../../../seam/store.ts";
import { type Checked, QuotaLedger, repair as repaired } from "../../../quota/decide/check.ts";
import { decideRollUp } from "../../../quota/decide/roll-up.ts";
import { type BucketRow, isElsewhere, milliseconds } from "../../../quota/decide/rows.ts";
import { isLate } from "../../../quota/decide/windows.ts";
import type {
  Bucket,
  Definition,
  Elsewhere,
  Late,
  QuotaUpkeep,
  Reconciled,
  RollUp,
} from "../../../quota/store.ts";
import type { NamedBucket, QuotaRows } from "./rows.ts";
import { quotaBuckets, quotaLines } from "./tables.ts";
import type { NewRow } from "../table.ts";

/** Lines that are read at once. */
const page = 1000;
/** How often a ledger is read that somebody goes on with meanwhile, before everybody has to wait. */
const tries = 3;
/** Buckets that are looked at in one call. */
const mostBuckets = 1000;

interface Repairing {
  readonly definition: Definition;
  readonly bucket: Omit<Bucket, "definition">;
  readonly repair: NonNullable<Parameters<QuotaUpkeep<never>["reconcile"]>[3]>;
}

export function quotaUpkeep<C extends SqlConnection>(rows: QuotaRows<C>): QuotaUpkeep<C> {
  const { dialect } = rows.rows;

  const within = <T>(connection: C, { free, waitMs }: How, work: () => Promise<T>): Promise<T> =>
    free ? dialect.transaction(connection, waitMs, work) : dialect.inside(connection, waitMs, work);

  /** `current`: the bucket is locked, and a snapshot of the caller's may be older than its lines. */
  async function check(
    connection: C,
    row: BucketRow,
    { rule }: Definition,
    current: boolean,
  ): Promise<Checked> {
    const ledger = new QuotaLedger(row, rule);
    for (let from = 0; ;) {
      const lines = await rows.linesFrom(connection, row.id, from, page, current);
      for (const line of lines) ledger.add(line);
      const last = lines.at(-1);
      if (!last || lines.length < page) break;
      from = last.version + 1;
    }
    return ledger.checked(await rows.sums(connection, row, undefined, current));
  }

  /** Nobody has to wait for it, unless somebody writes all the time. */
  async function look(
    connection: C,
    definition: Definition,
    bucket: NamedBucket,
    how: How,
  ): Promise<Reconciled | Elsewhere> {
    const found = ({ findings, entries }: Checked) => ({ findings, entries, repaired: false });
    for (let i = 0; i < tries; i++) {
      const row = await rows.bucket(connection, bucket);
      if (!row) return { findings: [], entries: 0, repaired: false };
      if (isElsewhere(row)) return { elsewhere: true };
      const checked = await check(connection, row, definition, false);
      const after = await rows.bucket(connection, bucket);
      if (after?.version === row.version && after.rolled === row.rolled) return found(checked);
    }
    return within(connection, how, async () => {
      const row = (await rows.bucket(connection, bucket, true)) as BucketRow;
      if (isElsewhere(row)) return { elsewhere: true };
      return found(await check(connection, row, definition, true));
    });
  }

  async function mend(
    connection: C,
    { definition, bucket, repair }: Repairing,
  ): Promise<Reconciled | Late | Elsewhere> {
    const row = await rows.bucket(connection, bucket, true);
    const now = await rows.rows.clock(connection);
    const { rule } = definition;
    if (isLate(rule, now)) return { late: milliseconds(now) };
    if (!row) return { findings: [], entries: 0, repaired: false };
    if (isElsewhere(row)) return { elsewhere: true };
    const before = (await rows.lines(connection, [{ bucket: row.id, id: repair.id }], true)).get(row.id);
    const noted = before?.get(repair.id)?.details as { metadata?: Reconciled } | undefined;
    if (noted?.metadata) return { ...noted.metadata, repaired: true };
    const checked = await check(connection, row, definition, true);
    const { findings, entries } = checked;
    if (findings.length === 0) return { findings, entries, repaired: false };
    const span = rule.window === "log" ? { per: rule.per, now } : undefined;
    const counted = span ? await rows.counted(connection, row.id, span, true) : 0;
    const writes = repaired(row, checked, { ...repair, now, counted }, definition, bucket.limit);
    if (!writes)
      throw new UnsupportedError(
        `quota ${bucket.quota} of ${bucket.subject} has a window that slides, which is what its entries say: trust the ledger`,
      );
    await rows.writeBuckets(connection, writes.buckets.update);
    await rows.write(connection, writes);
    return { findings, entries, repaired: true };
  }

  /** Some lines of one bucket. Undefined: somebody has it, and it was not to be waited for. */
  async function rollUpOne(
    connection: C,
    { quota, subject }: NamedBucket,
    { before, most, wait }: { readonly before: number; readonly most: number; readonly wait: boolean },
  ): Promise<{ readonly gone: number; readonly broken: boolean; readonly more: boolean } | undefined> {
    const where = rows.rows.matching(quotaBuckets, [{ quota, subject }]);
    const locking = wait ? ("update" as const) : ("skip" as const);
    const [bucket] = await rows.rows.select(connection, quotaBuckets, where, { locking });
    if (!bucket) return undefined;
    const lines = await rows.linesFrom(connection, bucket.id, bucket.rolled ?? 0, most + 1, true);
    const decided = decideRollUp({ bucket, lines }, before, most);
    if (decided.kind !== "rolled up") return { gone: 0, broken: decided.kind === "broken", more: false };
    const { line, from, gone } = decided;
    const old = sql`${rows.rows.is(quotaLines, "bucket", bucket.id)} AND ${rows.rows.compare(quotaLines, "version", ">=", from)} AND ${rows.rows.compare(quotaLines, "version", "<=", line.version)}`;
    await rows.rows.remove(connection, quotaLines, old);
    await rows.rows.insert(connection, quotaLines, [line as NewRow<typeof quotaLines>]);
    await rows.rows.update(connection, quotaBuckets, where, { rolled: line.version });
    const [next] = await rows.linesFrom(connection, bucket.id, line.version + 1, 1, true);
    return {
      gone,
      broken: false,
      more: next !== undefined && next.at < before && next.version < bucket.version,
    };
  }

  async function isOld(connection: C, { id, rolled }: BucketRow, before: number): Promise<boolean> {
    const lines = await rows.linesFrom(connection, id, rolled ?? 0, 2, false);
    return lines.some(({ kind, at }) => kind !== "rollup" && at < before);
  }

  return {
    reconcile(connection, definition, bucket, repair, how) {
      if (!repair) return look(connection, definition, bucket, how);
      return within(connection, how, () => mend(connection, { definition, bucket, repair }));
    },

    async rollUp(connection, quota, what: RollUp, how) {
      const now = await rows.rows.clock(connection);
      const before = Math.min((what.before ?? Infinity) * 1000, now - what.ageMs * 1000);
      const where = sql`${rows.rows.is(quotaBuckets, "quota", quota)} AND ${rows.rows.compare(quotaBuckets, "subject", ">=", what.from ?? "")}`;
      const order = rows.rows.order(quotaBuckets);
      const buckets = await rows.rows.select(connection, quotaBuckets, where, {
        order,
        limit: mostBuckets + 1,
      });
      const broken: string[] = [];
      let gone = 0;
      let locked = false;
      const answer = (next: string | undefined) => ({ before: milliseconds(before), gone, next, broken });
      for (const [i, bucket] of buckets.entries()) {
        const { subject } = bucket;
        if (gone >= what.most || i === mostBuckets) return answer(subject);
        if (isElsewhere(bucket) || !(await isOld(connection, bucket, before))) continue;
        // In the caller's transaction only the first is waited for, with nothing in hand: others may want both.
        const wait = how.free || !locked;
        const one = { before, most: what.most, wait };
        const done = await within(connection, how, () => rollUpOne(connection, bucket, one));
        locked = true;
        if (!done) return answer(subject);
        gone += done.gone;
        if (done.broken) broken.push(subject);
        if (done.more) return answer(subject);
      }
      return answer(undefined);
    },
  };
}
