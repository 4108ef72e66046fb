import { type LeaseEntry, type LeaseView, decide } from "../../seam/lease-decide.ts";
import { SerializationError, UnsupportedError } from "../../seam/errors.ts";
import type { LeaseClaim, ClaimResult, Grip, KeptLease, LeaseMode, Leases } from "../../seam/leases.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { explaining, isConflict } from "./errors.ts";
import { assertUsable, insist } from "./locks.ts";

/**
 * `pins` is written by transactions that rely on a lease, and by whoever takes it away: two changes of one column of a
 * row exclude each other. A deletion alone would not be stopped by anything.
 */
export const leaseTables: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("lease")} (
  fence bigint NOT NULL,
  resource varchar NOT NULL,
  token varchar NOT NULL,
  name varchar NOT NULL,
  holder varchar NOT NULL,
  mode varchar NOT NULL,
  weight integer NOT NULL,
  waiting boolean NOT NULL,
  since bigint NOT NULL,
  until bigint NOT NULL,
  pins bigint NOT NULL
)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("resource")} (
  id varchar NOT NULL,
  name varchar NOT NULL,
  given bigint NOT NULL,
  seen bigint NOT NULL
)`,
  // The newest fence, in a row that is never deleted: fences do not begin anew when leases are.
  sql`CREATE TABLE IF NOT EXISTS ${own("fence")} (newest bigint NOT NULL, origin varchar NOT NULL)`,
  sql`INSERT INTO ${own("fence")} SELECT 0, uuid()::varchar WHERE NOT EXISTS (SELECT 1 FROM ${own("fence")})`,
];

/** The database is part of this process, so this is its clock. In SQL, time stands still within a transaction. */
const clock = () => Date.now();

async function atomically<T>(connection: DuckdbConnection, body: () => Promise<T>): Promise<T> {
  await connection.query(sql.raw("BEGIN TRANSACTION"));
  try {
    const value = await body();
    await connection.query(sql.raw("COMMIT"));
    return value;
  } catch (error) {
    await connection.query(sql.raw("ROLLBACK")).catch(() => {});
    throw error;
  }
}

async function look(connection: DuckdbConnection, resource: string): Promise<LeaseView> {
  const inProcess = await connection.inProcess;
  const { rows } = await connection.query(
    sql`SELECT fence, token, weight, waiting, since, until FROM ${own("lease")} WHERE resource = ${resource}`,
  );
  const now = clock();
  const entries = rows.map((row): LeaseEntry => {
    const fence = Number(row.fence);
    const until = Number(row.until);
    return {
      fence,
      token: String(row.token),
      weight: Number(row.weight),
      waiting: row.waiting === true,
      since: Number(row.since),
      // What a transaction relies on is held until its end, however long ago it ran out.
      until: until <= now && inProcess.isPinned(fence) ? now + 1 : until,
    };
  });
  return { now, entries };
}

async function remove(connection: DuckdbConnection, fence: number): Promise<void> {
  await connection.query(sql`UPDATE ${own("lease")} SET pins = pins + 1 WHERE fence = ${fence}`);
  await connection.query(sql`DELETE FROM ${own("lease")} WHERE fence = ${fence}`);
}

async function next(connection: DuckdbConnection): Promise<number> {
  const { rows } = await connection.query(
    sql`UPDATE ${own("fence")} SET newest = newest + 1 RETURNING newest`,
  );
  return Number(rows[0]?.newest);
}

async function originOf(connection: DuckdbConnection): Promise<string> {
  const { rows } = await connection.query(sql`SELECT min(origin) AS origin FROM ${own("fence")}`);
  return String(rows[0]?.origin);
}

async function claimed(connection: DuckdbConnection, claim: LeaseClaim): Promise<ClaimResult> {
  const { resource, name, mode, token, holder, weight, ttlMs, lineMs } = claim;
  const view = await look(connection, resource);
  const { now } = view;
  const { mine, fits, freeInMs, inLine } = decide(claim, view);
  const extend = (fence: number, ms: number) =>
    connection.query(sql`UPDATE ${own("lease")} SET until = ${now + ms} WHERE fence = ${fence}`);
  const insert = async (waiting: boolean, ms: number): Promise<number> => {
    const fence = await next(connection);
    await connection.query(
      sql`INSERT INTO ${own("lease")} VALUES (${fence}, ${resource}, ${token}, ${name}, ${holder}, ${mode}, ${weight}, ${waiting}, ${now}, ${now + ms}, 0)`,
    );
    return fence;
  };
  const grant = async (fence: number, since: number): Promise<ClaimResult> => ({
    granted: true,
    fence,
    since: new Date(since),
    until: new Date(now + ttlMs),
    origin: await originOf(connection),
  });
  for (const entry of view.entries)
    if (entry !== mine && entry.until <= now) await remove(connection, entry.fence);
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
  if (mine) await remove(connection, mine.fence);
  const fence = await insert(false, ttlMs);
  const { rows } = await connection.query(
    sql`UPDATE ${own("resource")} SET given = ${fence} WHERE id = ${resource} RETURNING id`,
  );
  if (rows.length === 0)
    await connection.query(sql`INSERT INTO ${own("resource")} VALUES (${resource}, ${name}, ${fence}, 0)`);
  return grant(fence, now);
}

async function take(connection: DuckdbConnection, claim: LeaseClaim): Promise<ClaimResult> {
  return (await connection.inProcess).oneAtATime.run(async () => {
    try {
      return await atomically(connection, () => claimed(connection, claim));
    } catch (error) {
      // A caller's own transaction relies on a lease that has run out.
      if (isConflict(error)) return { granted: false, freeInMs: undefined, inLine: false };
      throw error;
    }
  });
}

async function release(
  connection: DuckdbConnection,
  { resource, token }: Pick<Grip, "resource" | "token">,
  atLeastMs: number,
): Promise<boolean> {
  const inProcess = await connection.inProcess;
  return inProcess.oneAtATime.run(async () => {
    const { now, entries } = await look(connection, resource);
    const mine = entries.find((entry) => entry.token === token);
    if (!mine) return false;
    const until = Math.max(now, mine.waiting ? now : mine.since + atLeastMs);
    const leave = () =>
      connection.query(
        sql`UPDATE ${own("lease")} SET token = '', until = ${until} WHERE fence = ${mine.fence}`,
      );
    if (until > now || inProcess.isPinned(mine.fence)) await leave();
    else {
      try {
        await atomically(connection, () => remove(connection, mine.fence));
      } catch (error) {
        if (!isConflict(error)) throw error;
        await leave();
      }
    }
    return true;
  });
}

async function fence(
  connection: DuckdbConnection,
  { resource, name, mode, token, fence: number, origin }: Grip,
  joined: boolean,
): Promise<number | undefined> {
  await assertUsable(connection);
  if (joined) await insist(connection);
  const { session } = connection;
  const inProcess = await connection.inProcess;
  return inProcess.oneAtATime.run(async () => {
    // What this transaction sees may be older than the lease's end.
    const { ours, here, given } = await connection.aside(async (other) => ({
      ours: (
        await other.query(
          sql`SELECT 1 AS ours FROM ${own("lease")} WHERE fence = ${number} AND resource = ${resource} AND token = ${token} AND NOT waiting`,
        )
      ).rows,
      here: await originOf(other),
      given: (
        await other.query(sql`SELECT max(given) AS given FROM ${own("resource")} WHERE id = ${resource}`)
      ).rows,
    }));
    if (ours.length > 0) {
      // A snapshot that is older than the grant would not show what the holder before has written.
      if (!joined) {
        await changed(connection, sql`SELECT fence FROM ${own("lease")} WHERE fence = ${number}`);
        inProcess.pin(session, number);
      } else
        await changed(
          connection,
          sql`UPDATE ${own("lease")} SET pins = pins + 1 WHERE fence = ${number} RETURNING fence`,
        );
      return undefined;
    }
    if (origin === here) return Math.max(number, Number(given[0]?.given ?? 0));
    if (mode !== "exclusive")
      throw new UnsupportedError(
        `fenced(tx, lease): ${name || "the lease"} is not exclusive and is kept by another database, where alone it can be told whether it is over. Check it in a transaction there`,
      );
    await connection.aside((other) =>
      other.query(
        sql`INSERT INTO ${own("resource")} SELECT ${resource}, ${name}, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM ${own("resource")} WHERE id = ${resource})`,
      ),
    );
    const newest = await changed(
      connection,
      sql`UPDATE ${own("resource")} SET seen = greatest(seen, ${number}) WHERE id = ${resource} RETURNING seen`,
    );
    return Number(newest.seen) > number ? Number(newest.seen) : undefined;
  });
}

/** A row that another connection made may be newer than what this transaction sees. */
async function changed(connection: DuckdbConnection, statement: Statement) {
  const [row] = (await connection.query(statement)).rows;
  if (!row)
    throw SerializationError.after(1, new Error("the transaction's snapshot is older than the lease"));
  return row;
}

export const leases: Leases<DuckdbConnection> = {
  take: (connection, claim) => explaining(take(connection, claim)),

  renew: async (connection, { resource, fence: number, token }, ttlMs) =>
    (await connection.inProcess).oneAtATime.run(async () => {
      const { rows } = await explaining(
        connection.query(
          sql`UPDATE ${own("lease")} SET until = greatest(until, ${clock() + ttlMs})
            WHERE fence = ${number} AND resource = ${resource} AND token = ${token} AND NOT waiting RETURNING until`,
        ),
      );
      return rows[0] ? new Date(Number(rows[0].until)) : undefined;
    }),

  release: (connection, grip, atLeastMs) => explaining(release(connection, grip, atLeastMs)),

  fence: (connection, grip, joined) => explaining(fence(connection, grip, joined)),

  async list(
    connection,
    { resources, fence: number, name, over = false, most = 2 ** 31 },
  ): Promise<readonly KeptLease[]> {
    const conditions = [
      over ? sql`(token <> '' OR until > ${clock()})` : sql`until > ${clock()}`,
      ...(resources ? [sql`resource IN (${sql.join(resources)})`] : []),
      ...(number === undefined ? [] : [sql`fence = ${number}`]),
      ...(name === undefined ? [] : [sql`name = ${name}`]),
    ];
    const { rows } = await explaining(
      connection.query(
        sql`SELECT name, holder, fence, mode, waiting, since, until, until <= ${clock()} AS gone, resource, token FROM ${own("lease")}
          WHERE ${sql.join(conditions, " AND ")} ORDER BY resource, waiting, fence LIMIT ${most}`,
      ),
    );
    return rows.map((row) => ({
      name: String(row.name),
      holder: String(row.holder),
      fence: Number(row.fence),
      mode: row.mode as LeaseMode,
      waiting: row.waiting === true,
      since: new Date(Number(row.since)),
      until: new Date(Number(row.until)),
      over: row.gone === true,
      resource: String(row.resource),
      token: String(row.token),
    }));
  },
};
