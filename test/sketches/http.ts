/**
 * A sketch of a client to come: a serverless driver that sends each statement as a request of its own. The family is
 * a known one, but between two requests there is no transaction and no session, so nothing that locks can be kept:
 * it answers what it is, and refuses the rest with a reason.
 */
import { unsupported } from "../../packages/holdfast/src/seam/capabilities.ts";
import type { Database, Engine, SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { NotInTransactionError, UnsupportedError } from "../../packages/holdfast/src/seam/errors.ts";
import { postgres, render } from "../../packages/holdfast/src/engines/postgres/index.ts";

/** Like `neon(url)`: one statement, one request. Several can be sent as a batch, but none can depend on another. */
export interface HttpSql {
  query(text: string, values: unknown[]): Promise<Record<string, unknown>[]>;
}

const why =
  "this client sends every statement as a request of its own, so no transaction stays open between a check and a write. " +
  "Use the driver's WebSocket Pool, or a server that is reached by TCP";

const refuse = async (): Promise<never> => {
  throw new UnsupportedError(`hf.transaction: ${why}`);
};

const never = new AbortController().signal;

const httpEngine = {
  ...postgres,
  async probe(connection, traits) {
    const found = await postgres.probe(connection, traits);
    const gap = unsupported(why);
    return { ...found, transactionLocks: gap, joinedLocks: gap, sessionLocks: gap, lockFirstIsolation: [] };
  },
  begin: refuse,
  // What was never begun leaves nothing to undo.
  end: async () => true,
  savepoint: refuse,
  lock: refuse,
} satisfies Engine<SqlConnection>;

export function fromHttp(sql: HttpSql) {
  const connection: SqlConnection = {
    lost: never,
    async query(statement) {
      const { text, values } = render(statement);
      const rows = await sql.query(text, values);
      return { rows, affected: 0 };
    },
  };
  return {
    engine: httpEngine,
    traits: {
      client: "http",
      cancel: false,
      listen: false,
      embedded: false,
      single: false,
      pinned: false,
      begins: true,
    },
    connect: async () => ({ connection, native: sql, release: () => {} }),
    join() {
      throw new NotInTransactionError(why);
    },
  } satisfies Database<HttpSql, SqlConnection>;
}
