import * as protection from "../../../seam/protections.ts";
import { type Statement, own, sql } from "../../../seam/sql.ts";
import { vanished } from "../hidden.ts";
import { plpgsql } from "../search-path.ts";

/** Where the timeline is kept whose fences are given: of no resource, whose ids are hashes. */
const generation = "holdfast.generation";

/** A number of a sequence, above all that it has given, also to those who have lost the server since. */
export const newest = (sequence: string, keep: boolean): Statement => {
  const base = protection.fenceGeneration
    ? sql`${own("fence_base")}(${sql.raw(String(keep))}) OPERATOR(pg_catalog.+) `
    : sql.raw("");
  return sql`${base}pg_catalog.nextval(${own.text(sequence)})`;
};

export const nextFence = newest("fence", true);

/**
 * A standby that takes over may lack the newest numbers of a sequence, and would give them a second time. So each timeline
 * has its own 2^32 above the ones before, which are added to the numbers; on the first one nothing is. Timelines are counted
 * from one again after pg_upgrade: then the next range is taken, which is why it is written down on which one we were. Two
 * million timelines stay below 2^53. A server that has none to tell (some managed ones) is on the first one.
 */
export const fenceBase: Statement = sql`CREATE OR REPLACE FUNCTION ${own("fence_base")}(p_keep boolean) RETURNS bigint
${plpgsql} VOLATILE
AS $function$
DECLARE
  line bigint := 1;
  known ${own("resource")}%ROWTYPE;
  base bigint;
BEGIN
  BEGIN
    line := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
  EXCEPTION WHEN OTHERS THEN
    line := 1;
  END;
  SELECT * INTO known FROM ${own("resource")} r WHERE r.id = '${sql.raw(generation)}';
  IF known.seen = line THEN
    RETURN known.given;
  END IF;
  base := greatest((line - 1) << 32, coalesce(known.given + (1::bigint << 32), 0));
  -- Not in a transaction that may take long: until its end, others would wait for it here.
  IF p_keep THEN
    INSERT INTO ${own("resource")} AS r (id, name, given, seen)
      VALUES ('${sql.raw(generation)}', 'What fences begin with, and on which timeline', base, line)
      ON CONFLICT (id) DO UPDATE SET seen = excluded.seen, given = CASE WHEN r.seen = excluded.seen THEN r.given ELSE excluded.given END
      RETURNING r.given INTO base;
    IF base IS NULL THEN
      ${vanished("resource")};
    END IF;
  END IF;
  RETURN base;
END
$function$`;
