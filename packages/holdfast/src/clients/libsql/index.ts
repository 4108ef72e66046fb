import type { Database } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { type LibsqlClient, libsqlDatabase } from "./connection.ts";
import type { SqliteConnection } from "../../engines/sqlite/index.ts";

export type { LibsqlClient, LibsqlTransaction } from "./connection.ts";

/**
 * A Client of @libsql/client. Every transaction is one of its interactive ones, at most `connections` (4 by default)
 * at a time. A database in memory and an embedded replica have one connection: say `connections: 1`.
 */
export function fromLibsql<Client extends LibsqlClient>(
  client: Client,
  { connections = 4 } = {},
): Database<Awaited<ReturnType<Client["transaction"]>>, SqliteConnection> {
  if (typeof client?.execute !== "function" || typeof client.transaction !== "function")
    throw new UsageError("fromLibsql(client): this is no Client of @libsql/client");
  return libsqlDatabase(client, connections);
}
