import type { Database, Result, Row } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import { Turns } from "../../waiting/turns.ts";
import { behind, view } from "../../context/revocable.ts";
import { InProcessLocks, type DuckdbConnection, duckdb, render } from "../../engines/duckdb/index.ts";

/** The part of a DuckDBConnection of @duckdb/node-api that is used here. */
export interface DuckdbHandle {
  runAndReadAll(
    text: string,
    values?: never,
  ): Promise<{ getRowObjectsJS(): object[]; readonly rowsChanged: number }>;
  interrupt(): void;
  closeSync(): void;
}

/** The part of a DuckDBInstance of @duckdb/node-api that is used here. */
export interface DuckdbSource<Handle extends DuckdbHandle> {
  connect(): Promise<Handle>;
}

/**
 * Statements of ours that run, by connection. One that is closed meanwhile stands still with the whole process until they have
 * ended, or takes the process with it if they were about to begin.
 */
const running = new WeakMap<DuckdbHandle, Set<Promise<unknown>>>();

function run<Handle extends DuckdbHandle>(
  handle: Handle,
  text: string,
  values?: unknown,
): ReturnType<Handle["runAndReadAll"]> {
  const statement = handle.runAndReadAll(text, values as never) as ReturnType<Handle["runAndReadAll"]>;
  const all = running.get(handle) ?? new Set();
  running.set(handle, all.add(statement));
  const ended = () => void all.delete(statement);
  statement.then(ended, ended);
  return statement;
}

/** Undoes what is open. */
async function close(handle: DuckdbHandle, theirs: () => Promise<void> = async () => {}): Promise<void> {
  handle.interrupt();
  // What has not begun yet is not interrupted.
  const again = setInterval(() => handle.interrupt(), 50);
  try {
    await theirs();
    const ours = running.get(handle);
    while (ours && ours.size > 0) await Promise.allSettled(ours);
  } finally {
    clearInterval(again);
  }
  handle.closeSync();
}

/** The database is part of this process: there is no connection to lose. */
const never = new AbortController().signal;

function isHandle(value: unknown): value is DuckdbHandle {
  const handle = value as Partial<DuckdbHandle> | null;
  return (
    typeof handle === "object" &&
    handle !== null &&
    typeof handle.runAndReadAll === "function" &&
    typeof handle.interrupt === "function"
  );
}

/**
 * A DuckDBInstance. Every transaction gets a connection of its own, up to `connections` (10 by default). Make one
 * instance per file and process, and give the same one to whoever locks.
 */
export function fromDuckdb<Handle extends DuckdbHandle>(
  instance: DuckdbSource<Handle>,
  { connections = 10 } = {},
): Database<Handle, DuckdbConnection> {
  if (typeof instance?.connect !== "function" || isHandle(instance))
    throw new UsageError("fromDuckdb(instance): this is no DuckDBInstance of @duckdb/node-api");
  let asked: Promise<InProcessLocks> | undefined;
  /** Objects of one database differ (`DuckDBInstance.fromCache`): its file tells. */
  const findLocks = async (): Promise<InProcessLocks> => {
    const handle = await instance.connect();
    try {
      const found = await run(
        handle,
        "SELECT path FROM duckdb_databases() WHERE database_name = current_database()",
      );
      const [row] = found.getRowObjectsJS() as { path?: unknown }[];
      return InProcessLocks.of(instance, typeof row?.path === "string" ? row.path : undefined);
    } finally {
      await close(handle);
    }
  };
  const places = new Turns(connections);
  const idle: Handle[] = [];

  const connectionOf = (handle: Handle): DuckdbConnection => ({
    lost: never,
    session: handle,
    get inProcess() {
      return (asked ??= findLocks().catch((error: unknown) => {
        asked = undefined;
        throw error;
      }));
    },
    async query(statement): Promise<Result> {
      const { text, values } = render(statement);
      const result = await run(handle, text, values);
      return { rows: result.getRowObjectsJS() as Row[], affected: result.rowsChanged };
    },
    async cancel() {
      handle.interrupt();
      (await this.inProcess).cancel(handle);
    },
    async aside(body) {
      const other = idle.pop() ?? (await instance.connect());
      let fit = false;
      try {
        const value = await body(connectionOf(other));
        fit = true;
        return value;
      } finally {
        if (fit) idle.push(other);
        else await close(other);
      }
    },
  });

  return {
    engine: duckdb,
    traits: {
      client: "@duckdb/node-api",
      cancel: true,
      listen: false,
      embedded: true,
      single: false,
      pinned: true,
      begins: false,
    },
    async connect({ signal }) {
      const leave = await places.enter(signal);
      try {
        const handle = idle.pop() ?? (await instance.connect());
        const connection = connectionOf(handle);
        const inProcess = await connection.inProcess;
        const seen = view(handle, { makers: ["prepare", "createAppender"], tracked: true });
        return {
          connection,
          native: seen.proxy,
          seal: seen.seal,
          async release(broken) {
            seen.revoke();
            if (broken) await close(handle, seen.idle);
            else {
              // What its body did not wait for must not run in the next one's transaction.
              await seen.idle();
              idle.push(handle);
            }
            inProcess.leave(handle);
            leave();
          },
        };
      } catch (error) {
        leave();
        throw error;
      }
    },
    join(native) {
      if (!isHandle(native))
        throw new NotInTransactionError("this is no DuckDBConnection of @duckdb/node-api");
      return connectionOf(behind(native));
    },
    async close() {
      await Promise.all(idle.splice(0).map((handle) => close(handle)));
    },
  };
}
