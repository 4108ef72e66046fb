/** The database that a verb about a pattern works on, and what goes wrong there in one line. */
import { HoldfastError } from "holdfast";
import { describe } from "../describe.ts";
import { Failure, Interrupted } from "../failure.ts";
import { shown } from "../text.ts";
import { type Server, connect } from "../server.ts";

export interface PlaceOptions {
  readonly url?: string;
  readonly json?: true;
}

export async function onServer<T>(
  verb: string,
  { url }: PlaceOptions,
  work: (server: Server) => Promise<T>,
): Promise<T> {
  await using server = await connect({ url, application: `holdfast ${verb} ${process.pid}` });
  try {
    return await work(server);
  } catch (error) {
    throw await clear(error, server);
  }
}

/** Names come from anybody, and errors name them. */
async function clear(error: unknown, server: Server): Promise<unknown> {
  if (error instanceof Failure || error instanceof Interrupted) return error;
  const { code, errno } = (error ?? {}) as { code?: unknown; errno?: unknown };
  if (error instanceof HoldfastError && error.code === "HF_SCHEMA_MISSING")
    return new Failure(
      `${shown(error.message.split(" is not in this database")[0] ?? "A table")} is not in ${server.shown}: run holdfast migrate.`,
      { cause: error },
    );
  if (code === "42501" || refusals.has(Number(errno)))
    return new Failure(
      `${shown(await userOf(server))} may not do this in ${server.shown}: ${shown(describe(error))}. Ask for the right, or connect as somebody who has it.`,
      { cause: error },
    );
  return new Failure(shown(describe(error)), { cause: error });
}

/** No right to a database, a table, a column, a statement, a routine. https://mariadb.com/kb/en/mariadb-error-codes/ */
const refusals = new Set([1044, 1142, 1143, 1227, 1370]);

export async function userOf({ kind, query }: Server): Promise<string> {
  if (kind === "sqlite") return "This process";
  const text = kind === "postgres" ? "SELECT current_user AS name" : "SELECT CURRENT_USER() AS name";
  const rows = await query(text).catch(() => []);
  return String(rows[0]?.["name"] ?? "The database user");
}
