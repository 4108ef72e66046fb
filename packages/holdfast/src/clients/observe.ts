/** Watching a method by which a client gives out connections, or sends statements, to whoever asks. */
import { AsyncLocalStorage } from "node:async_hooks";
import type { Seen } from "../seam/database.ts";
import { type CallSite, callSites } from "../context/call-site.ts";
import { isEnd } from "../context/revocable.ts";

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
