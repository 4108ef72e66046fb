import type { Row, SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError, UnsupportedError } from "../../seam/errors.ts";
import type { LeaseClaim, ClaimResult, Grip, KeptLease, LeaseMode, Leases } from "../../seam/leases.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { byPrimary, onPrimary } from "./primary.ts";
import { microseconds, milliseconds } from "./replay.ts";
import { type Procedure, procedure } from "./routines.ts";
import { commitText, failureOf, rollbackText } from "./waits.ts";

export const leaseTables: readonly Statement[] = [
  // Tells this database from others.
  sql`CREATE TABLE IF NOT EXISTS ${own("origin")} (
  one tinyint NOT NULL PRIMARY KEY,
  id char(36) CHARACTER SET ascii NOT NULL
) ENGINE=InnoDB`,
  sql`INSERT IGNORE INTO ${own("origin")} (one, id) VALUES (1, UUID())`,

  // Claims on one resource are decided one at a time, under the lock of its row here. `given`: the newest fence given.
  sql`CREATE TABLE IF NOT EXISTS ${own("resource")} (
  id varbinary(500) NOT NULL PRIMARY KEY,
  name text CHARACTER SET utf8mb4 NOT NULL,
  given bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB`,

  // The newest fences of leases, kept by other databases, that were seen here.
  sql`CREATE TABLE IF NOT EXISTS ${own("seen")} (
  id varbinary(500) NOT NULL PRIMARY KEY,
  name text CHARACTER SET utf8mb4 NOT NULL,
  fence bigint NOT NULL
) ENGINE=InnoDB`,

  // The counter of fences is the table's own: it outlives its rows, and restarts of the server.
  sql`CREATE TABLE IF NOT EXISTS ${own("lease")} (
  fence bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
  resource varbinary(500) NOT NULL,
  token varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name text CHARACTER SET utf8mb4 NOT NULL,
  holder varchar(200) CHARACTER SET utf8mb4 NOT NULL,
  mode varchar(20) CHARACTER SET ascii NOT NULL,
  weight int NOT NULL,
  waiting tinyint NOT NULL,
  since datetime(6) NOT NULL,
  until datetime(6) NOT NULL,
  KEY ${own("lease_resource")} (resource)
) ENGINE=InnoDB`,

  // One row per lease that is held, for fenced transactions to lock. They cannot lock the lease's own: here every lock
  // of a row stops those who write to it, and a renewal does.
  sql`CREATE TABLE IF NOT EXISTS ${own("grip")} (
  fence bigint NOT NULL PRIMARY KEY,
  token varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
) ENGINE=InnoDB`,
];

