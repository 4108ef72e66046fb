import type { Row, SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError, UnsupportedError } from "../../../seam/errors.ts";
import type { LeaseClaim, ClaimResult, Grip, KeptLease, LeaseMode, Leases } from "../../../seam/leases.ts";
import { type Statement, own, sql } from "../../../seam/sql.ts";
import { kept, mostTurns, shown, vanished } from "../hidden.ts";
import { dialect, namesOf } from "../dialect.ts";
import { fenceBase, nextFence } from "./fences.ts";
import { failureOf } from "../locks/index.ts";
import { byMap } from "../patience.ts";
import { byPrimary } from "../primary.ts";
import { isTrue } from "../probe.ts";
import { plainSql, plpgsql, safely } from "../search-path.ts";
import { typed as arg, milliseconds as ms } from "../values.ts";
import * as protection from "../../../seam/protections.ts";

/** Of the name of its channel. */
export const leaseChannel = "lease";

/** How long a claim waits for others that are looking at the same resource: they take a millisecond each. */
const patienceMs = 1000;

/**
 * For the rest of the transaction. A grant that a crash undoes would give its fence a second time, and a renewal would
 * end before its holder thinks, so neither is left unflushed where `synchronous_commit` is off. And a client that
 * opens transactions of its own (most ORMs do) may be frozen before it sends COMMIT: what it has locked would stay
 * locked, and a lease that ran out could not be taken over. The server then ends its session.
 */
const careful = `CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN pg_catalog.set_config('synchronous_commit', 'on', true) END,
    pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)`;

const over = protection.leaseUntilOver ? "l.until <= pg_catalog.clock_timestamp()" : "true";
const held = protection.leaseUntilOver ? "l.until > clock" : "false";

export const leaseTables: readonly Statement[] = [
  // A sequence, not a counter in a row: rows are deleted, by hand if not by us, and fences must not begin anew.
  sql`CREATE SEQUENCE IF NOT EXISTS ${own("fence")}`,

  // Tells this database from others, and, with its oid, from copies made of it as a template.
  sql`CREATE TABLE IF NOT EXISTS ${own("origin")} (id uuid PRIMARY KEY)`,
  sql`INSERT INTO ${own("origin")} (id) SELECT gen_random_uuid() WHERE NOT EXISTS (SELECT FROM ${own("origin")})`,

  // Claims on one resource are decided one at a time, under the lock of its row here. `given`: the newest fence given;
  // written with every grant, so that under REPEATABLE READ an old snapshot fails instead of deciding. `seen`: the
  // newest fence of a lease, kept by another database, that was seen here.
  sql`CREATE TABLE IF NOT EXISTS ${own("resource")} (
  id text PRIMARY KEY,
  name text NOT NULL,
  given bigint NOT NULL DEFAULT 0,
  seen bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70)`,

  // No index on what a renewal changes: it stays on its page, and it locks no key.
  sql`CREATE TABLE IF NOT EXISTS ${own("lease")} (
  resource text NOT NULL,
  fence bigint NOT NULL,
  token text NOT NULL,
  name text NOT NULL,
  holder text NOT NULL,
  mode text NOT NULL,
  weight integer NOT NULL,
  waiting boolean NOT NULL,
  since timestamptz NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (resource, fence)
) WITH (fillfactor = 70)`,
];

