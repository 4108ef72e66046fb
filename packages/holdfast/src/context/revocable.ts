import { UsageError } from "../seam/errors.ts";
import { type Answered, answering, sectionHere } from "./section.ts";
import { callSites } from "./call-site.ts";

/**
 * The same object, for as long as a body may use it. What the body was given is often shared with others, or theirs
 * once it is back in its pool: a body that goes on must not write into their transactions.
 */
export interface View<T extends object> {
  readonly proxy: T;
  /** From now on nothing is sent but what ends the transaction: a client that writes COMMIT itself has yet to do so. */
  seal(): void;
  /** From now on what is sent waits for this, in its order, and is not sent if it fails. */
  hold(until: Promise<unknown>): void;
  /** Resolves when what was held has been sent, or never will be. */
  sent(): Promise<void> | undefined;
  /** From now on nothing can be called at all. */
  revoke(): void;
  /** Resolves when what was called has been answered. */
  idle(): Promise<void>;
  /** Who waits for an answer has waited in vain: of a client that does not tell them when its connection is ended. */
  fail(error: Error): void;
}

export interface ViewOptions {
  /** Methods whose results, or what they promise, are part of it, such as prepared statements. */
  readonly makers?: readonly string[];
  /** Methods that send something to the server. Left out: all. */
  readonly senders?: readonly string[];
  /** Whether promises are kept track of, for `idle` and `fail`. A client may return promises of its own kind. */
  readonly tracked?: boolean;
  /** Told of each promise that is kept track of. */
  readonly watch?: { begins(): void; ends(): void } | undefined;
  /** Whether a call of one of them ends the transaction. */
  readonly ends?: (name: string, args: readonly unknown[]) => boolean;
  /** Statements that earlier views of the same object have prepared. */
  readonly prepared?: PreparedBefore;
  /** Sends when it may be sent, and returns what the method would. Left out: a promise. */
  readonly later?: (until: Promise<unknown>, args: readonly unknown[], send: () => unknown) => unknown;
}

/** Statements by their texts. Each is lent to one view at a time, and comes back when that is revoked. */
export interface PreparedBefore {
  take(text: string): object | undefined;
  give(text: string, statement: object): void;
  /** The object that they were prepared on may have been changed in a way that they do not know of. */
  clear(): void;
}

const targets = new WeakMap<object, object>();

/** Methods, of whatever client, whose first argument is a statement: its text, or an object that has it. */
const speaking: ReadonlySet<string | symbol> = new Set([
  "query",
  "execute",
  "executeQuery",
  "prepare",
  "exec",
  "run",
]);

/** What is behind a view; anything else is itself. */
export function behind<T extends object>(object: T): T {
  return (targets.get(object) as T | undefined) ?? object;
}

export function over(): UsageError {
  // Who did not wait for the statement may not hear of its error either.
  sectionHere()?.saw("late", callSites.here(over));
  return new UsageError(
    "This transaction is over: its client must not be used any more. Is an `await` missing in its body?",
    "HF_TRANSACTION_OVER",
  );
}

const ending = /^\s*(?:commit|rollback|end|abort)(?:\s+(?:work|transaction))?\s*;?\s*$/i;
const savepoint = /^\s*(?:rollback\s+to|release)(?:\s+savepoint)?\s+\S+\s*$/i;

function wordsOf(statement: unknown): string {
  const { text, sql } = (typeof statement === "object" ? (statement ?? {}) : {}) as Record<string, unknown>;
  const words = typeof statement === "string" ? statement : (text ?? sql);
  return typeof words === "string" ? words : "";
}

/** MariaDB's BEGIN NOT ATOMIC begins a block of a program. */
const beginning = /^\s*(?:begin(?!\s+not\s+atomic)|start\s+transaction)\b/i;

/** Whether a statement, as text or as an object that has it, begins a transaction. */
export function isBegin(statement: unknown): boolean {
  return beginning.test(wordsOf(statement));
}

/** Whether a statement, as text or as an object that has it, ends a transaction. */
export function isEnd(statement: unknown): boolean {
  return ending.test(wordsOf(statement));
}

/** The same, or ends a savepoint that was left in it. */
export function endsTransaction(statement: unknown): boolean {
  const words = wordsOf(statement);
  return ending.test(words) || savepoint.test(words);
}

/** The values of a statement, wherever a client wants them. Undefined: they come later, or have come. */
function valuesOf(
  name: string | symbol,
  args: readonly unknown[],
  speaks: boolean,
): readonly unknown[] | undefined {
  const [first, second] = args;
  if (name === "prepare" || args.length === 0) return undefined;
  if (!speaks) return Array.isArray(first) ? first : args;
  if (Array.isArray(second)) return second;
  const { values, args: bound, parameters } = Object(first) as Record<string, unknown>;
  const found = values ?? bound ?? parameters;
  return Array.isArray(found) ? found : [];
}

/** Methods after which a statement is what it was when it was prepared. */
const leavesAlike: ReadonlySet<string | symbol> = new Set(["run", "get", "all"]);

/** Methods of a client after which statements that were prepared are what they would be if they were prepared now. */
const leavesPrepared: ReadonlySet<string | symbol> = new Set(["prepare", "exec", "pragma", "transaction"]);

const nothing = (): void => {};

type Callback = (this: unknown, ...args: unknown[]) => unknown;