// Procedures, so that no lock of theirs waits for a message of a client, which may be stopped between two: the server
// would not end its transaction. Looks twice: without a lock first, so that those who look again and again write
// nothing and lock nobody out; and under the lock if there is something to do. Each statement has a snapshot, and a
// time, of its own.
const taking = procedure(
  "take_lease",
  // It looks before it locks, and counts after it has thrown out what has run out.
  { tables: ["lease", "grip", "resource", "origin"], whole: false },
  sql`(
  p_resource varbinary(500), p_name text CHARACTER SET utf8mb4, p_mode varchar(20), p_token varchar(64) CHARACTER SET ascii,
  p_holder varchar(200) CHARACTER SET utf8mb4, p_weight int, p_capacity int, p_ttl bigint, p_line bigint)
SQL SECURITY INVOKER
BEGIN
  DECLARE v_locked, v_waiting, v_unequal, v_line tinyint DEFAULT 0;
  DECLARE v_mine, v_left, v_taken, v_first, v_given, v_fence, v_gone, v_free bigint;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  looking: LOOP
    IF v_locked THEN
      -- An expired lease that a fenced transaction has locked is still held: it is skipped here, and counted below.
      SET v_gone = 0;
      reaping: LOOP
        SET v_fence = v_gone, v_gone = NULL;
        SELECT l.fence, l.waiting INTO v_gone, v_waiting FROM ${own("lease")} l FORCE INDEX (${own("lease_resource")})
          WHERE l.resource = p_resource AND l.fence > v_fence AND l.until <= UTC_TIMESTAMP(6) AND l.token <> p_token
          ORDER BY l.fence LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF v_gone IS NULL THEN
          LEAVE reaping;
        END IF;
        SET v_free = NULL;
        SELECT g.fence INTO v_free FROM ${own("grip")} g WHERE g.fence = v_gone FOR UPDATE SKIP LOCKED;
        IF v_waiting = 1 OR v_free IS NOT NULL THEN
          DELETE FROM ${own("lease")} WHERE fence = v_gone;
          DELETE FROM ${own("grip")} WHERE fence = v_gone;
        END IF;
      END LOOP;
      SET v_fence = NULL;
    END IF;
    SET v_mine = NULL, v_waiting = NULL, v_left = NULL;
    SELECT l.fence, l.waiting, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.until) INTO v_mine, v_waiting, v_left
      FROM ${own("lease")} l WHERE l.resource = p_resource AND l.token = p_token;
    IF v_locked AND v_waiting = 0 THEN
      -- Granted before, and the answer was lost.
      UPDATE ${own("lease")} SET until = UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND WHERE fence = v_mine;
      SET v_fence = v_mine;
      LEAVE looking;
    END IF;
    SELECT COALESCE(SUM(l.weight), 0), MIN(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.until)), COALESCE(MAX(l.weight <> p_weight), 0)
      INTO v_taken, v_first, v_unequal FROM ${own("lease")} l
      WHERE l.resource = p_resource AND l.token <> p_token AND (v_locked OR l.until > UTC_TIMESTAMP(6))
        AND (l.waiting = 0 OR v_mine IS NULL OR l.fence < v_mine);
    SET v_line = p_line > 0 AND (v_unequal OR v_mine IS NOT NULL) AND v_taken + p_weight > p_capacity;
    IF v_locked OR (v_taken + p_weight > p_capacity AND COALESCE(v_waiting, 1) = 1
      AND (NOT v_line OR COALESCE(v_left, 0) > p_line / 2)) THEN
      LEAVE looking;
    END IF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
    START TRANSACTION;
    -- An exclusive lock, whether the row was there or not.
    INSERT INTO ${own("resource")} (id, name) VALUES (p_resource, p_name) ON DUPLICATE KEY UPDATE given = given;
    SELECT r.given INTO v_given FROM ${own("resource")} r WHERE r.id = p_resource FOR UPDATE;
    SET v_locked = 1;
  END LOOP;
  IF v_fence IS NULL AND v_taken + p_weight > p_capacity THEN
    IF v_locked AND v_line AND v_mine IS NULL THEN
      INSERT INTO ${own("lease")} (resource, token, name, holder, mode, weight, waiting, since, until)
        VALUES (p_resource, p_token, p_name, p_holder, p_mode, p_weight, 1, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL p_line MICROSECOND);
    ELSEIF v_locked AND v_line THEN
      UPDATE ${own("lease")} SET until = UTC_TIMESTAMP(6) + INTERVAL p_line MICROSECOND WHERE fence = v_mine;
    END IF;
  ELSEIF v_fence IS NULL THEN
    -- A place in line has a number of its own, but a fence is given with the grant: they grow in the order of grants.
    DELETE FROM ${own("lease")} WHERE fence = v_mine;
    INSERT INTO ${own("lease")} (resource, token, name, holder, mode, weight, waiting, since, until)
      VALUES (p_resource, p_token, p_name, p_holder, p_mode, p_weight, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND);
    SET v_fence = LAST_INSERT_ID();
    IF v_fence <= v_given THEN
      -- Somebody has set the counter back (TRUNCATE does): from here on it counts from where it was.
      DELETE FROM ${own("lease")} WHERE fence = v_fence;
      SET v_fence = v_given + 1;
      INSERT INTO ${own("lease")} (fence, resource, token, name, holder, mode, weight, waiting, since, until)
        VALUES (v_fence, p_resource, p_token, p_name, p_holder, p_mode, p_weight, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND);
    END IF;
    INSERT INTO ${own("grip")} (fence, token) VALUES (v_fence, p_token);
    UPDATE ${own("resource")} SET given = v_fence WHERE id = p_resource;
  END IF;
  COMMIT;
  SELECT CAST(v_fence AS CHAR) AS fence, GREATEST(0, v_first) / 1000 AS free, v_line AS line,
    (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.since) / 1000 FROM ${own("lease")} l WHERE l.fence = v_fence) AS since,
    (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.until) / 1000 FROM ${own("lease")} l WHERE l.fence = v_fence) AS until,
    CONCAT((SELECT o.id FROM ${own("origin")} o WHERE o.one = 1), '/', DATABASE()) AS origin;
END`,
);

