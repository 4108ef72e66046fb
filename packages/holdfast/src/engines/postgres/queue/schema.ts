/**
 * Tables of queues. What waits is only inserted and deleted, never updated; what is worked on is one row for each batch
 * that was claimed (a lease), whose number is the fence. A lease has the jobs themselves in it, as text that the worker
 * reads as it stands: [[id, attempt, priority, at, key, group, payload], …].
 */
import { type Statement, own, sql } from "../../../seam/sql.ts";

/** Rows come and go: what is dead has to be swept up soon, and by the count, whatever the size of the table. */
const busy = sql.raw(
  "WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0)",
);

export const queueTables: readonly Statement[] = [
  // `attempts`: how often a job runs at the most; the rest limits its groups.
  sql`CREATE TABLE IF NOT EXISTS ${own("queue")} (
  id integer GENERATED ALWAYS AS IDENTITY,
  name text COLLATE "C" PRIMARY KEY,
  paused boolean NOT NULL DEFAULT false,
  attempts smallint NOT NULL DEFAULT 1,
  most integer,
  group_most integer,
  group_rate integer,
  group_per bigint,
  ordered boolean NOT NULL DEFAULT false
)`,
  sql`CREATE SEQUENCE IF NOT EXISTS ${own("queue_job_id")}`,
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_ready")} (
  queue integer NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  id bigint NOT NULL,
  at timestamptz NOT NULL,
  key text COLLATE "C",
  payload text NOT NULL,
  PRIMARY KEY (queue, priority, id)
) ${busy}`,
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_delayed")} (
  queue integer NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  id bigint NOT NULL,
  at timestamptz NOT NULL,
  run_at timestamptz NOT NULL,
  key text COLLATE "C",
  grp text COLLATE "C",
  payload text NOT NULL,
  PRIMARY KEY (queue, run_at, id)
) ${busy}`,
  sql`CREATE INDEX IF NOT EXISTS queue_delayed_id ON ${own("queue_delayed")} (id)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_grouped")} (
  queue integer NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  id bigint NOT NULL,
  at timestamptz NOT NULL,
  grp text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  payload text NOT NULL,
  PRIMARY KEY (queue, grp, priority, id)
) ${busy}`,
  // Those that have jobs, or had some lately. next: not before, after a failure of a group in order.
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_group")} (
  queue integer NOT NULL,
  grp text COLLATE "C" NOT NULL,
  running integer NOT NULL DEFAULT 0,
  since timestamptz,
  started integer NOT NULL DEFAULT 0,
  next timestamptz,
  PRIMARY KEY (queue, grp)
) WITH (fillfactor = 50)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_worker")} (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue integer NOT NULL,
  beat timestamptz NOT NULL,
  since timestamptz NOT NULL DEFAULT clock_timestamp(),
  ttl integer NOT NULL,
  lock bigint,
  name text
) WITH (fillfactor = 50)`,
  // counted: its jobs are counted in their groups.
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_lease")} (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  worker bigint NOT NULL,
  queue integer NOT NULL,
  counted boolean NOT NULL,
  size integer NOT NULL,
  done integer[],
  jobs text NOT NULL
) ${busy}`,
  // Jobs that were completed in a transaction of their handler: apart from the lease, so that two of them do not meet.
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_mark")} (
  lease bigint NOT NULL,
  place integer NOT NULL,
  PRIMARY KEY (lease, place)
) ${busy}`,
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_key")} (
  queue integer NOT NULL,
  key text COLLATE "C" NOT NULL,
  job bigint NOT NULL,
  PRIMARY KEY (queue, key)
)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("queue_failed")} (
  queue integer NOT NULL,
  id bigint NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  at timestamptz NOT NULL,
  failed_at timestamptz NOT NULL,
  key text COLLATE "C",
  grp text COLLATE "C",
  payload text NOT NULL,
  error text NOT NULL,
  PRIMARY KEY (queue, id)
)`,
];

/** Whatever is asked for at each claim is found by an index. And what a group has to remember. */
export const queueIndexes: readonly Statement[] = [
  sql`CREATE UNIQUE INDEX IF NOT EXISTS queue_id ON ${own("queue")} (id)`,
  sql`CREATE INDEX IF NOT EXISTS queue_lease_worker ON ${own("queue_lease")} (queue, worker)`,
  // head: the job that it waits for until next. floor: of this priority, what is below it is gone.
  sql`ALTER TABLE ${own("queue_group")} ADD COLUMN IF NOT EXISTS head bigint, ADD COLUMN IF NOT EXISTS head_priority smallint,
  ADD COLUMN IF NOT EXISTS floor bigint, ADD COLUMN IF NOT EXISTS floor_priority smallint`,
  // Since when its jobs are with their worker: for people who look.
  sql`ALTER TABLE ${own("queue_lease")} ADD COLUMN IF NOT EXISTS since timestamptz`,
  sql`ALTER TABLE ${own("queue_lease")} ALTER COLUMN since SET DEFAULT clock_timestamp()`,
];
