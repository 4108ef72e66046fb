import { type Statement, own, sql } from "../../../seam/sql.ts";
import { kept, mostTurns, vanished } from "../hidden.ts";
import * as protection from "../../../seam/protections.ts";
import { nextFence } from "../leases/fences.ts";
import { plpgsql } from "../search-path.ts";

/** As for leases: a claim that a crash undoes would be given twice, and a client may be frozen before its COMMIT. */
const careful =
  sql.raw(`CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END,
      set_config('idle_in_transaction_session_timeout', '5s', true)`);

const open = sql.raw("r.state IN ('running', 'waiting')");

/** Nobody has decided upon the tick that comes after the last one. */
const undecided = sql.raw(protection.tickOnce ? "s.last = after_at" : "true");

const at = (ms: string) => sql.raw(`timestamptz 'epoch' + ${ms} * interval '1 millisecond'`);

export const scheduleTables: readonly Statement[] = [
  // `last`: the newest tick that was decided upon. It only ever grows, and what a tick becomes is decided under the
  // lock of this row, so no tick is decided upon twice, whatever becomes of the rows of runs.
  sql`CREATE TABLE IF NOT EXISTS ${own("schedule")} (
  name text PRIMARY KEY,
  last timestamptz NOT NULL,
  decisions bigint NOT NULL DEFAULT 0,
  paused boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70)`,

  // No index on what a heartbeat changes.
  sql`CREATE TABLE IF NOT EXISTS ${own("schedule_run")} (
  schedule text NOT NULL,
  tick timestamptz NOT NULL,
  manual boolean NOT NULL,
  state text NOT NULL,
  attempt integer NOT NULL,
  fence bigint NOT NULL,
  token text NOT NULL,
  holder text NOT NULL,
  previous timestamptz,
  started timestamptz NOT NULL,
  until timestamptz NOT NULL,
  ended timestamptz,
  error text,
  PRIMARY KEY (schedule, tick, manual)
) WITH (fillfactor = 70)`,
  sql`CREATE INDEX IF NOT EXISTS schedule_run_open ON ${own("schedule_run")} (schedule, tick)
  WHERE state IN ('running', 'waiting')`,
];