// Never waits for a fenced transaction: it may be the caller's own. What such a transaction has locked is left as
// expired, and goes to somebody else after its end.
const releasing = procedure(
  "release_lease",
  { tables: ["lease", "grip"], whole: false },
  sql`(p_resource varbinary(500), p_token varchar(64) CHARACTER SET ascii, p_least bigint)
SQL SECURITY INVOKER
BEGIN
  DECLARE v_fence, v_free bigint;
  DECLARE v_waiting, v_early tinyint;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
  START TRANSACTION;
  SELECT l.fence INTO v_fence FROM ${own("lease")} l WHERE l.resource = p_resource AND l.token = p_token;
  SELECT l.waiting, l.since + INTERVAL p_least MICROSECOND > UTC_TIMESTAMP(6) INTO v_waiting, v_early FROM ${own("lease")} l
    WHERE l.fence = v_fence AND l.token = p_token FOR UPDATE;
  IF v_waiting = 0 THEN
    SELECT g.fence INTO v_free FROM ${own("grip")} g WHERE g.fence = v_fence FOR UPDATE SKIP LOCKED;
  END IF;
  IF v_waiting = 1 OR (v_free IS NOT NULL AND NOT v_early) THEN
    DELETE FROM ${own("lease")} WHERE fence = v_fence;
    DELETE FROM ${own("grip")} WHERE fence = v_fence;
  ELSEIF v_waiting = 0 THEN
    UPDATE ${own("lease")} SET token = '', until = IF(v_early, since + INTERVAL p_least MICROSECOND, LEAST(until, UTC_TIMESTAMP(6)))
      WHERE fence = v_fence;
    UPDATE ${own("grip")} SET token = '' WHERE fence = v_free;
  END IF;
  COMMIT;
  SELECT v_waiting IS NOT NULL AS given;
END`,
);

export const leaseProcedures: readonly Procedure[] = [taking, releasing];

const now = "UTC_TIMESTAMP(6)";

async function explained<T>(connection: SqlConnection, work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    const failure = failureOf(connection, error);
    if (failure === "schema-missing" || (error as { errno?: unknown }).errno === noSuchProcedure)
      throw new SchemaMissingError(`The table ${namesOf(connection).own("lease")}`, error);
    throw error;
  }
}

const noSuchProcedure = 1305;

async function rowsOf(connection: SqlConnection, statement: Statement): Promise<readonly Row[]> {
  return (await connection.query(statement)).rows;
}

/** A procedure that was ended before its COMMIT leaves its transaction open. */
async function call(connection: SqlConnection, statement: Statement): Promise<Row | undefined> {
  try {
    return (await rowsOf(connection, statement))[0];
  } catch (error) {
    if (!connection.lost.aborted) await connection.query(sql.raw(rollbackText));
    throw error;
  }
}

function date(value: unknown): Date {
  return new Date(Number(value));
}

const micro = (ms: number) => Math.round(ms * 1000);

async function take(connection: SqlConnection, claim: LeaseClaim): Promise<ClaimResult> {
  const { resource, name, mode, token, holder, weight, capacity, ttlMs, lineMs } = claim;
  const args = [
    byPrimary(Buffer.from(resource)),
    name,
    mode,
    token,
    holder,
    weight,
    capacity,
    micro(ttlMs),
    micro(lineMs),
  ];
  const row = await call(connection, sql`CALL ${taking.called}(${sql.join(args)})`);
  if (row?.fence === null || row?.fence === undefined) {
    const free = row?.free;
    return {
      granted: false,
      freeInMs: free === null || free === undefined ? undefined : Number(free),
      inLine: Number(row?.line) === 1,
    };
  }
  return {
    granted: true,
    fence: Number(row.fence),
    since: date(row.since),
    until: date(row.until),
    origin: String(row.origin),
  };
}

async function renew(
  connection: SqlConnection,
  { fence, token }: Grip,
  ttlMs: number,
): Promise<Date | undefined> {
  const ours = sql`fence = ${fence} AND token = ${token} AND waiting = 0`;
  // If it has to wait it counts from before, and so does its holder.
  const { inTransaction } = await connection.query(
    sql`UPDATE ${own("lease")} SET until = GREATEST(until, ${sql.raw(now)} + ${microseconds(ttlMs)}) WHERE ${ours}`,
  );
  // Not by the number of rows: one that was to last longer already is not changed.
  const [row] = await rowsOf(
    connection,
    sql`SELECT ${milliseconds("until")} AS until FROM ${own("lease")} WHERE ${onPrimary} AND ${ours}`,
  );
  if (inTransaction !== false) await connection.query(sql.raw(commitText));
  return row ? date(row.until) : undefined;
}

const origin = sql`CONCAT((SELECT id FROM ${own("origin")} WHERE one = 1), '/', DATABASE())`;

/**
 * By a value that all nodes of a cluster have. It is read under a lock, which begins no snapshot. Where our tables are missing it is not
 * known.
 */
