/** The functions that change a bucket otherwise, or only look at it. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept } from "../../hidden.ts";
import { limitOf, mostUsed } from "../limits.ts";
import { isElsewhere } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/**
 * One change of one bucket: 'refund' (of an entry), 'settle' and 'release' (of a hold), 'grant', 'revoke' (of a grant),
 * 'limit', 'plan', 'reset'. Verdicts as of quota_decide, and 4: there is no such entry or hold, 5: more than there is,
 * -1: late, -2: it counts on another of several databases.
 */
export const amend = sql`CREATE OR REPLACE FUNCTION ${own("quota_amend")}(
  rule jsonb, what text, q text, s text, code_max bigint, op text, of_entry text, n bigint, more jsonb, note text,
  OUT verdict int, OUT at float8, OUT used bigint, OUT held bigint, OUT credit bigint, OUT max bigint, OUT version bigint,
  OUT amount bigint)
${plpgsql} AS $function$
#variable_conflict use_variable
DECLARE
  b ${own("quota_bucket")};
  before bigint;
  e ${own("quota_line")};
  h ${own("quota_hold")};
  g record;
  moment timestamptz;
  delta bigint := 0;
  base bigint;
  part bigint;
  drained bigint;
  back bigint;
  cap bigint;
  drains jsonb;
  place int;
BEGIN
  SELECT t.* INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    INSERT INTO ${own("quota_bucket")} (quota, subject) VALUES (q, s) ON CONFLICT DO NOTHING;
    SELECT t.* INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
    ${kept("quota_bucket")};
  END IF;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;
  amount := n;
  IF ${own("quota_late")}(rule, moment) THEN
    verdict := -1;
    RETURN;
  END IF;
  IF ${isElsewhere("b")} THEN
    verdict := -2;
    RETURN;
  END IF;
  SELECT t.* INTO e FROM ${own("quota_line")} t WHERE t.bucket = b.id AND t.id = op;
  IF FOUND THEN
    at := extract(epoch FROM e.at) * 1000;
    used := e.used;
    held := coalesce(e.held, 0);
    credit := coalesce(e.credit, 0);
    max := e.max;
    version := e.version;
    amount := e.amount;
    verdict := CASE WHEN e.kind = what AND (n IS NULL OR n = e.amount) AND e.entry IS NOT DISTINCT FROM of_entry THEN 2 ELSE 3 END;
    RETURN;
  END IF;
  max := ${limitOf("b", "rule", "code_max")};
  IF what = 'repair' THEN
    -- Of a process of an earlier release, which says what it has read before: quota_reconcile looks for itself.
    PERFORM ${own("quota_reconcile")}(rule, q, s, code_max, op);
    SELECT t.used, t.held, t.credit, t.version INTO used, held, credit, version FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s;
    verdict := 1;
    RETURN;
  END IF;
  before := b.used;
  b := ${own("quota_roll")}(b, rule, max, moment);
  before := before - b.used;
  IF b.held > 0 OR b.credit > 0 THEN
    version := b.version;
    b := ${own("quota_reap")}(b, moment, before);
    IF b.version > version THEN before := 0; END IF;
  END IF;
  verdict := 1;
  cap := least(${mostUsed}, max + (rule->>'over')::bigint);

  CASE what
  WHEN 'refund' THEN
    SELECT t.* INTO e FROM ${own("quota_line")} t
      WHERE t.bucket = b.id AND t.id = of_entry AND t.kind IN ('consume', 'settle');
    IF NOT FOUND THEN
      verdict := 4;
    ELSE
      e.delta := coalesce(e.delta, e.amount);
      e.refunded := coalesce(e.refunded, 0);
      amount := coalesce(n, e.amount - e.refunded);
      IF amount + e.refunded > e.amount THEN
        verdict := 5;
        amount := e.amount - e.refunded;
      END IF;
    END IF;
    IF verdict = 1 THEN
    -- What came from grants goes back to them first.
    drained := e.amount - e.delta;
    back := least(amount, greatest(0, drained - e.refunded));
    base := amount - back;
    part := e.refunded;
    FOR g IN SELECT x->>'id' AS id, (x->>'amount')::bigint AS amount
      FROM jsonb_array_elements(coalesce(e.drains, '[]')) WITH ORDINALITY y (x, o) ORDER BY o DESC LOOP
      EXIT WHEN back = 0;
      IF part >= g.amount THEN
        part := part - g.amount;
        CONTINUE;
      END IF;
      drained := least(back, g.amount - part);
      part := 0;
      back := back - drained;
      UPDATE ${own("quota_grant")} t SET spent = t.spent - drained WHERE t.quota = q AND t.subject = s AND t.id = g.id;
      -- One that ran out is not there any more.
      IF FOUND THEN b.credit := b.credit + drained; END IF;
    END LOOP;
    -- What was used before this window is forgotten already.
    IF e.version < b.reset THEN base := 0; END IF;
    CASE rule->>'window'
    WHEN 'fixed' THEN IF e.since IS DISTINCT FROM b.since THEN base := 0; END IF;
    WHEN 'log' THEN IF e.at <= moment - (rule->>'per')::bigint * interval '1 microsecond' THEN base := 0; END IF;
    WHEN 'parts' THEN
      place := 1 + round(extract(epoch FROM b.since - e.since) * 1000000 / ((rule->>'per')::bigint / (rule->>'parts')::int));
      -- NULL: it was used under another definition, which had no window.
      IF place BETWEEN 1 AND cardinality(b.parts) IS NOT TRUE THEN base := 0;
      ELSE
        base := least(base, b.parts[place]);
        b.parts[place] := b.parts[place] - base;
      END IF;
    ELSE NULL;
    END CASE;
    base := least(base, b.used);
    delta := -base;
    UPDATE ${own("quota_line")} t SET refunded = coalesce(t.refunded, 0) + quota_amend.amount
      WHERE t.bucket = b.id AND t.version = e.version;
    END IF;
  WHEN 'settle', 'release' THEN
    SELECT t.* INTO h FROM ${own("quota_hold")} t WHERE t.quota = q AND t.subject = s AND t.id = of_entry;
    IF NOT FOUND THEN
      verdict := 4;
    ELSE
      IF what = 'release' THEN
        amount := h.amount;
      ELSE
        IF n > h.amount AND b.used + b.held - h.amount + n - cap > least(b.credit, ${mostUsed} - cap) THEN
          verdict := 0;
        ELSE
          base := least(n, greatest(cap - b.used, 0));
          IF base < n THEN
            -- A grant may have run out since: then it is over the limit, and recorded as what it is.
            part := least(n - base, b.credit);
            IF part > 0 THEN drains := ${own("quota_drain")}(q, s, part, moment); END IF;
            b.credit := b.credit - part;
            base := n - part;
          END IF;
          delta := base;
          IF b.parts IS NOT NULL THEN b.parts[1] := b.parts[1] + base; END IF;
        END IF;
      END IF;
      IF verdict = 1 THEN
        b.held := b.held - h.amount;
        DELETE FROM ${own("quota_hold")} t WHERE t.quota = q AND t.subject = s AND t.id = of_entry;
      END IF;
    END IF;
  WHEN 'grant' THEN
    SELECT t.amount INTO part FROM ${own("quota_grant")} t WHERE t.quota = q AND t.subject = s AND t.id = op;
    IF FOUND THEN
      -- It is known also after its line was rolled up.
      verdict := CASE WHEN part = n THEN 2 ELSE 3 END;
      amount := part;
    -- Their sum has to be exact too.
    ELSIF b.credit + n > ${mostUsed} THEN
      verdict := 5;
      amount := ${mostUsed} - b.credit;
    ELSE
      INSERT INTO ${own("quota_grant")} (quota, subject, id, amount, priority, until)
        VALUES (q, s, op, n, (more->>'priority')::int,
          coalesce(to_timestamp((more->>'until')::float8 / 1000), 'infinity'));
      ${kept("quota_grant")};
      b.credit := b.credit + n;
    END IF;
  WHEN 'revoke' THEN
    -- What was used of it stays used.
    DELETE FROM ${own("quota_grant")} t WHERE t.quota = q AND t.subject = s AND t.id = of_entry
      RETURNING t.amount - t.spent INTO amount;
    IF FOUND THEN
      b.credit := b.credit - amount;
    ELSE
      verdict := 4;
    END IF;
  WHEN 'limit' THEN
    b.own_limit := n;
    amount := coalesce(n, 0);
  WHEN 'plan' THEN
    b.plan := more->>'plan';
    amount := 0;
  WHEN 'reset' THEN
    amount := b.used;
    delta := -b.used;
    b.reset := b.version + 1;
    b.parts := NULL;
    IF rule->>'window' <> 'fixed' THEN b.since := NULL; END IF;
  END CASE;

  IF verdict = 1 THEN
    IF what IN ('limit', 'plan') THEN
      max := ${limitOf("b", "rule", "code_max")};
    END IF;
    b.used := b.used + delta;
    b.version := b.version + 1;
    INSERT INTO ${own("quota_line")} (bucket, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, entry, drains, details)
      VALUES (b.id, b.version, amount, nullif(delta, amount), nullif(before, 0), b.used, nullif(b.held, 0), nullif(b.credit, 0), max, b.since,
        moment, what, op, of_entry, drains, note::jsonb);
    ${kept("quota_line")};
    UPDATE ${own("quota_bucket")} t SET used = b.used, held = b.held, credit = b.credit, version = b.version, since = b.since,
      parts = b.parts, own_limit = b.own_limit, plan = b.plan, reset = b.reset WHERE t.quota = q AND t.subject = s;
  ELSIF b.version > (SELECT t.version FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s) THEN
    -- Only what had run out.
    UPDATE ${own("quota_bucket")} t SET used = b.used, held = b.held, credit = b.credit, version = b.version,
      since = b.since, parts = b.parts WHERE t.quota = q AND t.subject = s;
  END IF;
  used := b.used;
  held := b.held;
  credit := b.credit;
  version := b.version;
END
$function$`;

