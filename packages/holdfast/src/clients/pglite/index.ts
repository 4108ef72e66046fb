import type { Database, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import { observeMethod, observeOpenings } from "../observe.ts";
import { OneConnection } from "../../waiting/one-connection.ts";
import { type PgliteTransaction, pgliteConnection } from "./connection.ts";
import { postgres } from "../../engines/postgres/index.ts";

export type { PgliteTransaction };

export interface PgliteClient<Tx extends PgliteTransaction> {
  query: PgliteTransaction["query"];
  exec: PgliteTransaction["exec"];
  transaction<T>(body: (tx: Tx) => Promise<T>): Promise<T>;
}

/** A PGlite instance. It has one connection: transactions queue up, and locks are kept within this process. */
export function fromPglite<Tx extends PgliteTransaction>(
  client: PgliteClient<Tx>,
): Database<Tx, SqlConnection> {
  if (
    typeof client !== "object" ||
    client === null ||
    typeof client.transaction !== "function" ||
    typeof client.exec !== "function"
  ) {
    throw new UsageError("fromPglite(client): this is not an instance of PGlite");
  }
  const door = OneConnection.of(client);
  return {
    engine: postgres,
    traits: {
      client: "pglite",
      cancel: false,
      listen: false,
      embedded: true,
      single: true,
      pinned: false,
      begins: true,
    },
    async transaction({ locks, wait, signal, isolation, isolationIsDefault }, body) {
      const leave = await door.enter({ use: "transaction", locks, wait, signal });
      try {
        return await client.transaction(async (tx) => {
          if (!isolationIsDefault) await tx.exec(`SET TRANSACTION ISOLATION LEVEL ${isolation}`);
          return body({ connection: pgliteConnection(tx), native: tx });
        });
      } finally {
        leave();
      }
    },
    // Whoever waits for the one connection inside of a transaction waits for itself.
    room: () => ({ max: 1, out: 1 }),
    openings: (opening) => observeOpenings(client, "transaction", opening),
    observe(seen) {
      const ends = ["query", "exec", "transaction"].map((name) => observeMethod(client, name, seen));
      return () => ends.forEach((end) => end());
    },
    join(native) {
      if (typeof native !== "object" || native === null || typeof native.exec !== "function")
        throw new NotInTransactionError("this is no transaction of PGlite");
      if (typeof (native as Partial<PgliteClient<Tx>>).transaction === "function") {
        throw new NotInTransactionError(
          "this is the database itself; pass the `tx` that db.transaction(…) hands to its callback",
        );
      }
      return pgliteConnection(native);
    },
  };
}
