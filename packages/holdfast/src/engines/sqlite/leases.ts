import { type LeaseView, decide } from "../../seam/lease-decide.ts";
import { FileBusyError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import type { LeaseClaim, ClaimResult, Grip, KeptLease, LeaseMode, Leases } from "../../seam/leases.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { ask, asWriter, fileMs, flushed, insist, tell, write } from "./begin.ts";
import { clock, date } from "./clock.ts";
import type { SqliteConnection } from "./dialect.ts";
import { StillBusy, explained, isBusy } from "./errors.ts";

/** How long a claim that will be made again waits for the file's writer. */
const claimMs = 1000;
/** The same for a renewal, which is sent again soon: its holder must not wait for one answer until it is too late. */
const renewMs = 250;
const releaseMs = 4000;

export const leaseTables: readonly Statement[] = [
  // AUTOINCREMENT: the newest number is kept apart from the rows, so that fences do not begin anew when these are deleted.
  sql`CREATE TABLE IF NOT EXISTS ${own("lease")} (
  fence integer NOT NULL PRIMARY KEY AUTOINCREMENT,
  resource text NOT NULL,
  token text NOT NULL,
  name text NOT NULL,
  holder text NOT NULL,
  mode text NOT NULL,
  weight integer NOT NULL,
  waiting integer NOT NULL,
  since integer NOT NULL,
  until integer NOT NULL
)`,
  sql`CREATE INDEX IF NOT EXISTS ${own("lease_resource")} ON ${own("lease")} (resource)`,

  // `given`: the newest fence given. `seen`: the newest fence of a lease, kept by another database, that was seen here.
  sql`CREATE TABLE IF NOT EXISTS ${own("resource")} (
  id text NOT NULL PRIMARY KEY,
  name text NOT NULL,
  given integer NOT NULL DEFAULT 0,
  seen integer NOT NULL DEFAULT 0
)`,

  // Tells this file from others. A copy of it is taken for the same one: there a lease that is not found is over.
  sql`CREATE TABLE IF NOT EXISTS ${own("origin")} (id text NOT NULL PRIMARY KEY)`,
  sql`INSERT INTO ${own("origin")} (id) SELECT lower(hex(randomblob(16))) WHERE NOT EXISTS (SELECT 1 FROM ${own("origin")})`,
];

async function look(connection: SqliteConnection, resource: string): Promise<LeaseView> {
  const { rows } = await ask(
    connection,
    sql`SELECT c.now AS now, l.fence AS fence, l.token AS token, l.weight AS weight, l.waiting AS waiting, l.since AS since, l.until AS until
      FROM (SELECT ${clock} AS now) c LEFT JOIN ${own("lease")} l ON l.resource = ${resource}`,
  );
  const entries = rows
    .filter(({ fence }) => fence !== null)
    .map(({ fence, token, weight, waiting, since, until }) => ({
      fence: Number(fence),
      token: String(token),
      weight: Number(weight),
      waiting: Number(waiting) === 1,
      since: Number(since),
      until: Number(until),
    }));
  return { now: Number(rows[0]?.now), entries };
}

/** Under the write lock. A fenced transaction would be the writer, so what has run out here is nobody's any more. */
async function claimed(connection: SqliteConnection, claim: LeaseClaim): Promise<ClaimResult> {
  const { resource, name, mode, token, holder, weight, ttlMs, lineMs } = claim;
  const view = await look(connection, resource);
  const { now } = view;
  const { mine, fits, freeInMs, inLine } = decide(claim, view);
  const expired = view.entries.filter((entry) => entry !== mine && entry.until <= now);
  if (expired.length > 0)
    await connection.query(
      sql`DELETE FROM ${own("lease")} WHERE resource = ${resource} AND until <= ${now} AND token <> ${token}`,
    );
  const extend = (fence: number, ms: number) =>
    connection.query(sql`UPDATE ${own("lease")} SET until = ${now + ms} WHERE fence = ${fence}`);
  const insert = async (waiting: boolean, ms: number): Promise<number> => {
    const { rows } = await connection.query(
      sql`INSERT INTO ${own("lease")} (resource, token, name, holder, mode, weight, waiting, since, until)
        VALUES (${resource}, ${token}, ${name}, ${holder}, ${mode}, ${weight}, ${waiting}, ${now}, ${now + ms}) RETURNING fence`,
    );
    return Number(rows[0]?.fence);
  };
  const grant = async (fence: number, since: number): Promise<ClaimResult> => ({
    granted: true,
    fence,
    since: date(since),
    until: date(now + ttlMs),
    origin: await originOf(connection),
  });
  // Granted before, and the answer was lost.
  if (mine && !mine.waiting) {
    await extend(mine.fence, ttlMs);
    return grant(mine.fence, mine.since);
  }
  if (!fits) {
    if (inLine && mine) await extend(mine.fence, lineMs);
    else if (inLine) await insert(true, lineMs);
    return { granted: false, freeInMs, inLine };
  }
  // A place in line has a number of its own, but a fence is given with the grant: they grow in the order of grants.
  if (mine) await connection.query(sql`DELETE FROM ${own("lease")} WHERE fence = ${mine.fence}`);
  const fence = await insert(false, ttlMs);
  await connection.query(
    sql`INSERT INTO ${own("resource")} (id, name, given) VALUES (${resource}, ${name}, ${fence})
      ON CONFLICT (id) DO UPDATE SET given = excluded.given`,
  );
  return grant(fence, now);
}

async function originOf(connection: SqliteConnection): Promise<string> {
  const { rows } = await connection.query(sql`SELECT min(id) AS id FROM ${own("origin")}`);
  return String(rows[0]?.id ?? "");
}

async function explaining<T>(work: Promise<T>): Promise<T> {
  return work.catch((error: unknown) => {
    throw explained(error);
  });
}

async function take(connection: SqliteConnection, claim: LeaseClaim): Promise<ClaimResult> {
  // Looks twice: without the write lock first, so that those who look again and again keep nobody from writing.
  const view = await look(connection, claim.resource);
  const { mine, fits, freeInMs, inLine } = decide(claim, view);
  const stands = mine !== undefined && mine.until > view.now + claim.lineMs / 2;
  if (!fits && (mine?.waiting ?? true) && (!inLine || stands)) return { granted: false, freeInMs, inLine };
  const waitMs = claim.lineMs > 0 ? claimMs : fileMs;
  try {
    return await flushed(connection, () => asWriter(connection, waitMs, () => claimed(connection, claim)));
  } catch (error) {
    // It has run out, and the writer is a transaction that relies on it.
    if (error instanceof FileBusyError && connection.writerQueue?.board?.taken([claim.resource]))
      return { granted: false, freeInMs: 0, inLine: mine !== undefined };
    throw error;
  }
}

async function fence(
  connection: SqliteConnection,
  { resource, name, mode, token, fence: number, origin }: Grip,
  joined: boolean,
): Promise<number | undefined> {
  // From here on nobody else can be given anything until the transaction ends.
  await insist(connection, joined);
  const { rows } = await connection.query(
    sql`SELECT 1 AS ours FROM ${own("lease")} WHERE fence = ${number} AND resource = ${resource} AND token = ${token} AND waiting = 0`,
  );
  if (rows.length > 0) {
    await tell(connection, [resource], joined);
    return undefined;
  }
  if (origin === (await originOf(connection))) {
    const found = await connection.query(sql`SELECT given FROM ${own("resource")} WHERE id = ${resource}`);
    return Math.max(number, Number(found.rows[0]?.given ?? 0));
  }
  if (mode !== "exclusive")
    throw new UnsupportedError(
      `fenced(tx, lease): ${name || "the lease"} is not exclusive and is kept by another database, where alone it can be told whether it is over. Check it in a transaction there`,
    );
  const seen = await connection.query(
    sql`INSERT INTO ${own("resource")} AS r (id, name, seen) VALUES (${resource}, ${name}, ${number})
      ON CONFLICT (id) DO UPDATE SET seen = max(r.seen, excluded.seen) RETURNING seen`,
  );
  const newest = Number(seen.rows[0]?.seen);
  return newest > number ? newest : undefined;
}

export const leases: Leases<SqliteConnection> = {
  take: (connection, claim) => explaining(take(connection, claim)),

  async renew(connection, { resource, fence: number, token }, ttlMs) {
    // A transaction of the caller's own on the same handle: what is written into it may be undone after it was believed.
    if (connection.inTransaction)
      throw new StillBusy(new UsageError("The client's one handle is inside a transaction of its own"));
    // Not flushed: a power failure that undoes it ends its holder too, which is a process of the same machine.
    const renewal = write(
      connection,
      sql`UPDATE ${own("lease")} SET until = max(until, ${clock} + ${ttlMs})
        WHERE fence = ${number} AND resource = ${resource} AND token = ${token} AND waiting = 0 RETURNING until`,
      renewMs,
    );
    const { rows } = await explaining(renewal).catch((error: unknown) => {
      throw isBusy(connection, error) ? new StillBusy(error) : error;
    });
    return rows[0] ? date(rows[0].until) : undefined;
  },

  release: (connection, { resource, token }, atLeastMs) =>
    explaining(
      asWriter(connection, releaseMs, async () => {
        const kept = await connection.query(
          sql`UPDATE ${own("lease")} SET token = '', until = since + ${atLeastMs}
            WHERE resource = ${resource} AND token = ${token} AND waiting = 0 AND since + ${atLeastMs} > ${clock} RETURNING 1 AS given`,
        );
        if (kept.rows.length > 0) return true;
        const gone = await connection.query(
          sql`DELETE FROM ${own("lease")} WHERE resource = ${resource} AND token = ${token} RETURNING 1 AS given`,
        );
        return gone.rows.length > 0;
      }),
    ),

  fence: (connection, grip, joined) => explaining(fence(connection, grip, joined)),

  async list(
    connection,
    { resources, fence: number, name, over = false, most = 2 ** 31 },
  ): Promise<readonly KeptLease[]> {
    const conditions = [
      over ? sql`(token <> '' OR until > ${clock})` : sql`until > ${clock}`,
      ...(resources ? [sql`resource IN (${sql.join(resources)})`] : []),
      ...(number === undefined ? [] : [sql`fence = ${number}`]),
      ...(name === undefined ? [] : [sql`name = ${name}`]),
    ];
    const { rows } = await explaining(
      ask(
        connection,
        sql`SELECT name, holder, fence, mode, waiting, since, until, until <= ${clock} AS gone, resource, token FROM ${own("lease")}
          WHERE ${sql.join(conditions, " AND ")} ORDER BY resource, waiting, fence LIMIT ${most}`,
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
