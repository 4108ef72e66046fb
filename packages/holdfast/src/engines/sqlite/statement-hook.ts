/**
 * Clients of SQLite whose calls are synchronous, held back for tests. A call that finds the file locked would wait
 * inside of SQLite, where nobody sees it: so no connection waits there, and the wait is made by whoever holds back.
 */
import Module, { createRequire } from "node:module";
import type { HookedCall, StatementHook, HookedStatements } from "../../seam/statement-hook.ts";
import { unseen } from "./board.ts";
import { builtinSqlite } from "./builtin.ts";
import { filled, parts } from "./text.ts";

type Method = (this: object, ...args: unknown[]) => unknown;
type Methods = Record<string, Method>;
type Above = HookedCall<unknown>["above"];
type Shown = HookedCall<unknown>["rows"];

/** What better-sqlite3's Database, libsql's, and DatabaseSync of node:sqlite have in common, or one of them has. */
interface Handle {
  readonly open?: boolean;
  readonly isOpen?: boolean;
  readonly memory?: boolean;
  readonly inTransaction?: boolean;
  /** Since Node 22.16; in older ones nobody is seen inside of a transaction. */
  readonly isTransaction?: boolean;
  prepare(text: string): object;
  close(): unknown;
}

type DatabaseClass = (new (file: string) => Handle) & { readonly prototype: Methods };

/** As the client made them. */
interface Library {
  readonly name: string;
  readonly exec: Method;
  readonly prepare: Method;
  readonly all: Method;
}

interface Connection {
  /** What the application asked for. What SQLite was told is 0. */
  timeoutMs: number;
  /** Its transaction has read something. */
  reads: boolean;
}

interface Source {
  readonly handle: Handle;
  readonly text: string;
}

/** Of the connection alone: their order does not matter. */
const setting =
  /^\s*pragma\s+(\w+\.)?(busy_timeout|foreign_keys|synchronous|cache_size|temp_store|query_only|mmap_size|journal_size_limit|defer_foreign_keys|recursive_triggers|case_sensitive_like|wal_autocheckpoint|secure_delete)\b/i;
const touching = /\b(from|into|update|join)\b/i;
/** Done when it is prepared: its rows are of that moment. */
const aboutTimeout = /\bbusy_timeout\b/i;
const ending = /^\s*(commit|end|release)\b/i;

export function hookStatements(hook: StatementHook): HookedStatements {
  const clients = new Clients(hook);
  const builtin = builtinSqlite();
  if (builtin)
    clients.hold(
      "node:sqlite",
      builtin.DatabaseSync.prototype as unknown as Methods,
      builtin.StatementSync.prototype as unknown as Methods,
    );
  // Whoever loads another one: it may be an ORM, and the copy its own.
  const loader = Module as unknown as { _load: (...args: unknown[]) => unknown };
  const load = loader._load;
  loader._load = function (this: unknown, ...args: unknown[]) {
    const exported = load.apply(this, args);
    if (isDatabase(exported)) clients.holdClass(exported, () => fileOf(args));
    return exported;
  };
  return clients;
}

function fileOf([request, parent]: readonly unknown[]): string {
  const { filename } = (parent ?? {}) as { filename?: string | null };
  return filename ? createRequire(filename).resolve(String(request)) : String(request);
}

function isDatabase(exported: unknown): exported is DatabaseClass {
  if (typeof exported !== "function") return false;
  const { prototype } = exported as Partial<DatabaseClass>;
  return ["exec", "prepare", "transaction", "pragma"].every(
    (name) => typeof prototype?.[name] === "function",
  );
}

class Clients implements HookedStatements {
  readonly clients = ["better-sqlite3", "node:sqlite", "libsql (@libsql/client with a file)"];
  readonly #hook: StatementHook;
  readonly #held = new WeakSet<object>();
  readonly #connections = new WeakMap<Handle, Connection>();
  readonly #sources = new WeakMap<object, Source>();
  /** Those that were inside a transaction after their last statement. */
  readonly #inside = new Map<Handle, Library>();
  /** Methods of a client use others of its own. */
  #within = false;

  constructor(hook: StatementHook) {
    this.#hook = hook;
  }

