/** Transactions of PGlite, for its own adapter and for those of ORMs on it. */
import type { Result, SqlConnection } from "../../seam/database.ts";
import { render } from "../../engines/postgres/index.ts";

/** The part of a PGlite transaction that is used here. */
export interface PgliteTransaction {
  query(text: string, values?: unknown[]): Promise<{ rows: unknown[]; affectedRows?: number }>;
  exec(text: string): Promise<{ rows: unknown[]; affectedRows?: number }[]>;
}

/** The server runs inside this process: it cannot be lost without us. */
const never = new AbortController().signal;

export function pgliteConnection(tx: PgliteTransaction): SqlConnection {
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
