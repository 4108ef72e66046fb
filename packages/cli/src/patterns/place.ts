/** The database that a verb about a pattern works on, and what goes wrong there in one line. */
import { HoldfastError } from "holdfast";
import { describe } from "../describe.ts";
import { Failure, Interrupted } from "../failure.ts";
import { shown } from "../text.ts";
import { type ConnectOptions, type Server, connect } from "../server.ts";
import { isDenied, userOf } from "../user.ts";

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

/** Names come from anybody, and errors name them. */
async function clear(error: unknown, server: Server): Promise<unknown> {
  if (error instanceof Failure || error instanceof Interrupted) return error;
  if (error instanceof HoldfastError && error.code === "HF_SCHEMA_MISSING")
    return new Failure(
      `${shown(error.message.split(" is not in this database")[0] ?? "A table")} is not in ${server.shown}: run holdfast migrate.`,
      { cause: error },
    );
  if (isDenied(error))
    return new Failure(
      `${shown(await userOf(server))} may not do this in ${server.shown}: ${shown(describe(error))}. Ask for the right, or connect as somebody who has it.`,
      { cause: error },
    );
  return new Failure(shown(describe(error)), { cause: error });
}