export async function whereabouts(connection: SqlConnection): Promise<string | undefined> {
  try {
    const { rows } = await connection.query(
      sql`SELECT CONCAT(COALESCE(DATABASE(), ''), ' of ', id) AS place FROM ${own("origin")} WHERE ${onPrimary} AND one = 1 LOCK IN SHARE MODE`,
    );
    return rows[0] ? String(rows[0]["place"]) : undefined;
  } catch (error) {
    if (connection.unwrap?.(error)) return undefined;
    throw error;
  }
}

/**
 * The grip's row says whose it is, read under a lock: a snapshot may be older. (Of a lease that was released while
 * another fenced transaction held it the grip still says so until that ends, and then until somebody takes it over. It
 * is nobody else's for as long.)
 */
async function fence(connection: SqlConnection, grip: Grip): Promise<number | undefined> {
  const { resource, name, mode, token } = grip;
  const found = await rowsOf(
    connection,
    sql`SELECT 1 AS one FROM ${own("grip")} WHERE ${onPrimary} AND fence = ${grip.fence} AND token = ${token} LOCK IN SHARE MODE`,
  );
  if (found.length > 0) return undefined;
  const id = Buffer.from(resource);
  const [here] = await rowsOf(
    connection,
    sql`SELECT ${origin} AS origin, (SELECT CAST(given AS CHAR) FROM ${own("resource")} WHERE id = ${id}) AS given`,
  );
  if (String(here?.origin) === grip.origin) return Math.max(grip.fence, Number(here?.given ?? 0));
  if (mode !== "exclusive")
    throw new UnsupportedError(
      `fenced(tx, lease): ${name || "the lease"} is not exclusive and is kept by another database, where alone it can be told whether it is over. Check it in a transaction there`,
    );
  await connection.query(
    sql`INSERT INTO ${own("seen")} (id, name, fence) VALUES (${id}, ${name}, ${grip.fence})
      ON DUPLICATE KEY UPDATE fence = GREATEST(fence, ${grip.fence})`,
  );
  const [row] = await rowsOf(
    connection,
    sql`SELECT CAST(fence AS CHAR) AS fence FROM ${own("seen")} WHERE id = ${id} FOR UPDATE`,
  );
  const newest = Number(row?.fence);
  return newest > grip.fence ? newest : undefined;
}

export const leases: Leases<SqlConnection> = {
  take: (connection, claim) => explained(connection, take(connection, claim)),

  renew: (connection, grip, ttlMs) => explained(connection, renew(connection, grip, ttlMs)),

  async release(connection, { resource, token }, atLeastMs) {
    const args = [byPrimary(Buffer.from(resource)), token, micro(atLeastMs)];
    const row = await explained(
      connection,
      call(connection, sql`CALL ${releasing.called}(${sql.join(args)})`),
    );
    return Number(row?.given) === 1;
  },

  fence: (connection, grip) => explained(connection, fence(connection, grip)),

  async list(
    connection,
    { resources, fence: number, name, over = false, most = 2 ** 31 },
  ): Promise<readonly KeptLease[]> {
    const conditions = [
      onPrimary,
      sql.raw(over ? `(token <> '' OR until > ${now})` : `until > ${now}`),
      ...(resources
        ? [sql`resource IN (${sql.join(resources.map((resource) => Buffer.from(resource)))})`]
        : []),
      ...(number === undefined ? [] : [sql`${own("lease")}.fence = ${number}`]),
      // Of the same letters, not of those that a collation takes for the same.
      ...(name === undefined ? [] : [sql`CAST(name AS BINARY) = ${Buffer.from(name)}`]),
    ];
    const rows = await explained(
      connection,
      rowsOf(
        connection,
        sql`SELECT name AS name, holder AS holder, CAST(fence AS CHAR) AS fence, mode AS mode, waiting AS waiting,
          ${milliseconds("since")} AS since, ${milliseconds("until")} AS until, until <= ${sql.raw(now)} AS gone,
          CONVERT(resource USING utf8mb4) AS resource, token AS token
          FROM ${own("lease")} WHERE ${sql.join(conditions, " AND ")} ORDER BY ${own("lease")}.resource, waiting, ${own("lease")}.fence LIMIT ${sql.raw(String(Math.trunc(most)))}`,
      ),
    );
    return rows.map((row) => ({
      name: String(row.name),
      holder: String(row.holder),
      fence: Number(row.fence),
      mode: row.mode as LeaseMode,
      waiting: Number(row.waiting) === 1,
      since: date(row.since),
      until: date(row.until),
      over: Number(row.gone) === 1,
      resource: String(row.resource),
      token: String(row.token),
    }));
  },
};