export const scheduleRoutines: readonly Statement[] = [
  // Looks twice: without a lock first, so that those who come too late write nothing; then under the lock of the
  // schedule's row, if nobody else has it. Each statement of it has a snapshot of its own; where it has not (REPEATABLE
  // READ), a row that has changed since is a serialization failure, which is why every decision writes that row.
  sql`CREATE OR REPLACE FUNCTION ${own("schedule_step")}(
  p_schedule text, p_token text, p_holder text, p_ttl double precision, p_attempts integer, p_overlap text, p_take boolean,
  p_tick double precision, p_after double precision, p_before double precision, p_run boolean, p_manual boolean,
  p_state text, p_error text, p_keep integer,
  OUT o_now double precision, OUT o_last double precision, OUT o_wake double precision, OUT o_busy boolean, OUT o_paused boolean,
  OUT o_skipped boolean, OUT o_died double precision[], OUT o_tick double precision, OUT o_previous double precision,
  OUT o_manual boolean, OUT o_fence bigint, OUT o_attempt integer)
${plpgsql} VOLATILE
AS $function$
DECLARE
  tick_at timestamptz := ${at("p_tick")};
  after_at timestamptz := ${at("p_after")};
  before_at timestamptz := ${at("p_before")};
  locked boolean := false;
  turns integer := 0;
  due boolean;
  s ${own("schedule")}%ROWTYPE;
  mine ${own("schedule_run")}%ROWTYPE;
BEGIN
  o_busy := false;
  o_skipped := false;
  o_died := '{}';
  LOOP
    IF NOT locked THEN
      SELECT * INTO s FROM ${own("schedule")} t WHERE t.name = p_schedule;
      IF NOT FOUND THEN
        turns := turns + 1;
        IF turns > ${mostTurns} THEN
          ${vanished("schedule")};
        END IF;
        INSERT INTO ${own("schedule")} (name, last) VALUES (p_schedule, date_trunc('milliseconds', clock_timestamp()))
          ON CONFLICT DO NOTHING;
        CONTINUE;
      END IF;
    END IF;
    due := NOT s.paused AND tick_at IS NOT NULL AND ${undecided} AND tick_at <= clock_timestamp()
      AND (before_at IS NULL OR clock_timestamp() < before_at);
    EXIT WHEN locked OR NOT (due OR p_manual OR EXISTS (SELECT FROM ${own("schedule_run")} r
      WHERE r.schedule = p_schedule AND ${open} AND (r.token = p_token OR p_take AND NOT s.paused AND r.until <= clock_timestamp())));
    IF p_state = 'running' THEN
      PERFORM ${careful};
    END IF;
    SELECT * INTO s FROM ${own("schedule")} t WHERE t.name = p_schedule FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      o_busy := true;
      SELECT * INTO s FROM ${own("schedule")} t WHERE t.name = p_schedule;
      EXIT;
    END IF;
    locked := true;
  END LOOP;

  IF locked THEN
    -- Granted before, and the answer was lost.
    UPDATE ${own("schedule_run")} r SET until = clock_timestamp() + p_ttl * interval '1 millisecond'
      WHERE r.schedule = p_schedule AND r.token = p_token AND r.state = 'running' RETURNING * INTO mine;
    WHILE p_take AND NOT s.paused AND mine.fence IS NULL LOOP
      -- One that a transaction has ended, and not committed yet, is passed over: it is still held.
      SELECT * INTO mine FROM ${own("schedule_run")} r
        WHERE r.schedule = p_schedule AND ${open} AND r.until <= clock_timestamp()
        ORDER BY r.tick, r.manual LIMIT 1 FOR UPDATE SKIP LOCKED;
      EXIT WHEN NOT FOUND;
      IF mine.state = 'running' AND mine.attempt >= p_attempts THEN
        UPDATE ${own("schedule_run")} r SET state = 'failed', ended = clock_timestamp(),
            error = 'Its process died, or did not renew its claim in time, and no attempt is left'
          WHERE r.schedule = p_schedule AND r.tick = mine.tick AND r.manual = mine.manual;
        o_died := o_died || (extract(epoch FROM mine.tick) * 1000)::float8;
        mine := NULL;
      ELSE
        UPDATE ${own("schedule_run")} r SET state = 'running', attempt = r.attempt + 1, fence = ${nextFence},
            token = p_token, holder = p_holder, started = clock_timestamp(), ended = NULL,
            until = clock_timestamp() + p_ttl * interval '1 millisecond'
          WHERE r.schedule = p_schedule AND r.tick = mine.tick AND r.manual = mine.manual RETURNING * INTO mine;
      END IF;
    END LOOP;

    IF mine.fence IS NULL AND (due OR p_manual) THEN
      IF p_manual THEN
        tick_at := date_trunc('milliseconds', clock_timestamp());
        WHILE EXISTS (SELECT FROM ${own("schedule_run")} r WHERE r.schedule = p_schedule AND r.tick = tick_at AND r.manual) LOOP
          tick_at := tick_at + interval '1 millisecond';
        END LOOP;
      END IF;
      IF NOT p_manual AND NOT p_run THEN
        s.last := tick_at;
      ELSIF p_overlap <> 'allow'
        AND EXISTS (SELECT FROM ${own("schedule_run")} r WHERE r.schedule = p_schedule AND ${open}) THEN
        o_skipped := p_overlap = 'skip' OR p_manual;
        IF p_overlap = 'skip' AND NOT p_manual THEN
          INSERT INTO ${own("schedule_run")} (schedule, tick, manual, state, attempt, fence, token, holder, previous, started, until, ended)
            VALUES (p_schedule, tick_at, false, 'skipped', 0, 0, '', p_holder, s.last, clock_timestamp(), clock_timestamp(), clock_timestamp());
          ${kept("schedule_run")};
          s.last := tick_at;
        END IF;
      ELSE
        INSERT INTO ${own("schedule_run")} (schedule, tick, manual, state, attempt, fence, token, holder, previous, started, until, ended, error)
          VALUES (p_schedule, tick_at, p_manual, p_state, 1, ${nextFence}, p_token, p_holder, s.last, clock_timestamp(),
            clock_timestamp() + p_ttl * interval '1 millisecond', CASE WHEN p_state <> 'running' THEN clock_timestamp() END, p_error)
          RETURNING * INTO mine;
        ${kept("schedule_run")};
        IF NOT p_manual THEN
          s.last := tick_at;
        END IF;
      END IF;
      DELETE FROM ${own("schedule_run")} r WHERE r.schedule = p_schedule AND NOT (${open}) AND r.tick < (
        SELECT o.tick FROM ${own("schedule_run")} o WHERE o.schedule = p_schedule ORDER BY o.tick DESC OFFSET p_keep LIMIT 1);
    END IF;
    UPDATE ${own("schedule")} t SET last = s.last, decisions = t.decisions + 1 WHERE t.name = p_schedule;
  END IF;

  o_tick := (extract(epoch FROM mine.tick) * 1000)::float8;
  o_previous := (extract(epoch FROM mine.previous) * 1000)::float8;
  o_manual := mine.manual;
  o_fence := mine.fence;
  o_attempt := mine.attempt;
  o_last := (extract(epoch FROM s.last) * 1000)::float8;
  o_paused := s.paused;
  o_wake := (SELECT (extract(epoch FROM min(r.until)) * 1000)::float8 FROM ${own("schedule_run")} r
    WHERE r.schedule = p_schedule AND ${open} AND NOT s.paused);
  o_now := (extract(epoch FROM clock_timestamp()) * 1000)::float8;
END
$function$`,
];