/** What a call would find now, without locking anything. */
export const peek = sql`CREATE OR REPLACE FUNCTION ${own("quota_peek")}(rule jsonb, q text, s text, code_max bigint,
  OUT at float8, OUT used bigint, OUT held bigint, OUT credit bigint, OUT max bigint, OUT version bigint, OUT plan text)
${plpgsql} AS $function$
#variable_conflict use_variable
DECLARE
  b ${own("quota_bucket")};
  moment timestamptz := clock_timestamp();
BEGIN
  SELECT t.* INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s;
  at := extract(epoch FROM moment) * 1000;
  IF ${own("quota_late")}(rule, moment) THEN
    version := -1;
    RETURN;
  END IF;
  IF ${isElsewhere("b")} THEN
    version := -2;
    RETURN;
  END IF;
  b.quota := q;
  b.subject := s;
  b.used := coalesce(b.used, 0);
  max := ${limitOf("b", "rule", "code_max")};
  b := ${own("quota_roll")}(b, rule, max, moment);
  used := b.used;
  held := coalesce((SELECT sum(t.amount) FROM ${own("quota_hold")} t WHERE t.quota = q AND t.subject = s AND t.until > moment), 0);
  credit := coalesce((SELECT sum(t.amount - t.spent) FROM ${own("quota_grant")} t WHERE t.quota = q AND t.subject = s AND t.until > moment), 0);
  version := coalesce(b.version, 0);
  plan := b.plan;
END
$function$`;
