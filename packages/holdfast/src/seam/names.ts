/**
 * Our own things in a database have a place of their own: a schema, or a prefix of their names. Two applications with
 * different ones share nothing: neither tables, nor locks, nor channels.
 */
import type { Connection, Database, Engine, Lent, Pinned, SqlConnection } from "./database.ts";
import { UnsupportedError, UsageError } from "./errors.ts";
import { type Key, type LockRequest, keyIn } from "./key.ts";
import { type Names, type Statement, named } from "./sql.ts";

export const defaultSchema = "holdfast";

/** `what`: in the words of the engine. */
export function schemaText(schema: unknown, what: string): string {
  if (typeof schema !== "string" || schema === "")
    throw new UsageError(`schema must be the name of ${what}, not ${JSON.stringify(schema)}`);
  if (!schema.isWellFormed() || schema.includes("\0"))
    throw new UsageError(`schema: ${JSON.stringify(schema)} cannot be the name of ${what}`);
  return schema;
}

/** First words of our tables: with one of them at its end, a prefix would make the names of another one's tables. */
const words = ["lease", "once", "queue", "quota", "schedule", "stock"];
const longest = 32;

/** For engines where the schema is the beginning of our tables' names. Plain letters: names are quoted nowhere, and compared in any case. */
export function prefixNames(given: unknown): Names {
  const schema = schemaText(given, "what our tables begin with here");
  const refuse = (why: string) => {
    throw new UsageError(
      `schema: ${JSON.stringify(schema)} cannot be what names of tables begin with here: ${why}`,
    );
  };
  if (!/^[a-z][a-z0-9_]*$/.test(schema))
    refuse("it must be of small letters (a to z), digits and _, a letter first");
  if (schema.length > longest) refuse(`it must have at most ${longest} letters`);
  const word = words.find((each) => schema.endsWith(`_${each}`) || schema === each);
  if (word !== undefined)
    refuse(`with "${word}" at its end, its tables could not be told from those of another schema`);
  const called = (name: string) => `${schema}_${name}`;
  return { schema, own: called, label: called };
}

/** An object that is another one but for these members. Also of what is frozen, or has private fields. */
function replaced<T extends object>(target: T, members: Partial<T>): T {
  const bound = new Map<PropertyKey, unknown>();
  const get = (name: PropertyKey): unknown => {
    if (name in members) return members[name as keyof T];
    const value: unknown = Reflect.get(target, name, target);
    if (typeof value !== "function") return value;
    let own = bound.get(name);
    if (!own) bound.set(name, (own = value.bind(target)));
    return own;
  };
  const proxy: T = new Proxy(Object.create(null) as T, {
    get: (_, name) => get(name),
    has: (_, name) => name in members || name in target,
    // Also of what inherits from it, and has members of its own.
    set: (_, name, value, receiver) =>
      receiver === proxy
        ? Reflect.set(target, name, value, target)
        : Reflect.defineProperty(receiver as object, name, {
            value,
            writable: true,
            enumerable: true,
            configurable: true,
          }),
  });
  return proxy;
}

/** Each connection once: what is remembered of one must be found again. */
const known = new WeakMap<Names, WeakMap<object, object>>();

/** The same connection, whose statements are about the things of these names. `more`: what else is different. */
export function namedConnection<C extends SqlConnection>(
  connection: C,
  names: Names,
  more: Partial<C> = {},
  /** Sees every answer. */
  seen: <T>(answer: Promise<T>) => Promise<T> = (answer) => answer,
): C {
  let those = known.get(names);
  if (!those) known.set(names, (those = new WeakMap()));
  const before = those.get(connection);
  if (before) return before as C;
  const { prepared } = connection;
  const members: Partial<SqlConnection> = {
    names,
    query: (statement: Statement, theirs?: boolean) =>
      seen(connection.query(named(statement, names), theirs)),
    ...(prepared && { prepared: (statement) => seen(prepared.call(connection, named(statement, names))) }),
  };
  const after = replaced(connection, { ...(members as Partial<C>), ...more });
  those.set(connection, after);
  return after;
}

/** A database whose instance has chosen where its things are. */
export function namedDatabase<Native, C extends Connection>(
  database: Database<Native, C>,
  schema: string,
): Database<Native, C> {
  const { engine } = database;
  if (!engine.named) throw new UnsupportedError(`schema: ${engine.name} has no names to choose`);
  const chosen = engine.named(schema);
  if (!chosen) return database;
  const { on, engine: theirs } = chosen;
  const keyed = keysIn(schema);
  return wrappedDatabase(database, on, { engine: keyedEngine(theirs, keyed) }, keyed);
}

/** One of several databases, whose statements check that the map of them is the one that this process goes by. */
export function checkedDatabase<Native, C extends Connection>(
  database: Database<Native, C>,
  epoch: () => number | undefined,
  stale: () => void,
): Database<Native, C> {
  const checked = database.engine.checking?.(epoch, stale);
  return checked ? wrappedDatabase(database, (connection) => checked.on(connection)) : database;
}

function wrappedDatabase<Native, C extends Connection>(
  database: Database<Native, C>,
  on: (connection: C) => C,
  more: Partial<Database<Native, C>> = {},
  keyed: Keyed = (locks) => locks,
): Database<Native, C> {
  const { connect, transaction } = database;
  const pinned = (each: Pinned<Native, C>) => replaced(each, { connection: on(each.connection) });
  const lent = (each: Lent<Native, C>) => replaced(each, { connection: on(each.connection) });
  return replaced(database, {
    ...more,
    ...(connect && {
      connect: async (purpose) =>
        pinned(await connect.call(database, { ...purpose, locks: keyed(purpose.locks) })),
    }),
    ...(transaction && {
      transaction: (options, body) =>
        transaction.call(database, { ...options, locks: keyed(options.locks) }, (each) => body(lent(each))),
    }),
    join: (native) => on(database.join(native)),
  });
}

type Keyed = (locks: readonly LockRequest[]) => readonly LockRequest[];

function keysIn(schema: string): Keyed {
  const there = new WeakMap<Key, Key>();
  const keyed = (key: Key) => {
    let own = there.get(key);
    if (!own) there.set(key, (own = keyIn(schema, key)));
    return own;
  };
  return (locks) => locks.map((each) => ({ ...each, key: keyed(each.key) }));
}

/** Locks by name are others in each schema. */
function keyedEngine<C extends Connection>(engine: Engine<C>, keyed: Keyed): Engine<C> {
  const { session, holders, keepLocks } = engine;
  return replaced(engine, {
    begin: (connection, open) => engine.begin(connection, { ...open, locks: keyed(open.locks) }),
    lock: (connection, call) => engine.lock(connection, { ...call, locks: keyed(call.locks) }),
    ...(keepLocks && {
      keepLocks: (connection, locks, ...rest) => keepLocks.call(engine, connection, keyed(locks), ...rest),
    }),
    ...(holders && {
      holders: (connection, locks, capabilities) =>
        holders.call(engine, connection, keyed(locks), capabilities),
    }),
    ...(session && {
      session: replaced(session, {
        take: (connection, call) => session.take(connection, { ...call, locks: keyed(call.locks) }),
        give: (connection, locks) => session.give(connection, keyed(locks)),
        clear: (connection, locks) => session.clear(connection, keyed(locks)),
      }),
    }),
  });
}
