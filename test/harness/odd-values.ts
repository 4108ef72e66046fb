/** What programs throw, and what they should not. Each is made anew, in the process that throws it. */
import { inspect } from "node:util";
import { runInNewContext } from "node:vm";

export interface Odd {
  readonly name: string;
  readonly make: () => unknown;
  /** What is to be read where it was written down. */
  readonly shows: RegExp;
}

const throwing = (what: string) => () => {
  throw new Error(`${what} was looked at`);
};

/** An error of which one property is something else. */
function errorWith(name: string, property: PropertyDescriptor): Error {
  return Object.defineProperty(new Error("it broke"), name, { configurable: true, ...property });
}

function revoked(target: object): unknown {
  const { proxy, revoke } = Proxy.revocable(target, {});
  revoke();
  return proxy;
}

function cyclic(): Error {
  const first = new Error("the first");
  const second = new Error("the second", { cause: first });
  first.cause = second;
  return first;
}

function handled(promise: Promise<unknown>): Promise<unknown> {
  promise.catch(() => {});
  return promise;
}

const traps = ["get", "has", "getPrototypeOf", "ownKeys", "getOwnPropertyDescriptor"] as const;

export const odd: readonly Odd[] = [
  { name: "undefined", make: () => undefined, shows: /^undefined$/ },
  { name: "null", make: () => null, shows: /^null$/ },
  { name: "zero", make: () => 0, shows: /^0$/ },
  { name: "NaN", make: () => Number.NaN, shows: /^NaN$/ },
  { name: "false", make: () => false, shows: /^false$/ },
  { name: "empty text", make: () => "", shows: /^""$/ },
  { name: "text", make: () => "it broke", shows: /^it broke$/ },
  { name: "a bigint", make: () => 10n, shows: /^10$/ },
  { name: "a symbol", make: () => Symbol("it broke"), shows: /^Symbol\(it broke\)$/ },
  { name: "no prototype", make: () => Object.create(null), shows: /null prototype/ },
  {
    name: "a plain object",
    make: () => ({ code: 7, message: "it broke", more: { deep: [1, 2] } }),
    shows: /^it broke .*code: 7.*deep: \[ 1, 2 \]/s,
  },
  { name: "a list", make: () => [1, "two"], shows: /^\[ 1, 'two' \]$/ },
  { name: "a function", make: () => function broken() {}, shows: /\[Function: broken\]/ },
  {
    name: "a class with toString",
    make: () => new URL("http://localhost/x"),
    shows: /^http:\/\/localhost\/x$/,
  },
  { name: "toString throws", make: () => ({ toString: throwing("toString"), code: 7 }), shows: /code: 7/ },
  {
    name: "toPrimitive throws",
    make: () => ({ [Symbol.toPrimitive]: throwing("it"), code: 7 }),
    shows: /code: 7/,
  },
  {
    name: "inspect throws",
    make: () => ({ [inspect.custom]: throwing("it"), code: 7 }),
    shows: /code: 7/,
  },
  { name: "an error", make: () => new TypeError("it broke"), shows: /^TypeError: it broke\n +at / },
  { name: "an error without a message", make: () => new RangeError(), shows: /^RangeError(: )?\n +at / },
  { name: "stack: 42", make: () => errorWith("stack", { value: 42 }), shows: /^Error: it broke$/ },
  {
    name: "stack: undefined",
    make: () => errorWith("stack", { value: undefined }),
    shows: /^Error: it broke$/,
  },
  {
    name: "stack throws",
    make: () => errorWith("stack", { get: throwing("stack") }),
    shows: /^Error: it broke$/,
  },
  { name: "message: 42", make: () => errorWith("message", { value: 42 }), shows: /^Error: 42\n/ },
  { name: "message throws", make: () => errorWith("message", { get: throwing("message") }), shows: /^Error/ },
  { name: "name throws", make: () => errorWith("name", { get: throwing("name") }), shows: /it broke/ },
  {
    name: "code throws",
    make: () => errorWith("code", { get: throwing("code") }),
    shows: /^Error: it broke/,
  },
  {
    name: "cause throws",
    make: () => errorWith("cause", { get: throwing("cause") }),
    shows: /^Error: it broke/,
  },
  { name: "frozen", make: () => Object.freeze(new Error("it broke")), shows: /^Error: it broke/ },
  {
    name: "with causes",
    make: () => new Error("it broke", { cause: new Error("the disk", { cause: { errno: -28 } }) }),
    shows: /^Error: it broke\n.*\ncaused by: Error: the disk\n.*\ncaused by: \{ errno: -28 \}$/s,
  },
  { name: "causes in a circle", make: cyclic, shows: /^Error: the first\n.*\ncaused by: Error: the second/s },
  {
    name: "several errors",
    make: () => new AggregateError([new Error("one"), "two"], "both"),
    shows: /^AggregateError: both\n.*\n1 of 2: Error: one\n.*\n2 of 2: two$/s,
  },
  {
    name: "several errors without a message",
    make: () => new AggregateError([new Error("one"), new Error("two")]),
    shows: /^AggregateError: one; two\n/,
  },
  {
    name: "a long message and a cause",
    make: () => new Error("x".repeat(100_000), { cause: new Error("the disk") }),
    shows: /^Error: xxx.*…\ncaused by: Error: the disk/s,
  },
  {
    name: "NUL and half a character",
    make: () => new Error("a\0b \ud83d c"),
    shows: /^Error: ab \ufffd c/,
  },
  {
    name: "of another realm",
    make: () => runInNewContext("new TypeError('elsewhere')"),
    shows: /^TypeError: elsewhere/,
  },
  { name: "a revoked proxy", make: () => revoked({}), shows: /Revoked Proxy|cannot be shown/ },
  {
    name: "a revoked proxy of a function",
    make: () => revoked(() => {}),
    shows: /Revoked Proxy|cannot be shown/,
  },
  {
    name: "a revoked proxy of an error",
    make: () => revoked(new Error("no")),
    shows: /Revoked Proxy|cannot be shown/,
  },
  {
    name: "a proxy that throws",
    make: () => new Proxy({}, Object.fromEntries(traps.map((trap) => [trap, throwing(trap)]))),
    shows: /./,
  },
  { name: "a promise", make: () => handled(Promise.reject(new Error("later"))), shows: /^Promise/ },
  // oxlint-disable-next-line unicorn/no-thenable -- that is what is odd about it.
  { name: "a thenable", make: () => ({ then: throwing("then") }), shows: /then/ },
];