/** The callback that is called with the answer, if there is one, tells of it first. */
function tellsAnswer(args: unknown[], answered: Answered): boolean {
  const last = args.at(-1);
  if (typeof last !== "function") return false;
  args[args.length - 1] = function (this: unknown, ...given: unknown[]) {
    answered();
    return (last as Callback).apply(this, given);
  };
  return true;
}

/**
 * A client's own kind of promise is left alone: it may run the statement when it is waited for. `isDone`: what is no promise
 * is a result.
 */
function timed(made: unknown, answered: Answered | undefined, isDone: boolean): unknown {
  if (!answered) return made;
  if (made instanceof Promise) return made.constructor === Promise ? answering(made, answered) : made;
  if (isDone) answered();
  return made;
}

function promised(until: Promise<unknown>, _: readonly unknown[], send: () => unknown): Promise<unknown> {
  return until.then(send);
}

export function view<T extends object>(
  target: T,
  {
    makers = [],
    senders,
    tracked = false,
    watch,
    ends = () => false,
    prepared: before,
    later = promised,
  }: ViewOptions = {},
): View<T> {
  let state: "open" | "sealed" | "revoked" = "open";
  const running = new Set<Promise<unknown>>();
  const failures = new Set<(error: Error) => void>();
  const sends = (name: string) => !senders || senders.includes(name);
  const check = (name: string, args: readonly unknown[]) => {
    if (state === "open") return;
    if (state === "revoked" || (sends(name) && !ends(name, args))) throw over();
  };
  let held: Promise<unknown> | undefined;
  let isOver = false;
  /** Called, and not sent yet: what comes after must not overtake it. */
  let waiting = 0;
  const whenFree = (name: string, args: readonly unknown[], send: () => unknown): unknown => {
    if (!held || !sends(name) || (isOver && waiting === 0)) return send();
    waiting++;
    return later(held, args, () => {
      waiting--;
      return send();
    });
  };
  /** What was prepared here, and is to be used by later views. */
  const preparedHere = before && new Map<object, string>();
  const prepare = (text: string, call: () => unknown): unknown => {
    const statement = before?.take(text) ?? call();
    if (typeof statement === "object" && statement !== null) preparedHere?.set(statement, text);
    return statement;
  };
  const changes = (object: object, whole: boolean, name: string | symbol) => {
    if (!whole && !leavesAlike.has(name)) preparedHere?.delete(object);
    if (!whole || leavesPrepared.has(name)) return;
    before?.clear();
    preparedHere?.clear();
  };
  /** `by`: the statement that it was prepared from. */
  const show = <O extends object>(object: O, whole = false, by?: unknown): O => {
    const proxy: O = new Proxy(object, {
      get(_, name) {
        const value: unknown = Reflect.get(object, name, object);
        if (typeof value !== "function" || name === "constructor") return value;
        return (...args: unknown[]) => {
          check(String(name), args);
          // Of what was made of it, a statement that was prepared, arguments are values.
          const speaks = whole && speaking.has(name);
          const section = speaks || by !== undefined ? sectionHere() : undefined;
          const answered = section?.sent(speaks ? args[0] : by, valuesOf(name, args, speaks), !speaks);
          // Methods of native objects work on the object itself only.
          const apply = (): unknown => Reflect.apply(value as (...a: unknown[]) => unknown, object, args);
          if (before) changes(object, whole, name);
          const reused =
            before && whole && name === "prepare" && args.length === 1 && typeof args[0] === "string";
          const call = reused ? () => prepare(args[0] as string, apply) : apply;
          const hasCallback = answered !== undefined && tellsAnswer(args, answered);
          const free = whenFree(String(name), args, call);
          const made = timed(
            free,
            answered,
            !hasCallback && (by !== undefined || free === object || free === undefined),
          );
          if (made === object) return proxy;
          const prepared = whole && name === "prepare" ? args[0] : undefined;
          if (tracked && made instanceof Promise) {
            running.add(made);
            watch?.begins();
            let fail!: (error: Error) => void;
            const failed = new Promise<never>((_, reject) => (fail = reject));
            failures.add(fail);
            const settle = () => {
              watch?.ends();
              running.delete(made);
              failures.delete(fail);
            };
            made.then(settle, settle);
            const answer: Promise<unknown> = Promise.race([made, failed]);
            return makers.includes(String(name)) ? answer.then((each) => shown(each, prepared)) : answer;
          }
          if (!makers.includes(String(name))) return made;
          return made instanceof Promise ? made.then((each) => shown(each, prepared)) : shown(made, prepared);
        };
      },
      set(_, name, value) {
        if (before) changes(object, whole, name);
        return Reflect.set(object, name, value, object);
      },
    });
    targets.set(proxy, object);
    return proxy;
  };
  // One that takes statements is the client again, in another guise.
  const shown = (made: unknown, by: unknown) =>
    typeof made === "object" && made !== null ? show(made, "query" in made, by) : made;
  return {
    proxy: show(target, true),
    seal() {
      if (state === "open") state = "sealed";
    },
    hold(until) {
      held = until;
      until.then(() => (isOver = true), nothing);
    },
    sent: () => (waiting > 0 ? held?.then(nothing, nothing) : undefined),
    revoke() {
      state = "revoked";
      for (const [statement, text] of preparedHere ?? []) before?.give(text, statement);
      preparedHere?.clear();
    },
    async idle() {
      while (running.size > 0) await Promise.allSettled(running);
    },
    fail(error) {
      running.clear();
      for (const fail of failures) fail(error);
    },
  };
}