  inTransaction(): boolean {
    return [...this.#inside.keys()].some(inTransaction);
  }

  rollBack(): void {
    for (const [handle, { exec }] of this.#inside) if (inTransaction(handle)) exec.call(handle, "ROLLBACK");
    this.#inside.clear();
  }

  holdClass(Database: DatabaseClass, file: () => string): void {
    if (this.#held.has(Database.prototype)) return;
    // The class of its statements is not exported.
    const handle = new Database(":memory:");
    const statement = Object.getPrototypeOf(handle.prepare("SELECT 1")) as Methods;
    handle.close();
    this.hold(file(), Database.prototype, statement);
  }

  hold(name: string, database: Methods, statement: Methods): void {
    this.#held.add(database);
    const { exec, prepare } = database as { exec: Method; prepare: Method };
    const library = { name, exec, prepare, all: statement["all"] as Method };
    this.#holdHandle(library, database);
    for (const each of methods) this.#holdStatement(library, statement, each);
    if (database["createTagStore"]) this.#holdTags(library, database);
  }

  #holdHandle(library: Library, database: Methods): void {
    const { exec, prepare } = library;
    const pass = this.#pass.bind(this, library);
    const sources = this.#sources;
    const within = () => this.#within;
    const withTimeout = this.#withTimeout.bind(this, library);
    database["exec"] = function held(text) {
      if (typeof text !== "string" || within() || unseen.has(this)) return exec.call(this, text);
      let result: unknown;
      // Others may come in between any two of a script's statements.
      for (const part of parts(text)) {
        const work = () => exec.call(this, part);
        const handle = this as Handle;
        result = aboutTimeout.test(part)
          ? withTimeout(handle, work)
          : pass({ handle, text: part }, held, work);
      }
      return result;
    };
    const timed = (method: Method): Method =>
      function (...args) {
        const work = () => method.apply(this, args);
        return aboutTimeout.test(String(args[0])) ? withTimeout(this as Handle, work) : work();
      };
    const preparing = timed(prepare);
    database["prepare"] = function (...args) {
      const prepared = preparing.apply(this, args) as object;
      sources.set(prepared, { handle: this as Handle, text: String(args[0]) });
      return prepared;
    };
    const { pragma } = database;
    if (pragma) database["pragma"] = timed(pragma);
  }

  #holdStatement(library: Library, statement: Methods, { name, begin, rows }: StatementMethod): void {
    const original = statement[name] as Method;
    const pass = this.#pass.bind(this, library);
    const sourceOf = this.#sourceOf.bind(this);
    const within = () => this.#within;
    statement[name] = function held(...args) {
      const execute = () => original.apply(this, args);
      if (within()) return execute();
      const { handle, text } = sourceOf(this);
      return pass({ handle, text: filled(text, args) }, held, () => begin(execute()), rows);
    };
  }

  /** node:sqlite since Node 24.9: store.get`SELECT … ${id}`. */
  #holdTags(library: Library, database: Methods): void {
    const create = database["createTagStore"] as Method;
    const pass = this.#pass.bind(this, library);
    database["createTagStore"] = function (...given) {
      const store = create.apply(this, given) as Methods;
      const handle = this as Handle;
      for (const { name, begin, rows } of methods) {
        const original = store[name] as Method;
        store[name] = function held(strings, ...values) {
          const text = filled((strings as string[]).join("?"), values);
          const work = () => begin(original.call(store, strings, ...values));
          return pass({ handle, text }, held, work, rows);
        };
      }
      return store;
    };
  }

