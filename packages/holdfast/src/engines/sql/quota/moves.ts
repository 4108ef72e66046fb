/** Buckets that go from one of several databases to another: on any engine, also on one that has functions of its own for the rest. */
import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import type { How } from "../../../seam/store.ts";
import { type BucketRow, isElsewhere } from "../../../quota/decide/rows.ts";
import type { BucketMove, BucketName, MovingBucket, QuotaMoves } from "../../../quota/store.ts";
import { chunksOf } from "../rows.ts";
import { type NamedBucket, type QuotaRows, nameOf } from "./rows.ts";
import { quotaBuckets, quotaGrants, quotaHolds, quotaLines } from "./tables.ts";

/** Lines that are read, and written, at once. */
const page = 500;

/** What is left of one that has gone. */
const empty = {
  used: 0,
  held: 0,
  credit: 0,
  reset: 0,
  since: undefined,
  parts: undefined,
  own_limit: undefined,
  plan: undefined,
  rolled: undefined,
} as const;

export function quotaMoves<C extends SqlConnection>(rows: QuotaRows<C>): QuotaMoves<C> {
  const { dialect } = rows.rows;

  const within = <T>(connection: C, { free, waitMs }: How, work: () => Promise<T>): Promise<T> =>
    free ? dialect.transaction(connection, waitMs, work) : dialect.inside(connection, waitMs, work);

  const named = ({ quota, subject }: NamedBucket) => rows.rows.matching(quotaBuckets, [{ quota, subject }]);

  async function changeBucket(connection: C, bucket: NamedBucket, set: Partial<BucketRow>): Promise<void> {
    await rows.rows.update(connection, quotaBuckets, named(bucket), set);
  }

  async function removeAll(connection: C, { id, quota, subject }: BucketRow): Promise<void> {
    await rows.rows.remove(connection, quotaLines, rows.rows.is(quotaLines, "bucket", id));
    for (const each of [quotaHolds, quotaGrants])
      await rows.rows.remove(connection, each, rows.rows.matching(each, [{ quota, subject }]));
  }

  return {
    async quotas(connection) {
      const names: string[] = [];
      // From one to the next, by the key: buckets are many, quotas are few.
      for (;;) {
        const last = names.at(-1);
        const [next] = await rows.rows.select(
          connection,
          quotaBuckets,
          last === undefined ? sql`1 = 1` : rows.rows.compare(quotaBuckets, "quota", ">", last),
          { columns: ["quota"], order: rows.rows.order(quotaBuckets), limit: 1 },
        );
        if (!next) return names;
        names.push(next.quota);
      }
    },

    async find(connection, buckets: readonly BucketName[]) {
      const found: (BucketRow | undefined)[] = [];
      for (const bucket of buckets) found.push(await rows.bucket(connection, bucket));
      return found.map((row) => row && { move: row.moves ?? 0, to: row.moved_to, from: row.moved_from });
    },

    number(connection, buckets, how) {
      return within(connection, how, async () => {
        const found = await rows.buckets(connection, buckets, true);
        if (found.some(isElsewhere)) return undefined;
        const numbers = found.map(({ moves = 0 }) => moves + 1);
        for (const [i, bucket] of buckets.entries())
          await changeBucket(connection, bucket, { moves: numbers[i] });
        return numbers;
      });
    },

    read(connection, moves: readonly BucketMove[], how) {
      return within(connection, how, async () => {
        const found = await rows.buckets(connection, moves, true);
        if (found.some((row, i) => isElsewhere(row) || row.moves !== moves[i]?.move)) return undefined;
        const all: MovingBucket[] = [];
        for (const bucket of found) {
          const { quota, subject } = bucket;
          const of = [{ quota, subject }];
          const current = { locking: "current" as const };
          all.push({
            bucket,
            holds: await rows.rows.select(
              connection,
              quotaHolds,
              rows.rows.matching(quotaHolds, of),
              current,
            ),
            grants: await rows.rows.select(
              connection,
              quotaGrants,
              rows.rows.matching(quotaGrants, of),
              current,
            ),
          });
        }
        return all;
      });
    },

    async lines(connection, bucket, from) {
      const row = await rows.bucket(connection, bucket);
      return row ? rows.linesFrom(connection, row.id, from, page, false) : [];
    },

    arrive(connection, { bucket, holds, grants }, from, how) {
      return within(connection, how, async () => {
        const [there] = (await rows.buckets(connection, [bucket], true)) as [BucketRow];
        // One that was made and never used is nothing.
        const counts = !isElsewhere(there) && there.version > 0;
        if (counts || (there.moves ?? 0) >= (bucket.moves ?? 0)) return false;
        await removeAll(connection, there);
        const { id: _id, quota: _quota, subject: _subject, ...values } = bucket;
        await changeBucket(connection, bucket, { ...values, moved_to: undefined, moved_from: from });
        for (const some of chunksOf(holds, page)) await rows.rows.insert(connection, quotaHolds, some);
        for (const some of chunksOf(grants, page)) await rows.rows.insert(connection, quotaGrants, some);
        return true;
      });
    },

    follow(connection, bucket, lines, how) {
      return within(connection, how, async () => {
        const there = await rows.bucket(connection, bucket);
        if (!there) throw new Error(`${nameOf(bucket)}: lines without a bucket`);
        for (const some of chunksOf(lines, page))
          await rows.rows.insert(
            connection,
            quotaLines,
            some.map((line) => ({ ...line, bucket: there.id })),
          );
      });
    },

    leave(connection, { bucket }, to, how) {
      return within(connection, how, async () => {
        await removeAll(connection, bucket);
        // Another version: who has read the one before, and compares, finds that it has changed.
        const left = { ...empty, version: bucket.version + 1, moved_to: to, moved_from: undefined };
        await changeBucket(connection, bucket, left);
      });
    },

    settle(connection, moves, how) {
      return within(connection, how, async () => {
        for (const { quota, subject, move } of moves) {
          const [row] = await rows.buckets(connection, [{ quota, subject }], true);
          if (row?.moves === move && row.moved_from !== undefined)
            await changeBucket(connection, row, { moved_from: undefined });
        }
      });
    },
  };
}