export const leaseRoutines: readonly Statement[] = [
  fenceBase,

  sql`CREATE OR REPLACE FUNCTION ${own("lease_origin")}() RETURNS text
${plainSql} STABLE
AS $function$
  SELECT coalesce(min(o.id::text), '') || '/' || (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
  FROM ${own("origin")} o
$function$`,

  // Looks twice: without a lock first, so that those who look again and again write nothing and lock nobody out; and
  // under the lock if there is something to do. Each statement of it has a snapshot of its own.
  sql`CREATE OR REPLACE FUNCTION ${own("take_lease")}(
  p_resource text, p_name text, p_mode text, p_token text, p_holder text, p_weight integer, p_capacity integer,
  p_ttl double precision, p_line double precision, p_patience integer,
  OUT o_fence bigint, OUT o_since timestamptz, OUT o_until timestamptz, OUT o_free double precision, OUT o_line boolean)
${plpgsql} VOLATILE
AS $function$
DECLARE
  locked boolean := false;
  clock timestamptz;
  gone bigint[];
  mine ${own("lease")}%ROWTYPE;
  taken bigint;
  first timestamptz;
  unequal boolean;
BEGIN
  o_line := false;
  LOOP
    IF locked THEN
      -- An expired lease that a fenced transaction has locked is still held: it is skipped here, and counted below.
      gone := ARRAY(SELECT l.fence FROM ${own("lease")} l
        WHERE l.resource = p_resource AND ${sql.raw(over)} AND l.token <> p_token
        FOR UPDATE SKIP LOCKED);
      DELETE FROM ${own("lease")} l WHERE l.resource = p_resource AND l.fence = ANY (gone);
    END IF;
    SELECT * INTO mine FROM ${own("lease")} l WHERE l.resource = p_resource AND l.token = p_token;
    clock := clock_timestamp();
    IF locked AND NOT mine.waiting THEN
      -- Granted before, and the answer was lost.
      UPDATE ${own("lease")} l SET until = clock_timestamp() + p_ttl * interval '1 millisecond'
        WHERE l.resource = p_resource AND l.fence = mine.fence RETURNING l.fence, l.since, l.until INTO o_fence, o_since, o_until;
      RETURN;
    END IF;
    SELECT coalesce(sum(l.weight), 0), min(l.until), coalesce(bool_or(l.weight <> p_weight), false)
      INTO taken, first, unequal
      FROM ${own("lease")} l
      WHERE l.resource = p_resource AND l.token <> p_token AND (locked OR ${sql.raw(held)})
        AND (NOT l.waiting OR mine.fence IS NULL OR l.fence < mine.fence);
    o_free := greatest(0, extract(epoch FROM first - clock) * 1000);
    o_line := p_line > 0 AND (unequal OR mine.fence IS NOT NULL) AND taken + p_weight > p_capacity;
    EXIT WHEN locked OR (taken + p_weight > p_capacity AND mine.waiting IS NOT FALSE
      AND (NOT o_line OR mine.until > clock + p_line / 2 * interval '1 millisecond'));
    PERFORM ${sql.raw(careful)}, set_config('lock_timeout', p_patience::text, true);
    FOR turn IN 1..${mostTurns} LOOP
      PERFORM FROM ${own("resource")} r WHERE r.id = p_resource FOR NO KEY UPDATE;
      locked := FOUND;
      EXIT WHEN locked;
      INSERT INTO ${own("resource")} (id, name) VALUES (p_resource, p_name) ON CONFLICT DO NOTHING;
    END LOOP;
    IF NOT locked THEN
      ${vanished("resource")};
    END IF;
  END LOOP;
  IF taken + p_weight > p_capacity THEN
    IF o_line AND mine.fence IS NULL THEN
      INSERT INTO ${own("lease")} (resource, fence, token, name, holder, mode, weight, waiting, since, until)
        VALUES (p_resource, ${nextFence}, p_token, p_name, p_holder, p_mode, p_weight, true,
          clock_timestamp(), clock_timestamp() + p_line * interval '1 millisecond');
      ${kept("lease")};
    ELSIF locked AND o_line THEN
      UPDATE ${own("lease")} l SET until = clock_timestamp() + p_line * interval '1 millisecond'
        WHERE l.resource = p_resource AND l.fence = mine.fence;
    END IF;
    RETURN;
  END IF;
  -- A place in line has a number of its own, but a fence is given with the grant: they grow in the order of grants.
  DELETE FROM ${own("lease")} l WHERE l.resource = p_resource AND l.fence = mine.fence;
  UPDATE ${own("resource")} r SET given = ${protection.fenceGrows ? nextFence : sql.raw("1")} WHERE r.id = p_resource RETURNING r.given INTO o_fence;
  o_since := clock_timestamp();
  o_until := o_since + p_ttl * interval '1 millisecond';
  INSERT INTO ${own("lease")} (resource, fence, token, name, holder, mode, weight, waiting, since, until)
    VALUES (p_resource, o_fence, p_token, p_name, p_holder, p_mode, p_weight, false, o_since, o_until);
  ${kept("lease")};
END
$function$`,

  // Never waits for a fenced transaction: it may be the caller's own. What such a transaction has locked is left as
  // expired, and goes to somebody else after its end.
  sql`CREATE OR REPLACE FUNCTION ${own("release_lease")}(p_resource text, p_token text, p_least double precision)
RETURNS boolean
${plpgsql} VOLATILE
AS $function$
DECLARE
  gone bigint[];
  given boolean;
BEGIN
  PERFORM ${sql.raw(careful)};
  UPDATE ${own("lease")} l SET token = '', until = l.since + p_least * interval '1 millisecond'
    WHERE l.resource = p_resource AND l.token = p_token AND NOT l.waiting
      AND l.since + p_least * interval '1 millisecond' > clock_timestamp();
  given := FOUND;
  IF NOT given THEN
    gone := ARRAY(SELECT l.fence FROM ${own("lease")} l
      WHERE l.resource = p_resource AND l.token = p_token FOR UPDATE SKIP LOCKED);
    DELETE FROM ${own("lease")} l WHERE l.resource = p_resource AND l.fence = ANY (gone);
    given := FOUND;
  END IF;
  IF NOT given THEN
    UPDATE ${own("lease")} l SET token = '', until = least(l.until, clock_timestamp())
      WHERE l.resource = p_resource AND l.token = p_token;
    given := FOUND;
  END IF;
  IF given THEN
    PERFORM pg_notify(${own.label(leaseChannel)}, p_resource);
  END IF;
  RETURN given;
END
$function$`,

  // FOR KEY SHARE lets a renewal pass, which changes no key, and stops the DELETE of whoever would take over.
  sql`CREATE OR REPLACE FUNCTION ${own("check_fence")}(
  p_resource text, p_name text, p_fence bigint, p_token text, p_origin text, p_exclusive boolean,
  OUT o_newest bigint, OUT o_foreign boolean)
${plpgsql} VOLATILE
AS $function$
BEGIN
  o_foreign := false;
  PERFORM FROM ${own("lease")} l
    WHERE l.resource = p_resource AND l.fence = p_fence AND l.token = p_token AND NOT l.waiting
    FOR KEY SHARE;
  IF ${sql.raw(protection.fenceChecked ? "FOUND" : "true")} THEN
    RETURN;
  END IF;
  IF p_origin = ${own("lease_origin")}() THEN
    o_newest := greatest(p_fence, (SELECT r.given FROM ${own("resource")} r WHERE r.id = p_resource));
    RETURN;
  END IF;
  o_foreign := true;
  IF NOT p_exclusive THEN
    RETURN;
  END IF;
  INSERT INTO ${own("resource")} AS r (id, name, seen) VALUES (p_resource, p_name, p_fence)
    ON CONFLICT (id) DO UPDATE SET seen = excluded.seen WHERE r.seen <= excluded.seen;
  IF NOT FOUND THEN
    o_newest := (SELECT r.seen FROM ${own("resource")} r WHERE r.id = p_resource);
    IF o_newest IS NULL THEN
      ${vanished("resource")};
    END IF;
  END IF;
END
$function$`,
];

