/** Tables of quotas. */
import { type Statement, own, sql } from "../../../seam/sql.ts";

/**
 * No index on what changes, and half of each page left free, so that an update stays on its page (HOT).
 * `since`: when what `used` counts began: the window, the last refill, the newest of the `parts`, the last entry.
 */
export const quotaTables: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("quota_bucket")} (
  id bigint GENERATED ALWAYS AS IDENTITY,
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  used bigint NOT NULL DEFAULT 0 CHECK (used >= 0),
  held bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
  credit bigint NOT NULL DEFAULT 0 CHECK (credit >= 0),
  version bigint NOT NULL DEFAULT 0,
  -- The version that began anew: what was used before it is not to be given back.
  reset bigint NOT NULL DEFAULT 0,
  since timestamptz,
  parts bigint[],
  own_limit bigint,
  plan text,
  PRIMARY KEY (quota, subject)
) WITH (fillfactor = 50)`,
  // The ledger as it is stored: the bucket by number, and NULL for what is usual. With the bucket's names in each line
  // and in both indexes, and every figure written out, a line took twice the room and a third more time.
  sql`CREATE TABLE IF NOT EXISTS ${own("quota_line")} (
  bucket bigint NOT NULL,
  version bigint NOT NULL,
  amount bigint NOT NULL,
  used bigint NOT NULL,
  at timestamptz NOT NULL,
  max bigint,
  since timestamptz,
  delta bigint,
  forgotten bigint,
  held bigint,
  credit bigint,
  refunded bigint,
  first bigint,
  kind text NOT NULL,
  id text COLLATE "C" NOT NULL,
  entry text COLLATE "C",
  drains jsonb,
  details jsonb,
  PRIMARY KEY (bucket, version),
  UNIQUE (bucket, id)
)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("quota_hold")} (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  amount bigint NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (quota, subject, id)
)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("quota_grant")} (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  amount bigint NOT NULL,
  spent bigint NOT NULL DEFAULT 0 CHECK (spent >= 0 AND spent <= amount),
  priority integer NOT NULL,
  until timestamptz NOT NULL DEFAULT 'infinity',
  PRIMARY KEY (quota, subject, id)
)`,
];

/**
 * Since migration 10. rolled: the version of the bucket's roll-up, below which there are no lines. Looking for the first
 * line from 0 on steps over every one that was rolled up and not vacuumed yet, once for each 2,000 that are rolled up.
 */
export const quotaHistory: readonly Statement[] = [
  sql`ALTER TABLE ${own("quota_bucket")} ADD COLUMN IF NOT EXISTS rolled bigint`,
];

/**
 * Since migration 14. Of a bucket that goes to another of several databases: the number of its last move; the database that it
 * counts on instead; the one that it comes from, until that one says so. The row of one that has gone stays: whoever would make it
 * anew meets it, in a transaction with an old snapshot too.
 */
export const quotaMoved: readonly Statement[] = [
  sql`ALTER TABLE ${own("quota_bucket")} ADD COLUMN IF NOT EXISTS moves bigint,
  ADD COLUMN IF NOT EXISTS moved_to integer, ADD COLUMN IF NOT EXISTS moved_from integer`,
];
