/** SQLite and libSQL through @libsql/client, whose transactions are objects on connections of its own. */
import type { Database, DriverError, Pinned, Purpose, Result, Row } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import { Turns } from "../../waiting/turns.ts";
import { OneConnection } from "../../waiting/one-connection.ts";
import { GiveUp, type SqliteConnection, render, sqlite } from "../../engines/sqlite/index.ts";
import { OpenFile } from "../../engines/sqlite/open-file.ts";
import { type WriterQueue, writerQueueOf } from "../../engines/sqlite/writer-queue.ts";

interface ResultSet {
  readonly columns: readonly string[];
  readonly rows: readonly object[];
  readonly rowsAffected: number;
}

interface Runner {
  execute(statement: { sql: string; args: never[] }): Promise<ResultSet>;
  executeMultiple(sql: string): Promise<void>;
}

/** The part of an interactive transaction of @libsql/client that is used here. */
export interface LibsqlTransaction extends Runner {
  readonly closed: boolean;
  commit(): Promise<void>;
  rollback(): Promise<void>;
  close(): void;
}

/** The part of a Client of @libsql/client that is used here. */
export interface LibsqlClient extends Runner {
  /** "file": the database is part of this process. */
  readonly protocol: string;
  transaction(mode: "write" | "deferred"): Promise<LibsqlTransaction>;
}

const never = new AbortController().signal;

/** A network that failed says so in words of its own: https://github.com/tursodatabase/libsql-client-ts */
const lost = new Set(["HRANA_CLOSED_ERROR", "HRANA_WEBSOCKET_ERROR", "STREAM_CLOSED", "STREAM_EXPIRED"]);

export function unwrapLibsql(error: unknown): DriverError | undefined {
  const { code, extendedCode, message } = error as DriverError & { extendedCode?: string };
  if (typeof code !== "string") return undefined;
  if (lost.has(code)) return { lost: true, code, message: message ?? "" };
  return typeof extendedCode === "string" ? { code: extendedCode, message: message ?? "" } : undefined;
}

export function isLibsqlTransaction(value: unknown): value is LibsqlTransaction {
  const tx = value as Partial<LibsqlTransaction> | null;
  return (
    typeof tx === "object" &&
    tx !== null &&
    typeof tx.execute === "function" &&
    typeof tx.commit === "function" &&
    typeof tx.closed === "boolean"
  );
}

async function run(runner: Runner, statement: Parameters<SqliteConnection["query"]>[0]): Promise<Result> {
  const { text, values } = render(statement);
  const { columns, rows, rowsAffected } = await runner.execute({ sql: text, args: values as never[] });
  // Its rows hold every value twice, by name and by number.
  const plain = rows.map((row) => Object.fromEntries(columns.map((name) => [name, (row as Row)[name]])));
  return { rows: plain, affected: rowsAffected };
}

/**
 * A statement that fails because the file is busy stays under way on its connection until it is garbage collected, and
 * nothing can be committed there meanwhile (https://github.com/tursodatabase/libsql-client-ts/issues/352). Whatever is read there
 * next keeps its read lock for as long, so that without WAL nobody at all can commit. So on a local file whatever may meet another
 * writer is sent as a script, whose statements end in any case.
 */
const scripts = {
  write: "ROLLBACK; BEGIN IMMEDIATE",
  // BEGIN alone locks nothing. This reads, and what is read after it in the transaction finds its lock taken.
  deferred: "SELECT 1 FROM sqlite_schema LIMIT 1",
} as const;

async function begin(client: LibsqlClient, mode: keyof typeof scripts): Promise<LibsqlTransaction> {
  if (client.protocol !== "file") return client.transaction(mode);
  const tx = await client.transaction("deferred");
  try {
    await tx.executeMultiple(scripts[mode]);
    return tx;
  } catch (error) {
    tx.close();
    throw error;
  }
}

/** Whether a write transaction can begin now, beside the one that asks. */
async function writerIsFree(client: LibsqlClient): Promise<boolean | undefined> {
  try {
    const other = await begin(client, "write");
    other.close();
    return true;
  } catch (error) {
    // No connection is left to try on: nothing is known.
    return (error as DriverError).code === "TRANSACTION_ACTIVE" ? undefined : false;
  }
}

/** A client's file, asked for once. On a server those who wait are the server's business. */
class Whereabouts {
  writerQueue: WriterQueue | undefined;
  file: OpenFile | undefined;
  readonly #client: LibsqlClient;
  #known: boolean;

  constructor(client: LibsqlClient) {
    this.#client = client;
    this.#known = client.protocol !== "file";
  }

