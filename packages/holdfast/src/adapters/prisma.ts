import { AsyncLocalStorage } from "node:async_hooks";
import type { Database, DriverError, Isolation, Row, SqlConnection } from "../core/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError, message } from "../core/errors.ts";
import { postgres, render } from "../engines/postgres/index.ts";

/** The part of Prisma's transaction client that is used here. */
export interface PrismaTransaction {
  $queryRawUnsafe<T = unknown>(text: string, ...values: unknown[]): PromiseLike<T>;
}

export interface PrismaClientLike extends PrismaTransaction {
  $transaction: (...args: never[]) => unknown;
}

/** The transaction client of a PrismaClient: models and all, as its own `$transaction` callback gets it. */
export type TransactionOf<Client extends PrismaClientLike> = Client["$transaction"] extends (
  body: (tx: infer Tx) => never,
  options?: never,
) => unknown
  ? Tx
  : never;

const levels: Readonly<Record<Isolation, string>> = {
  "read uncommitted": "ReadUncommitted",
  "read committed": "ReadCommitted",
  "repeatable read": "RepeatableRead",
  serializable: "Serializable",
};

function connectionOf(tx: PrismaTransaction): SqlConnection {
  const lost = new AbortController();
  return {
    lost: lost.signal,
    unwrap,
    async query(statement) {
      const { text, values } = render(statement);
      try {
        const rows = await tx.$queryRawUnsafe<Row[]>(text, ...values);
        return { rows: Array.isArray(rows) ? rows : [], affected: 0 };
      } catch (error) {
        // Prisma has no event for a dead connection: a failed statement is the first to know.
        if (unwrap(error)?.lost) lost.abort(error);
        throw error;
      }
    },
  };
}

interface PrismaError {
  code?: unknown;
  message?: string;
  meta?: { code?: unknown; driverAdapterError?: { cause?: DriverCause } };
  cause?: DriverCause;
}

interface DriverCause {
  kind?: string;
  originalCode?: unknown;
}

/** Prisma's own codes, where it does not say the server's: https://www.prisma.io/docs/orm/reference/error-reference */
const prismaCodes: Readonly<Record<string, string>> = {
  P2002: "23505",
  P2003: "23503",
  P2034: "40001",
  P1008: "25P04",
};
const lostKinds = new Set(["ConnectionClosed", "SocketTimeout", "DatabaseNotReachable"]);
const lostPrisma = new Set(["P1001", "P1002", "P1017"]);

const deadConnection =
  /Connection terminated|connection error and is not queryable|ECONNRESET|ECONNREFUSED|Server has closed the connection|due to administrator command|the database system is (?:starting up|shutting down)/;

/** The driver's own words, which reach us as they are when a transaction cannot begin, or end. */
class Lost extends Error {
  readonly lost = true;
  constructor(cause: unknown) {
    super(message(cause), { cause });
  }
}

function unwrap(error: unknown): DriverError | undefined {
  if (typeof error !== "object" || error === null) return undefined;
  const { code, message: text = "", meta, cause } = error as PrismaError;
  const driver = meta?.driverAdapterError?.cause ?? cause;
  if ((driver?.kind && lostKinds.has(driver.kind)) || lostPrisma.has(String(code)))
    return { lost: true, message: text };
  const prismas = "clientVersion" in error || (error as Error).name === "DriverAdapterError";
  // A dead connection reaches us as the driver's words inside Prisma's.
  if (prismas && deadConnection.test(text)) return { lost: true, message: text };
  const original = driver?.originalCode ?? meta?.code;
  if (typeof original === "string") return { code: original, message: text };
  // The transaction was closed by Prisma's own timeout.
  if (code === "P2028" && /expired|timeout|already closed|given time/i.test(text))
    return { code: "25P04", message: text };
  return typeof code === "string" && prismaCodes[code]
    ? { code: prismaCodes[code], message: text }
    : undefined;
}

/** Whether a statement of the transaction that the calling code is in has failed. */
const statements = new AsyncLocalStorage<{ failed: boolean }>();

/** The same client, seen through: an extension is told of every statement, of models and raw ones alike. */
function watching<Client extends PrismaClientLike>(client: Client): Client {
  const { $extends } = client as { $extends?: (extension: object) => Client };
  if (typeof $extends !== "function") return client;
  return $extends.call(client, {
    name: "holdfast",
    query: {
      async $allOperations({ args, query }: { args: unknown; query: (args: unknown) => Promise<unknown> }) {
        try {
          return await query(args);
        } catch (error) {
          const state = statements.getStore();
          if (state) state.failed = true;
          throw error;
        }
      },
    },
  });
}

/** A PrismaClient of version 7 on PostgreSQL. `tx.client` is Prisma's own typed transaction. */
export function fromPrisma<Client extends PrismaClientLike>(
  client: Client,
): Database<TransactionOf<Client>, SqlConnection> {
  if (
    typeof client !== "object" ||
    client === null ||
    typeof client.$transaction !== "function" ||
    typeof client.$queryRawUnsafe !== "function"
  ) {
    throw new UsageError("fromPrisma(client): this is not a PrismaClient");
  }
  const provider = (client as { _activeProvider?: unknown })._activeProvider;
  if (provider !== undefined && provider !== "postgresql" && provider !== "postgres") {
    throw new UnsupportedError(
      `fromPrisma: Holdfast reaches PostgreSQL through Prisma, not yet ${String(provider)}`,
    );
  }
  const watched = watching(client);
  return {
    engine: postgres,
    traits: { client: "prisma", cancel: false, listen: false, embedded: false, single: false, pinned: false },
    transaction({ isolation, isolationIsDefault, deadlineMs }, body) {
      // Said only where it is not the server's default: Prisma would spend a round trip on it, and the engine verifies it.
      const level = isolationIsDefault ? {} : { isolationLevel: levels[isolation] };
      const state = { failed: false };
      let thrown: unknown;
      const run = async (tx: PrismaTransaction) => {
        const value = await body(connectionOf(tx), tx as TransactionOf<Client>).catch((error: unknown) => {
          thrown = error;
          throw error;
        });
        // If a statement failed and its error was swallowed, the server refuses this one too; Prisma would not notice.
        if (state.failed) await tx.$queryRawUnsafe("SELECT 1 AS one");
        return value;
      };
      const options = { ...level, timeout: deadlineMs, maxWait: deadlineMs };
      const running = statements.run(state, () => watched.$transaction(run as never, options as never));
      return (running as Promise<never>).catch((error: unknown) => {
        // Of BEGIN, COMMIT or ROLLBACK, whose connection it was; the body may speak to others.
        throw error !== thrown && deadConnection.test(message(error)) ? new Lost(error) : error;
      });
    },
    join(native) {
      const tx = native as (Partial<PrismaClientLike> & { $disconnect?: unknown }) | null;
      if (typeof tx !== "object" || tx === null || typeof tx.$queryRawUnsafe !== "function")
        throw new NotInTransactionError("this is no transaction of Prisma");
      // A transaction's client nests, so `$transaction` tells nothing; but it cannot disconnect.
      if (typeof tx.$disconnect === "function") {
        throw new NotInTransactionError(
          "this is the PrismaClient itself; pass the `tx` that $transaction(async (tx) => …) hands to its callback",
        );
      }
      return connectionOf(tx as PrismaTransaction);
    },
    unwrap,
  };
}
