/** Watching a method by which a client gives out connections, or sends statements, to whoever asks. */
import { AsyncLocalStorage } from "node:async_hooks";
import type { Opening, Seen } from "../seam/database.ts";
import { type CallSite, callSites } from "../context/call-site.ts";
import { isBegin, isEnd } from "../context/revocable.ts";

type Method = (this: unknown, ...args: unknown[]) => unknown;

/** What is to be known of a call, by its arguments. */
interface Look {
  /** Whether it is one that is meant. */
  readonly counts?: (args: readonly unknown[], self: unknown) => boolean;
  /** Who made it, where the client knows better than the stack. */
  readonly place?: (args: readonly unknown[]) => string | undefined;
}

type Watcher = (args: readonly unknown[], self: unknown, granted: Parameters<Seen>[0]) => void;

interface Watched {
  readonly original: Method;
  readonly watchers: Set<Watcher>;
}

const watched = new WeakMap<object, Map<string, Watched>>();

/**
 * Calls `seen` before each call of `target[name]`; what it throws, the caller gets. The method is replaced once,
 * however many watch it. The connection counts as granted when a function among the arguments is called (a
 * callback, or the consumer of the connection), or when what the method returns settles.
 */
export function observeMethod(
  target: object,
  name: string,
  seen: Seen,
  { counts, place }: Look = {},
): () => void {
  // Another version of the client may not have it: then there is nothing to see.
  if (typeof (target as Record<string, unknown>)[name] !== "function") return () => {};
  const { watchers } = watch(target, name);
  const watcher: Watcher = (args, self, granted) => {
    if (!counts || counts(args, self)) seen(granted, place && (() => place(args)));
  };
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function watch(target: object, name: string): Watched {
  let methods = watched.get(target);
  if (!methods) watched.set(target, (methods = new Map()));
  const known = methods.get(name);
  if (known) return known;
  const original = (target as Record<string, Method>)[name] as Method;
  const entry: Watched = { original, watchers: new Set() };
  methods.set(name, entry);
  (target as Record<string, Method>)[name] = function (this: unknown, ...args) {
    if (entry.watchers.size === 0) return original.apply(this, args);
    let grant: (() => void) | undefined;
    let granted: Promise<void> | undefined;
    const waiting = () => (granted ??= new Promise<void>((resolve) => (grant = resolve)));
    for (const watcher of entry.watchers) watcher(args, this, waiting);
    // The common case: nobody wants to know when.
    if (!granted) return original.apply(this, args);
    const position = args.findIndex((arg) => typeof arg === "function");
    const consumer = args[position] as Method | undefined;
    if (consumer) {
      args[position] = function (this: unknown, ...given: unknown[]) {
        grant?.();
        return consumer.apply(this, given);
      };
    }
    const result = original.apply(this, args);
    const over = () => grant?.();
    if (result !== undefined || !consumer) Promise.resolve(result).then(over, over);
    return result;
  };
  return entry;
}

const bodies: Replaced = new WeakMap();
const handles: Replaced = new WeakMap();

/**
 * Tells of each call of `target[name]` that is given a function, and runs that function as the body of a transaction. The method
 * is replaced once, however many watch it.
 */
export function observeOpenings(target: object, name: string, opening: Opening): () => void {
  return replaced(bodies, target, name, opening, (all, original) => {
    return function (this: unknown, ...args) {
      const position = args.findIndex((arg) => typeof arg === "function");
      if (position >= 0) args[position] = asBody(all, args[position] as Method);
      return original.apply(this, args);
    };
  });
}

/**
 * The same of each call without a function, which promises a handle on the transaction that it begins. `isOpen`: whether that one
 * goes on.
 */
export function observeHandles(
  target: object,
  name: string,
  opening: Opening,
  isOpen: (handle: never) => boolean,
): () => void {
  return replaced(handles, target, name, opening, (all, original) => {
    const method: Method = function (this: unknown, ...args) {
      const result = original.apply(this, args);
      if (!args.some((arg) => typeof arg === "function"))
        tellPromised(all, result as PromiseLike<never>, isOpen, method);
      return result;
    };
    return method;
  });
}

type Replaced = WeakMap<object, Map<string, Set<Opening>>>;

function replaced(
  known: Replaced,
  target: object,
  name: string,
  opening: Opening,
  make: (openings: ReadonlySet<Opening>, original: Method) => Method,
): () => void {
  const original = (target as Record<string, Method>)[name];
  // Another version of the client may not have it: then there is nothing to see.
  if (typeof original !== "function") return () => {};
  let methods = known.get(target);
  if (!methods) known.set(target, (methods = new Map()));
  let openings = methods.get(name);
  if (!openings) {
    methods.set(name, (openings = new Set()));
    // Those of Knex cannot be assigned.
    const own = Object.getOwnPropertyDescriptor(target, name);
    const kind = own && "value" in own ? own : { configurable: true, enumerable: true, writable: true };
    Object.defineProperty(target, name, { ...kind, value: make(openings, original) });
  }
  const all = openings.add(opening);
  return () => all.delete(opening);
}

/** Of a call that promises a handle on the transaction that it begins. `above`: the function whose callers count. */
export function tellPromised<Handle extends object>(
  openings: Iterable<Opening>,
  promised: PromiseLike<Handle>,
  isOpen: (handle: Handle) => boolean,
  above: (...args: never[]) => unknown,
): void {
  let handle: Handle | undefined;
  Promise.resolve(promised).then(
    (made) => (handle = made),
    () => {},
  );
  tellManual(openings, () => handle !== undefined && isOpen(handle), above);
}

export function tellManual(
  openings: Iterable<Opening>,
  isOpen: () => boolean,
  above: (...args: never[]) => unknown,
): void {
  for (const opening of openings) opening.manual(isOpen, above);
}

/** Sessions that Holdfast itself has taken, by what stands for them in all of a client's guises. */
const taken = new WeakSet<object>();

/** From now on a BEGIN on this session is ours, until what this returns is called. */
export function takenByUs(session: object): () => void {
  taken.add(session);
  return () => taken.delete(session);
}

/** A connection of a driver, as statements on it are told of. */
interface StatementTarget {
  readonly connection: object;
  /** The methods that send one, of which the first argument is the statement. */
  readonly senders: readonly string[];
  /** The method that gives it back, where its pool does not tell of that. */
  readonly release?: string;
  /** What stands for the session, if that is not the connection. */
  readonly session?: object | undefined;
  /** Whether its session is in a transaction, where the client knows. Called once before it counts: it may have to listen first. */
  isInTransaction?(): boolean;
}

/** Tells of transactions that are begun by a statement on the connections of one pool. */
class StatementOpenings {
  readonly #openings = new Set<Opening>();
  /** By connection: ends what has been begun on it. */
  readonly #watched = new WeakMap<object, () => void>();

  add(opening: Opening): () => void {
    this.#openings.add(opening);
    return () => this.#openings.delete(opening);
  }

  /** To be called at any time. What was begun by whoever had the connection before is none of the next one's. */
  watch({ connection, senders, release, session = connection, isInTransaction }: StatementTarget): void {
    if (this.#watched.has(connection)) return this.end(connection);
    let current: { isOver: boolean } | undefined;
    const end = (): void => {
      if (current) current.isOver = true;
      current = undefined;
    };
    this.#watched.set(connection, end);
    const begin = (): void => {
      end();
      if (this.#openings.size === 0 || taken.has(session)) return;
      const transaction = (current = { isOver: false });
      isInTransaction?.();
      const isOpen = () => !transaction.isOver && (isInTransaction?.() ?? true);
      tellManual(this.#openings, isOpen, begin);
    };
    if (release) observeMethod(connection, release, end);
    const methods = connection as Record<string, Method>;
    for (const name of senders) {
      const original = methods[name];
      if (!original) continue;
      // As little as can be: it is called for every statement of the pool.
      methods[name] = function (this: unknown, ...args) {
        if (isBegin(args[0])) begin();
        else if (current && isEnd(args[0])) end();
        return original.apply(this, args);
      };
    }
  }

  /** It is given back, or taken again. */
  end(connection: object): void {
    this.#watched.get(connection)?.();
  }
}

interface PoolEvents {
  on?(event: string, told: (...args: never[]) => void): unknown;
}

const pools = new WeakMap<object, StatementOpenings>();

/** The same, of a pool that tells when it gives a connection out, and when it gets one back. */
export function observeStatements(
  pool: object,
  opening: Opening,
  targetOf: (connection: object) => StatementTarget,
): () => void {
  let known = pools.get(pool);
  if (!known) {
    const openings = (known = new StatementOpenings());
    pools.set(pool, openings);
    const { on } = pool as PoolEvents;
    on?.call(pool, "acquire", (connection: object) => openings.watch(targetOf(connection)));
    // pg passes an error first.
    on?.call(pool, "release", (...args: object[]) => {
      const connection = args.findLast((arg) => typeof arg === "object");
      if (connection) openings.end(connection);
    });
  }
  return known.add(opening);
}

/** The same function, run as the body of a transaction that is opened here. */
export function asBody(openings: Iterable<Opening>, body: Method): Method {
  let run = body;
  for (const opening of openings) {
    const inner = run;
    const around = opening();
    if (around)
      run = function (this: unknown, ...given) {
        return around(given[0], () => inner.apply(this, given));
      };
  }
  return run;
}

/** Calls back once, when one of these methods is given a statement that ends a transaction, or gives the connection back. */
export function whenEnded(target: object, names: readonly string[], then: () => void): void {
  const ends: (() => void)[] = [];
  const seen = (): void => {
    for (const end of ends.splice(0)) end();
    then();
  };
  for (const name of names)
    ends.push(observeMethod(target, name, seen, { counts: ([first]) => name === "release" || isEnd(first) }));
}

/** Where the last query of a lazy client was made, in the calling code's own context. */
const made = new AsyncLocalStorage<CallSite>();

/**
 * For clients whose queries run when they are awaited, from where no stack shows who made them: notes the place of each
 * call of these methods inside of a transaction's body.
 */
export function observeMakers(target: object, names: readonly string[], inside: () => boolean): () => void {
  const seen: Seen = () => {
    if (inside()) made.enterWith(callSites.here(seen));
  };
  const ends = names.map((name) => observeMethod(target, name, seen));
  return () => ends.forEach((end) => end());
}

export function placeMade(): string | undefined {
  return made.getStore()?.place;
}