function date(value: unknown): Date {
  return new Date(Number(value));
}

async function ask(connection: SqlConnection, statement: Statement) {
  return answered(connection, async () => (await connection.query(statement)).rows);
}

async function answered(connection: SqlConnection, asking: () => Promise<readonly Row[]>) {
  try {
    return await asking();
  } catch (error) {
    if (failureOf(connection, error) === "schema-missing")
      throw new SchemaMissingError(`The table ${namesOf(connection).own("lease")}`, error);
    throw error;
  }
}

const savepoint = {
  set: sql.raw("SAVEPOINT holdfast_fence"),
  release: sql.raw("RELEASE SAVEPOINT holdfast_fence"),
};

export const leases: Leases<SqlConnection> = {
  channel: dialect.names.label(leaseChannel),

  async take(connection: SqlConnection, claim: LeaseClaim): Promise<ClaimResult> {
    const { resource, name, mode, token, holder, weight, capacity, ttlMs, lineMs } = claim;
    const args = sql.join([
      byMap(arg(resource, "text")),
      arg(name, "text"),
      arg(mode, "text"),
      arg(token, "text"),
      arg(holder, "text"),
      arg(weight, "integer"),
      arg(capacity, "integer"),
      arg(ttlMs, "float8"),
      arg(lineMs, "float8"),
      arg(patienceMs, "integer"),
    ]);
    const [row] = await ask(
      connection,
      sql`SELECT o_fence AS fence, ${ms("o_since")} AS since, ${ms("o_until")} AS until, o_free AS free, o_line AS line,
        CASE WHEN o_fence IS NOT NULL THEN ${own("lease_origin")}() END AS origin FROM ${own("take_lease")}(${args})`,
    );
    if (row?.fence === null || row?.fence === undefined) {
      const free = row?.free;
      return {
        granted: false,
        freeInMs: free === null || free === undefined ? undefined : Number(free),
        inLine: isTrue(row?.line),
      };
    }
    return {
      granted: true,
      fence: Number(row.fence),
      since: date(row.since),
      until: date(row.until),
      origin: String(row.origin),
    };
  },

  async renew(connection, { resource, fence, token }, ttlMs) {
    // The time is read by the row's own update: after any wait for it.
    const [row] = await ask(
      connection,
      sql`UPDATE ${own("lease")} l
        SET until = greatest(l.until, pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) (${arg(ttlMs, "float8")} OPERATOR(pg_catalog.*) interval '1 millisecond'))
        WHERE l.resource OPERATOR(pg_catalog.=) ${arg(resource, "text")} AND l.fence OPERATOR(pg_catalog.=) ${arg(fence, "bigint")} AND l.token OPERATOR(pg_catalog.=) ${arg(token, "text")}
          AND NOT l.waiting AND ${shown("lease")} AND ${own.map}
        RETURNING ${ms("l.until")} AS until, pg_catalog.concat(${sql.raw(careful)}) AS careful`,
    );
    return row ? date(row.until) : undefined;
  },

  async release(connection, { resource, token }, atLeastMs) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("release_lease")}(${byPrimary(arg(resource, "text"))}, ${arg(token, "text")}, ${arg(atLeastMs, "float8")}) AS given`,
    );
    return isTrue(row?.given);
  },

  async fence(connection, grip: Grip, joined) {
    const { resource, name, mode, token, fence, origin } = grip;
    // Outside of a transaction the lock would be gone at once: a savepoint is refused there.
    if (joined) await connection.query(savepoint.set);
    const [row] = await ask(
      connection,
      sql`SELECT o_newest AS newest, o_foreign AS elsewhere FROM ${own("check_fence")}(${sql.join([
        arg(resource, "text"),
        arg(name, "text"),
        arg(fence, "bigint"),
        arg(token, "text"),
        arg(origin, "text"),
        arg(mode === "exclusive", "boolean"),
      ])})`,
    );
    if (joined) await connection.query(savepoint.release);
    if (isTrue(row?.elsewhere) && mode !== "exclusive") {
      throw new UnsupportedError(
        `fenced(tx, lease): ${name || "the lease"} is not exclusive and is kept by another database, where alone it can be told whether it is over. Check it in a transaction there`,
      );
    }
    return row?.newest === null || row?.newest === undefined ? undefined : Number(row.newest);
  },

  async list(connection, { resources, fence, name, over = false, most }): Promise<readonly KeptLease[]> {
    const conditions = [
      sql.raw(
        over
          ? "(l.token <> '' OR l.until > pg_catalog.clock_timestamp())"
          : "l.until > pg_catalog.clock_timestamp()",
      ),
      ...(resources
        ? [sql`l.resource IN (${sql.join(resources.map((resource) => arg(resource, "text")))})`]
        : []),
      ...(fence === undefined ? [] : [sql`l.fence = ${arg(fence, "bigint")}`]),
      ...(name === undefined ? [] : [sql`l.name = ${arg(name, "text")}`]),
    ];
    const rows = await answered(connection, () =>
      safely(
        connection,
        sql`SELECT l.name AS name, l.holder AS holder, l.fence AS fence, l.mode AS mode, l.waiting AS waiting,
        ${ms("l.since")} AS since, ${ms("l.until")} AS until, l.until <= pg_catalog.clock_timestamp() AS gone, l.resource AS resource, l.token AS token
        FROM ${own("lease")} l WHERE ${sql.join(conditions, " AND ")} ORDER BY l.resource, l.waiting, l.fence LIMIT ${most === undefined ? sql.raw("ALL") : arg(most, "int")}`,
      ),
    );
    return rows.map((row) => ({
      name: String(row.name),
      holder: String(row.holder),
      fence: Number(row.fence),
      mode: row.mode as LeaseMode,
      waiting: isTrue(row.waiting),
      since: date(row.since),
      until: date(row.until),
      over: isTrue(row.gone),
      resource: String(row.resource),
      token: String(row.token),
    }));
  },

  async notify(connection, payload) {
    await ask(
      connection,
      sql`SELECT pg_catalog.pg_notify(${own.label(leaseChannel)}, ${arg(payload, "text")})::pg_catalog.text AS sent`,
    );
  },
};
