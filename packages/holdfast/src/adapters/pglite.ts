import type { Database, Result, SqlConnection } from "../core/database.ts";
import { NotInTransactionError, UsageError } from "../core/errors.ts";
import { Single } from "../core/single.ts";
import { postgres, render } from "../engines/postgres/index.ts";

/** The part of a PGlite transaction that is used here. */
export interface PgliteTransaction {
  query(text: string, values?: unknown[]): Promise<{ rows: unknown[]; affectedRows?: number }>;
  exec(text: string): Promise<{ rows: unknown[]; affectedRows?: number }[]>;
}

export interface PgliteClient<Tx extends PgliteTransaction> {
  query: PgliteTransaction["query"];
  exec: PgliteTransaction["exec"];
  transaction<T>(body: (tx: Tx) => Promise<T>): Promise<T>;
}

/** The server runs inside this process: it cannot be lost without us. */
const never = new AbortController().signal;

function connectionOf(tx: PgliteTransaction): SqlConnection {
  return {
    lost: never,
    async query(statement) {
      const { text, values } = render(statement);
      // `exec` for statements without values: the extended protocol refuses some of them.
      return result(values.length === 0 ? (await tx.exec(text)).at(-1) : await tx.query(text, values));
    },
    script: async (text) => (await tx.exec(text)).map(result),
  };
}

function result(found: { rows: unknown[]; affectedRows?: number } | undefined): Result {
  return { rows: (found?.rows ?? []) as Result["rows"], affected: found?.affectedRows ?? 0 };
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
  const door = Single.of(client);
  return {
    engine: postgres,
    traits: { client: "pglite", cancel: false, listen: false, embedded: true, single: true, pinned: false },
    async transaction({ locks, wait, signal, isolation, isolationIsDefault }, body) {
      const leave = await door.enter({ use: "transaction", locks, wait, signal });
      try {
        return await client.transaction(async (tx) => {
          if (!isolationIsDefault) await tx.exec(`SET TRANSACTION ISOLATION LEVEL ${isolation}`);
          return body(connectionOf(tx), tx);
        });
      } finally {
        leave();
      }
    },
    join(native) {
      if (typeof native !== "object" || native === null || typeof native.exec !== "function")
        throw new NotInTransactionError("this is no transaction of PGlite");
      if (typeof (native as Partial<PgliteClient<Tx>>).transaction === "function") {
        throw new NotInTransactionError(
          "this is the database itself; pass the `tx` that db.transaction(…) hands to its callback",
        );
      }
      return connectionOf(native);
    },
  };
}