  #sourceOf(statement: object): Source {
    // better-sqlite3 prepares some by itself, and tells whose they are.
    const { database, source } = statement as { database?: Handle; source?: string };
    return this.#sources.get(statement) ?? { handle: database as Handle, text: source as string };
  }

  #pass(
    library: Library,
    source: Source,
    above: Above,
    work: () => unknown,
    rows: Shown = () => [],
  ): unknown {
    const { handle, text } = source;
    const execute = () => this.#execute(library, source, work);
    if (setting.test(text) || handle.memory) return execute();
    return this.#hook.pass({
      text,
      library: library.name,
      above,
      execute,
      rows,
      patience: (error) => this.#patience(source, error),
    });
  }

  #execute(library: Library, { handle, text }: Source, work: () => unknown): unknown {
    let connection: Connection | undefined;
    let done = false;
    this.#within = true;
    try {
      connection = this.#connection(library, handle);
      const result = work();
      done = true;
      return result;
    } finally {
      if (inTransaction(handle)) {
        this.#inside.set(handle, library);
        if (connection && done && touching.test(text)) connection.reads = true;
      } else {
        this.#inside.delete(handle);
        if (connection) connection.reads = false;
      }
      this.#within = false;
    }
  }

  /** A statement about the timeout finds the one that the application knows. */
  #withTimeout(library: Library, handle: Handle, work: () => unknown): unknown {
    if (this.#within) return work();
    this.#within = true;
    try {
      const connection = this.#connection(library, handle);
      setTimeoutOf(library, handle, connection.timeoutMs);
      const result = work();
      connection.timeoutMs = timeoutOf(library, handle);
      return result;
    } finally {
      setTimeoutOf(library, handle, 0);
      this.#within = false;
    }
  }

  #connection(library: Library, handle: Handle): Connection {
    let known = this.#connections.get(handle);
    if (!known) {
      known = { timeoutMs: timeoutOf(library, handle), reads: false };
      this.#connections.set(handle, known);
      if (known.timeoutMs > 0) setTimeoutOf(library, handle, 0);
    }
    return known;
  }

  /**
   * A transaction that has read, and would write while another one does, is told so at once, whatever its timeout: it
   * could wait for ever. Then only the whole transaction again helps, as after SQLITE_BUSY_SNAPSHOT.
   */
  #patience({ handle, text }: Source, error: unknown): number | undefined {
    if (!isLocked(error)) return undefined;
    const { reads = false, timeoutMs = 0 } = this.#connections.get(handle) ?? {};
    return reads && !ending.test(text) ? 0 : timeoutMs;
  }
}

function inTransaction(handle: Handle): boolean {
  // libsql ends the process if it is asked about one that is closed.
  if (handle.open === false || handle.isOpen === false) return false;
  return handle.inTransaction ?? handle.isTransaction ?? false;
}

function timeoutOf({ prepare, all }: Library, handle: Handle, change = ""): number {
  const asked = prepare.call(handle, `PRAGMA busy_timeout${change}`) as object;
  return Number((all.call(asked) as { timeout?: unknown }[])[0]?.timeout ?? 0);
}

function setTimeoutOf(library: Library, handle: Handle, ms: number): void {
  timeoutOf(library, handle, ` = ${ms}`);
}

/** By name, as most clients write it, or by number. */
function isLocked(error: unknown): boolean {
  const { code, errcode, rawCode } = (error ?? {}) as {
    code?: unknown;
    errcode?: unknown;
    rawCode?: unknown;
  };
  const number = errcode ?? rawCode;
  if (typeof number === "number") return (number & 0xff) === 5 && number !== 517;
  return typeof code === "string" && code.startsWith("SQLITE_BUSY") && code !== "SQLITE_BUSY_SNAPSHOT";
}

type Rows = Iterator<unknown>;

/** The first row is where it begins to read; the others are of the same moment. */
class Reading implements IterableIterator<unknown> {
  readonly #rows: Rows;
  #first: IteratorResult<unknown> | undefined;
  readonly seen: readonly unknown[];

  constructor(rows: Rows) {
    this.#rows = rows;
    this.#first = rows.next();
    this.seen = this.#first.done ? [] : [this.#first.value];
  }

  next(): IteratorResult<unknown> {
    const first = this.#first;
    this.#first = undefined;
    return first ?? this.#rows.next();
  }

  return(value?: unknown): IteratorResult<unknown> {
    this.#first = { done: true, value: undefined };
    return this.#rows.return?.(value) ?? { done: true, value };
  }

  [Symbol.iterator](): this {
    return this;
  }
}

interface StatementMethod {
  readonly name: string;
  /** What it returns, as far as it has to be executed for that. */
  begin(result: unknown): unknown;
  rows(result: unknown): string[][];
}

const methods: readonly StatementMethod[] = [
  { name: "run", begin: (result) => result, rows: () => [] },
  { name: "get", begin: (row) => row, rows: (row) => (row === undefined ? [] : [shown(row)]) },
  { name: "all", begin: (rows) => rows, rows: (rows) => (rows as unknown[]).map(shown) },
  {
    name: "iterate",
    begin: (rows) => new Reading(rows as Rows),
    rows: (rows) => (rows as Reading).seen.map(shown),
  },
];

function shown(row: unknown): string[] {
  const values =
    typeof row === "object" && row !== null && !(row instanceof Uint8Array) ? Object.values(row) : [row];
  return values.map((value) =>
    value === null
      ? "NULL"
      : value instanceof Uint8Array || value instanceof ArrayBuffer
        ? "…"
        : String(value),
  );
}
