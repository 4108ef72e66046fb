/** The database that a verb about a pattern works on, and what goes wrong there in one line. */
import { HoldfastError } from "holdfast";
import { describe } from "../describe.ts";
import { Failure, Interrupted } from "../failure.ts";
import { shown } from "../text.ts";
import { type ConnectOptions, type Server, connect, schemaIn } from "../server.ts";
import { grantee, isDenied, userOf } from "../user.ts";

export interface PlaceOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly spread?: true;
  readonly json?: true;
}

export async function onServer<T>(
  verb: string,
  { url, schema, spread }: PlaceOptions,
  work: (server: Server) => Promise<T>,
  how: Pick<ConnectOptions, "kinds" | "instead"> = {},
): Promise<T> {
  const application = `holdfast ${verb} ${process.pid}`;
  await using server = await connect({ ...how, url, schema, spread, application });
  try {
    return await work(server);
  } catch (error) {
    throw await clear(error, server);
  }
}

/** PostgreSQL says of tables in a schema that this user may not use that they are not there. */
async function isHidden({ kind, query, schema }: Server): Promise<boolean> {
  if (kind !== "postgres") return false;
  const rows = await query(
    "SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1 AND NOT has_schema_privilege(oid, 'USAGE')",
    [schema],
  ).catch(() => []);
  return rows.length > 0;
}

/** Names come from anybody, and errors name them. */
async function clear(error: unknown, server: Server): Promise<unknown> {
  if (error instanceof Failure || error instanceof Interrupted) return error;
  const missing = error instanceof HoldfastError && error.code === "HF_SCHEMA_MISSING";
  if (missing && (await isHidden(server)))
    return new Failure(
      `${shown(await userOf(server))} may not see the schema ${server.schema} in ${server.shown}: GRANT USAGE ON SCHEMA ${schemaIn(server)} TO ${shown(await grantee(server))};`,
      { cause: error },
    );
  if (missing)
    return new Failure(
      `${shown(error.message.split(" is not in this database")[0] ?? "A table")} is not in ${server.shown}: run holdfast migrate.`,
      { cause: error },
    );
  if (isDenied(error)) {
    // An error of Holdfast's says what to do.
    const said = shown(describe(error));
    const remedy =
      error instanceof HoldfastError ? "" : ". Ask for the right, or connect as somebody who has it.";
    return new Failure(
      `${shown(await userOf(server))} may not do this in ${server.shown}: ${said}${remedy}`,
      {
        cause: error,
      },
    );
  }
  return new Failure(shown(describe(error)), { cause: error });
}
