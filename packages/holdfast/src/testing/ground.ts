import { ours } from "../context/ours.ts";
import type { Connection, Database, Row } from "../seam/database.ts";
import { UnsupportedError } from "../seam/errors.ts";
import type { Statement } from "../seam/sql.ts";
import { withConnection } from "../transaction/one-shot.ts";
import type { Capabilities } from "../seam/capabilities.ts";
import type { Holdfast } from "../holdfast.ts";

/** One client of a database. A run needs two, as two processes would have (or the same one, if there can be only one). */
export interface ConformanceSite<Native = unknown> {
  readonly database: Database<Native, Connection>;
  /** Runs a body in a transaction that the client opens and ends without Holdfast. */
  ownTransaction<T>(body: (native: Native) => Promise<T>): Promise<T>;
  /** Runs a body with a client that is in no transaction. */
  withIdle<T>(body: (native: Native) => Promise<T>): Promise<T>;
  /** Sends a statement through the client's own transaction, as a caller would. */
  send(native: Native, text: string): unknown;
  close(): Promise<void>;
}

/** What a case works with. */
export interface Ground {
  readonly hf: Holdfast<unknown>;
  /** Another instance on the same database. */
  readonly other: Holdfast<unknown>;
  /** Makes one more, on the same client as `hf`, or on this. */
  another(database?: Database<unknown, Connection>): Holdfast<unknown>;
  readonly site: ConformanceSite;
  readonly capabilities: Capabilities;
  /** A name that no other case uses. */
  readonly fresh: string;
}

/** Runs a statement by itself: some servers end a transaction with DDL. */
export async function execute(
  { database }: Pick<ConformanceSite, "database">,
  statement: Statement,
): Promise<Row[]> {
  const ask = () =>
    withConnection({ database }, (connection) => {
      const { engine } = database;
      if (!engine.query)
        throw new UnsupportedError("conformance: an engine without SQL needs cases of its own");
      return engine.query(connection, statement);
    });
  // Also from within a transaction's body, to see what others see.
  const { rows } = await ours(ask);
  return [...rows];
}

export interface ConformanceCase {
  readonly suite: string;
  readonly name: string;
  run(ground: Ground): Promise<void>;
}
