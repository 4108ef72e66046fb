import type { Database, SqlConnection } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { defaultSchema, namedDatabase } from "../../seam/names.ts";
import { citus } from "../../engines/postgres/citus.ts";

/**
 * A database of Citus, through any client of PostgreSQL: `fromCitus(fromPg(pool))`. `migrate` gives Holdfast's schema to one of its
 * nodes. From the coordinator everything but leases, from the other nodes quotas and stock. On a server without Citus
 * it is the same, without any nodes.
 */
export function fromCitus<Native>(
  database: Database<Native, SqlConnection>,
): Database<Native, SqlConnection> {
  if (typeof database !== "object" || database === null || database.engine?.name !== "postgres")
    throw new UsageError(
      "fromCitus(database): a database of PostgreSQL, as its client gives it, e.g. fromCitus(fromPg(pool))",
    );
  return { ...database, engine: citus };
}

export interface PlacesOptions {
  /** What the names of the schemas begin with. Default: "holdfast". */
  readonly schema?: string;
}

/**
 * So many schemas of one database of Citus, each whole on one of its nodes, for `sharded(places(fromPg(pool), 8))`. Two or three
 * for each node: what is in one of them is sent together.
 */
export function places<Native>(
  database: Database<Native, SqlConnection>,
  count: number,
  { schema = defaultSchema }: PlacesOptions = {},
): Database<Native, SqlConnection>[] {
  if (!Number.isSafeInteger(count) || count < 1 || count > most)
    throw new UsageError(`places(database, count): count must be a whole number from 1 to ${most}`);
  const spread = fromCitus(database);
  return placeNames(count, schema).map((name) => namedDatabase(spread, name));
}

/** Each of them has all of our tables. */
const most = 1024;

export function placeNames(count: number, schema: string = defaultSchema): string[] {
  return Array.from({ length: count }, (_, i) => `${schema}_${i}`);
}
