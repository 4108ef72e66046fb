import { ReplicaError, SchemaMissingError } from "../../seam/errors.ts";
import type { LockView } from "../../seam/inspect.ts";
import { asWriter } from "./begin.ts";
import type { SqliteConnection } from "./dialect.ts";
import { isBusy } from "./errors.ts";
import { leases } from "./leases.ts";

/**
 * Leases tell who has them. Of the file's writer it can only be told that there is one, by trying to be it for an
 * instant: the file keeps no name of it, and none of those who wait.
 */
export async function inspect(connection: SqliteConnection): Promise<LockView[]> {
  // A file that was never migrated has none, and may be written to all the same.
  const entries = await leases.list(connection, {}).catch((error: unknown) => {
    if (error instanceof SchemaMissingError) return [];
    throw error;
  });
  const views = entries.map((entry): LockView => {
    const { name, holder, fence, mode, waiting, since } = entry;
    const inTheWay = entries.filter((other) => !other.waiting && other.name === name && other !== entry);
    return {
      kind: "lease",
      name,
      mode: `${mode}, fence ${fence}`,
      granted: !waiting,
      session: { id: holder, application: "", state: waiting ? "waiting" : "holding", since },
      waitingMs: waiting ? Math.max(0, Date.now() - since.getTime()) : undefined,
      blockedBy: waiting ? [...new Set(inTheWay.map((other) => other.holder))] : [],
    };
  });
  return (await isWritten(connection)) ? [...views, writer] : views;
}

const writer: LockView = {
  kind: "database",
  name: "the write lock of the file",
  mode: "exclusive",
  granted: true,
  session: { id: "unknown", application: "", state: "writing", since: undefined },
  waitingMs: undefined,
  blockedBy: [],
};

async function isWritten(connection: SqliteConnection): Promise<boolean> {
  if (connection.inTransaction) return true;
  try {
    await asWriter(connection, 0, async () => {});
    return false;
  } catch (error) {
    if (isBusy(connection, error)) return true;
    // This client cannot write, so it cannot find out either.
    if (error instanceof ReplicaError) return false;
    throw error;
  }
}
