/** Clients whose handle is one connection to a file in this process, and whose calls are synchronous. */
import type {
  Database,
  DriverError,
  Pinned,
  Purpose,
  Result,
  Row,
  SyncCall,
  SyncInside,
} from "../../seam/database.ts";
import { FileBusyError, NotInTransactionError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { Turns } from "../../waiting/turns.ts";
import { OneConnection } from "../../waiting/one-connection.ts";
import type { Statement } from "../../seam/sql.ts";
import { type PreparedBefore, type View, behind, view } from "../../context/revocable.ts";
import { atOnce } from "./at-once.ts";
import { GiveUp, type SqliteConnection, bound, render } from "./dialect.ts";
import { sqlite } from "./index.ts";
import { lockSupport } from "./probe.ts";
import { OpenFile, openFileOf } from "./open-file.ts";
import { type WriterQueue, writerQueueOf } from "./writer-queue.ts";

export type PreparedHandle = (values: readonly unknown[]) => { rows: Row[]; affected: number };

/** How one client library does it. */
export interface SqliteDriver<Handle extends object> {
  readonly client: string;
  /** What people call with it, for errors. */
  readonly call: string;
  is(value: unknown): boolean;
  inTransaction(handle: Handle): boolean;
  prepare(handle: Handle, text: string): PreparedHandle;
  /** A statement without values and rows, in one call. */
  exec(handle: Handle, text: string): void;
  /** The file's path; undefined for a database in memory, which no other handle can reach. */
  file(handle: Handle): string | undefined;
  /** Another handle on the file, which does not wait for anybody. */
  reopen(handle: Handle, file: string): Handle;
  close(handle: Handle): void;
  unwrap?(error: unknown): DriverError | undefined;
}

/** The database is part of this process: there is no connection to lose. */
const never = new AbortController().signal;

/** Statements of a handle that are kept: those of patterns have as many texts as there are lengths of their lists. */
const mostKept = 100;

type Fixed = "BEGIN DEFERRED" | "BEGIN IMMEDIATE" | "COMMIT" | "ROLLBACK";

/**
 * One handle, and what is kept with it. A busy timeout makes the whole process wait inside one call, where ours wait
 * in between: so it is 0 during our statements, and the caller's during the caller's.
 */
class HandleState<Handle extends object> {
  readonly driver: SqliteDriver<Handle>;
  readonly handle: Handle;
  readonly callers = new CallersStatements();
  /** Preparing is most of the cost of these: 5 of them made a transaction four times as slow as without. */
  readonly #kept = new Map<Fixed, PreparedHandle>();
  /** The same of others that come again and again, those that came last. */
  readonly #again = new Map<string, PreparedHandle>();
  /** Its transaction is the writer, and waits for nobody. */
  #writes = false;
  /** Of a handle that is nobody else's: the caller's timeout, and what it is now. */
  readonly #own: { readonly callers: number; now: number } | undefined;

  constructor(driver: SqliteDriver<Handle>, handle: Handle, owned: boolean) {
    this.driver = driver;
    this.handle = handle;
    if (!owned) return;
    const callers = this.#timeout();
    this.#own = { callers, now: callers };
    this.#setTimeout(0);
  }

  run(text: string, values: readonly unknown[] = []): ReturnType<PreparedHandle> {
    return this.#quietly(() => this.driver.prepare(this.handle, text)(values));
  }

  runAgain(text: string, values: readonly unknown[]): ReturnType<PreparedHandle> {
    return this.#quietly(() => this.#prepared(text)(values));
  }

  #prepared(text: string): PreparedHandle {
    const known = this.#again.get(text);
    const prepared = known ?? this.driver.prepare(this.handle, text);
    // In the order of their last use.
    if (known) this.#again.delete(text);
    else if (this.#again.size >= mostKept) this.#again.delete(this.#again.keys().next().value as string);
    this.#again.set(text, prepared);
    return prepared;
  }

  /** A handle that is nobody else's rests at 0, which saves half of the changes: each takes 3 to 4 µs, for it is compiled. */
  begin(mode: "deferred" | "immediate", ours = false): void {
    this.#quietly(() => this.#fixed(mode === "immediate" ? "BEGIN IMMEDIATE" : "BEGIN DEFERRED"));
    this.#writes = mode === "immediate";
    if (this.#own && !ours) this.#setTimeout(this.#own.callers);
  }

  end(how: "commit" | "rollback"): void {
    // Without WAL a COMMIT may have to wait for readers.
    this.#writes = false;
    if (this.#own) this.#setTimeout(0);
    if (how === "commit") this.#quietly(() => this.#fixed("COMMIT"));
    else if (this.driver.inTransaction(this.handle)) this.#quietly(() => this.#fixed("ROLLBACK"));
  }

  /** Whatever was begun on it was given up. */
  over(): void {
    this.#writes = false;
  }

  #fixed(text: Fixed): void {
    let statement = this.#kept.get(text);
    if (!statement) this.#kept.set(text, (statement = this.driver.prepare(this.handle, text)));
    statement([]);
  }

  #quietly<T>(work: () => T): T {
    if (this.#writes) return work();
    const before = this.#own ? this.#own.now : this.#timeout();
    if (before === 0) return work();
    this.#setTimeout(0);
    try {
      return work();
    } finally {
      this.#setTimeout(before);
    }
  }

  #timeout(): number {
    return Number(this.driver.prepare(this.handle, "PRAGMA busy_timeout")([]).rows[0]?.timeout);
  }

  #setTimeout(ms: number): void {
    if (this.#own?.now === ms) return;
    this.driver.exec(this.handle, `PRAGMA busy_timeout = ${ms}`);
    if (this.#own) this.#own.now = ms;
  }
}

/** Statements of the caller's, by their texts: to prepare one takes as long as to run it. */
class CallersStatements implements PreparedBefore {
  readonly #idle = new Map<string, object>();

  take(text: string): object | undefined {
    const statement = this.#idle.get(text);
    this.#idle.delete(text);
    return statement;
  }

  give(text: string, statement: object): void {
    if (!this.#idle.has(text) && this.#idle.size >= mostKept)
      this.#idle.delete(this.#idle.keys().next().value as string);
    this.#idle.set(text, statement);
  }

  clear(): void {
    this.#idle.clear();
  }
}

/** Handles that are nobody's for now. */
interface HandlePool<Handle extends object> {
  take(): HandleState<Handle>;
  give(handleState: HandleState<Handle>): void;
}

/** A handle as the engine sees it: this one, or one of the pool's when it is first needed. */
class HandleConnection<Handle extends object> implements SqliteConnection {
  readonly lost = never;
  readonly unwrap: SqliteDriver<Handle>["unwrap"];
  readonly writerQueue: WriterQueue | undefined;
  readonly file: OpenFile | undefined;
  readonly giveUp = new GiveUp();
  begun: SqliteConnection["begun"];
  readonly #handlePool: HandlePool<Handle> | undefined;
  #handleState: HandleState<Handle> | undefined;
  /** It was taken for the transaction, so that it can be somebody else's after it. */
  #lent = false;
  #over = false;

  constructor(
    driver: SqliteDriver<Handle>,
    writerQueue: WriterQueue | undefined,
    file: OpenFile | undefined,
    source: HandleState<Handle> | HandlePool<Handle>,
  ) {
    this.unwrap = driver.unwrap;
    this.writerQueue = writerQueue;
    this.file = file;
    if (source instanceof HandleState) this.#handleState = source;
    else this.#handlePool = source;
  }

  get taken(): HandleState<Handle> | undefined {
    return this.#handleState;
  }

  get handleState(): HandleState<Handle> {
    return (this.#handleState ??= (this.#handlePool as HandlePool<Handle>).take());
  }

  get opened(): object {
    return this.handleState.handle;
  }

  get inTransaction(): boolean {
    const { driver, handle } = this.#handleState ?? {};
    return driver !== undefined && driver.inTransaction(handle as Handle);
  }

  /** Its handle is somebody else's from now on: what still waits for a try was given up, and must not end their transaction. */
  revoke(): void {
    this.#over = true;
  }

  #check(): void {
    if (this.#over) throw new UsageError("It was given up, and its connection is somebody else's");
  }

  async query(statement: Statement): Promise<Result> {
    this.#check();
    const { text, values } = render(statement);
    return this.handleState.run(text, values);
  }

  async prepared(statement: Statement): Promise<Result> {
    this.#check();
    const { text, values } = render(statement);
    return this.handleState.runAgain(text, values);
  }

  atOnce(text: string, values: readonly unknown[]): readonly Row[] {
    this.#check();
    return this.handleState.runAgain(text, values.map(bound)).rows;
  }

  begin(mode: "deferred" | "immediate", ours?: boolean): void {
    this.#check();
    if (!this.#handleState) this.#lent = true;
    this.handleState.begin(mode, ours);
  }

  end(how: "commit" | "rollback"): void {
    this.#check();
    const { handleState } = this;
    handleState.end(how);
    // Before the next writer looks for one.
    if (!this.#lent) return;
    this.#lent = false;
    this.#handleState = undefined;
    this.#handlePool?.give(handleState);
  }

  async cancel(): Promise<void> {
    this.giveUp.now();
  }

  writerIsFree(): boolean | undefined {
    const { driver, handle } = this.handleState;
    return writerIsFree(driver, handle);
  }
}

/** Tried from outside, since a handle does not tell whether its own transaction is the writer. */
function writerIsFree<Handle extends object>(
  driver: SqliteDriver<Handle>,
  handle: Handle,
): boolean | undefined {
  const file = driver.file(handle);
  if (file === undefined) return undefined;
  const other = driver.reopen(handle, file);
  try {
    driver.exec(other, "BEGIN IMMEDIATE");
    driver.exec(other, "ROLLBACK");
    return true;
  } catch {
    return false;
  } finally {
    driver.close(other);
  }
}

/**
 * A handle, or a function that opens one. With a function every transaction gets a handle of its own (up to `most`);
 * with one handle transactions queue up for it, and whatever else the program runs on that handle meanwhile becomes
 * part of the transaction.
 */
export function fromHandles<Handle extends object>(
  driver: SqliteDriver<Handle>,
  source: Handle | (() => Handle),
  most: number,
): Database<Handle, SqliteConnection> {
  const opener = typeof source === "function" ? source : undefined;
  if (!opener && !driver.is(source))
    throw new UsageError(
      `${driver.call}(db): this is neither a database of ${driver.client} nor a function that opens one`,
    );
  const { home, transactionSync, ...roads } = opener
    ? pool(driver, opener, most)
    : one(driver, source as Handle);
  return {
    engine: sqlite,
    traits: {
      client: driver.client,
      cancel: true,
      listen: false,
      embedded: true,
      synchronous: true,
      single: !opener,
      pinned: opener !== undefined,
      begins: false,
    },
    ...roads,
    sync: { locks: lockSupport, run: transactionSync },
    join(native) {
      if (!driver.is(native)) throw new NotInTransactionError(`this is no database of ${driver.client}`);
      const path = driver.file(native);
      const writerQueue = path === undefined ? undefined : writerQueueOf(path);
      const isSame = writerQueue ? writerQueue === home() : opener !== undefined && home() === undefined;
      if (!isSame && behind(native) !== source)
        throw new NotInTransactionError(
          `it is on another database (${path ?? "in memory"}) than this instance: what is done there is not seen here`,
        );
      const file = path === undefined ? undefined : openFileOf(native, path);
      return new HandleConnection(driver, writerQueue, file, new HandleState(driver, native, false));
    },
    ...(driver.unwrap && { unwrap: driver.unwrap }),
  };
}

const seen = <Handle extends object>({ handle, callers }: HandleState<Handle>): View<Handle> =>
  view(handle, { makers: ["prepare"], prepared: callers });

interface Roads<Handle> {
  connect(purpose: Purpose): Promise<Pinned<Handle, SqliteConnection>>;
  transactionSync<T>(call: SyncCall, body: (inside: SyncInside<Handle>) => T): T;
  /** What stands for the file. Undefined: it is in memory. */
  home(): WriterQueue | undefined;
  close?(): void;
}

function one<Handle extends object>(driver: SqliteDriver<Handle>, handle: Handle): Roads<Handle> {
  const door = OneConnection.of(handle);
  const handleState = new HandleState(driver, handle, false);
  let writerQueue: WriterQueue | undefined;
  let file: OpenFile | undefined;
  const home = () => {
    const path = writerQueue ? undefined : driver.file(handle);
    if (path !== undefined) {
      writerQueue = writerQueueOf(path);
      file = openFileOf(handle, path);
    }
    return writerQueue;
  };
  const entered = (leave: () => void): Pinned<Handle, HandleConnection<Handle>> => {
    let theirs: boolean;
    try {
      if (leftover.has(handle)) undo(driver, handle);
      home();
      theirs = driver.inTransaction(handle);
    } catch (error) {
      // It was closed.
      leave();
      throw error;
    }
    const connection = new HandleConnection(driver, writerQueue, file, handleState);
    const own = seen(handleState);
    return {
      connection,
      native: own.proxy,
      seal: own.seal,
      release(broken) {
        own.revoke();
        connection.revoke();
        // There is no other handle to go on with: what this call has begun is undone, and the handle stays in use.
        if (broken && !theirs) undo(driver, handle);
        handleState.over();
        writerQueue?.leave(connection);
        leave();
      },
    };
  };
  return {
    connect: async (purpose) => entered(await door.enter(purpose)),
    transactionSync(call, body) {
      const leave = door.enterNow();
      if (!leave) throw FileBusyError.own(call.names());
      return atOnce(entered(leave), call, body);
    },
    home,
  };
}

/** Handles that still are inside a transaction that was given up. */
const leftover = new WeakSet<object>();

function undo<Handle extends object>(driver: SqliteDriver<Handle>, handle: Handle): void {
  leftover.delete(handle);
  if (!driver.inTransaction(handle)) return;
  try {
    driver.exec(handle, "ROLLBACK");
  } catch {
    // An iterator was left open on it: the next transaction begins with another try.
    leftover.add(handle);
  }
}

/** A handle on which an iterator is open cannot be closed; closing is what gives its write lock back. */
function close<Handle extends object>(driver: SqliteDriver<Handle>, handle: Handle): void {
  try {
    driver.close(handle);
  } catch {
    setTimeout(() => close(driver, handle), 100).unref();
  }
}

/** A connection of the pool. A class, since V8 is slow to make objects that have an accessor of their own. */
class Lent<Handle extends object> implements Pinned<Handle, HandleConnection<Handle>> {
  readonly connection: HandleConnection<Handle>;
  readonly #handlePool: HandlePool<Handle>;
  readonly #leave: () => void;
  #seen: View<Handle> | undefined;

  constructor(connection: HandleConnection<Handle>, handlePool: HandlePool<Handle>, leave: () => void) {
    this.connection = connection;
    this.#handlePool = handlePool;
    this.#leave = leave;
  }

  get native(): Handle {
    this.#seen ??= seen(this.connection.handleState);
    return this.#seen.proxy;
  }

  seal(): void {
    this.#seen?.seal();
  }

  release(broken?: boolean): void {
    const { taken, writerQueue } = this.connection;
    this.#seen?.revoke();
    this.connection.revoke();
    if (taken && broken) close(taken.driver, taken.handle);
    else if (taken) this.#handlePool.give(taken);
    writerQueue?.leave(this.connection);
    this.#leave();
  }
}

function pool<Handle extends object>(
  driver: SqliteDriver<Handle>,
  open: () => Handle,
  most: number,
): Roads<Handle> {
  const idle: HandleState<Handle>[] = [];
  const places = new Turns(most);
  let writerQueue: WriterQueue | undefined;
  let openFile: OpenFile | undefined;
  /** It is one database that all handles are on. */
  let known = false;
  const opened = (): HandleState<Handle> => {
    const handle = open();
    if (!driver.is(handle))
      throw new UsageError(
        `${driver.call}(open): the function did not return a database of ${driver.client}`,
      );
    const file = driver.file(handle);
    if (file !== undefined) {
      writerQueue ??= writerQueueOf(file);
      openFile ??= new OpenFile(file);
    }
    if (file === undefined ? writerQueue : writerQueueOf(file) !== writerQueue) throw refusal();
    return new HandleState(driver, handle, true);
  };
  const refusal = () =>
    new UnsupportedError(
      `${driver.call}(open): every handle that it opens is a database of its own, so locks would exclude nobody. ` +
        `Pass one handle instead, ${driver.call}(db), or open the same file each time`,
    );
  /** Throws if two handles in memory can both write. Those that share a cache (`mode=memory&cache=shared`) cannot. */
  const firstInMemory = (first: HandleState<Handle>): HandleState<Handle> => {
    const second = opened();
    const handles = [first.handle, second.handle];
    try {
      for (const handle of handles) driver.exec(handle, "BEGIN IMMEDIATE");
    } catch {
      // Somebody of another instance may be writing there: then it is shared, too.
      undo(driver, first.handle);
      close(driver, second.handle);
      return first;
    }
    for (const handle of handles) close(driver, handle);
    throw refusal();
  };
  // A writer takes its handle when it is its turn, and the last one's: the pages that this one keeps in memory are still
  // true, where the others would read them again after each other's writes. Four in turn took 62 µs, one of them 38.
  const handlePool: HandlePool<Handle> = {
    take: () => idle.pop() ?? opened(),
    give: (handleState) => void idle.push(handleState),
  };
  const home = () => {
    if (!known) {
      const first = opened();
      idle.push(writerQueue ? first : firstInMemory(first));
      known = true;
    }
    return writerQueue;
  };
  const connect: Roads<Handle>["connect"] = async ({ signal }) => {
    const leave = await places.enter(signal);
    try {
      home();
      return new Lent(new HandleConnection(driver, writerQueue, openFile, handlePool), handlePool, leave);
    } catch (error) {
      leave();
      throw error;
    }
  };
  return {
    connect,
    transactionSync(call, body) {
      home();
      const connection = new HandleConnection(driver, writerQueue, openFile, handlePool);
      return atOnce(new Lent(connection, handlePool, () => {}), call, body);
    },
    home,
    close() {
      for (const { handle } of idle.splice(0)) close(driver, handle);
    },
  };
}