  async find(runner: Runner = this.#client): Promise<void> {
    if (this.#known) return;
    try {
      const { rows } = await runner.execute({ sql: "PRAGMA database_list", args: [] });
      const { file } = (rows as Row[]).find(({ name }) => name === "main") ?? {};
      this.#known = true;
      // None: a database in memory.
      if (typeof file !== "string" || file === "") return;
      this.writerQueue ??= writerQueueOf(file);
      this.file ??= new OpenFile(file);
    } catch {
      // Its only connection is inside of a transaction: next time.
    }
  }
}

/** A connection that is one of the client's own pool, and another one with every BEGIN. */
class LibsqlConnection implements SqliteConnection {
  readonly lost = never;
  readonly unwrap = unwrapLibsql;
  readonly switches = true;
  readonly giveUp = new GiveUp();
  begun: SqliteConnection["begun"];
  readonly #client: LibsqlClient;
  readonly #whereabouts: Whereabouts;
  #tx: LibsqlTransaction | undefined;
  /** The transaction may have read nothing yet. */
  #unread: boolean;

  constructor(client: LibsqlClient, whereabouts: Whereabouts, tx?: LibsqlTransaction) {
    this.#client = client;
    this.#whereabouts = whereabouts;
    this.#tx = tx;
    this.#unread = tx !== undefined && client.protocol === "file";
  }

  get writerQueue(): WriterQueue | undefined {
    return this.#whereabouts.writerQueue;
  }

  get file(): OpenFile | undefined {
    return this.#whereabouts.file;
  }

  locate(): Promise<void> {
    return this.#whereabouts.find(this.#tx);
  }

  get tx(): LibsqlTransaction {
    if (!this.#tx) throw new UsageError("There is no transaction yet");
    return this.#tx;
  }

  get opened(): object {
    return this.#client;
  }

  get inTransaction(): boolean {
    return this.#tx !== undefined && !this.#tx.closed;
  }

  async query(statement: Parameters<SqliteConnection["query"]>[0]): Promise<Result> {
    const tx = this.#tx;
    if (!tx && this.#client.protocol === "file") return this.#apart(statement);
    if (tx && this.#unread) await tx.executeMultiple(scripts.deferred);
    this.#unread = false;
    return run(tx ?? this.#client, statement);
  }

  /** By itself. */
  async #apart(statement: Parameters<SqliteConnection["query"]>[0]): Promise<Result> {
    const tx = await begin(this.#client, "deferred");
    try {
      const result = await run(tx, statement);
      await tx.executeMultiple("COMMIT");
      return result;
    } finally {
      tx.close();
    }
  }

  async script(text: string): Promise<Result[]> {
    await (this.#tx ?? this.#client).executeMultiple(text);
    return [];
  }

  async cancel(): Promise<void> {
    this.giveUp.now();
  }

  writerIsFree(): Promise<boolean | undefined> {
    return writerIsFree(this.#client);
  }

  async begin(mode: "deferred" | "immediate"): Promise<void> {
    try {
      this.#tx = await begin(this.#client, mode === "immediate" ? "write" : mode);
    } catch (error) {
      if ((error as DriverError).code !== "TRANSACTION_ACTIVE") throw error;
      throw new UsageError(
        "All connections of this libSQL client are inside of transactions. A database in memory and an embedded replica have one: " +
          "write fromLibsql(client, { connections: 1 }). Otherwise give the client more (`concurrency`), or Holdfast less.",
        "HF_USAGE",
        error,
      );
    }
  }

  async end(how: "commit" | "rollback"): Promise<void> {
    const tx = this.#tx;
    if (!tx) return;
    if (how === "rollback") {
      if (!tx.closed) await tx.rollback();
    } else if (this.#client.protocol === "file") {
      // Unlike commit(), which gives the connection back also if a reader was in the way, this can be said again.
      await tx.executeMultiple("COMMIT");
    } else await tx.commit();
    tx.close();
    this.#tx = undefined;
  }

  /** Rolls back whatever is open. */
  drop(): void {
    try {
      this.#tx?.close();
    } catch {
      // It is closed, or its server is gone.
    }
  }
}

/** `owner`: the client, where this is a view of it. */
export function libsqlDatabase<Native>(
  client: LibsqlClient,
  connections: number,
  owner: object = client,
): Database<Native, SqliteConnection> {
  const local = client.protocol === "file";
  const places = new Turns(connections);
  const door = connections === 1 ? OneConnection.of(owner) : undefined;
  const whereabouts = new Whereabouts(client);
  return {
    engine: sqlite,
    traits: {
      client: "@libsql/client",
      cancel: local,
      listen: false,
      embedded: local,
      single: door !== undefined,
      pinned: false,
      begins: false,
    },
    async connect(purpose: Purpose): Promise<Pinned<Native, SqliteConnection>> {
      const leave = await (door ? door.enter(purpose) : places.enter(purpose.signal));
      await whereabouts.find();
      const connection = new LibsqlConnection(client, whereabouts);
      return {
        connection,
        // Made by BEGIN.
        get native() {
          return connection.tx as Native;
        },
        release() {
          connection.drop();
          connection.writerQueue?.leave(connection);
          leave();
        },
      };
    },
    join(native) {
      if (!isLibsqlTransaction(native))
        throw new NotInTransactionError(
          "this is no transaction of @libsql/client: await client.transaction(…)",
        );
      return new LibsqlConnection(client, whereabouts, native);
    },
    unwrap: unwrapLibsql,
  };
}
