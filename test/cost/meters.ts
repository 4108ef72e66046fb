/**
 * Counts what a call costs besides time. Import this before the library and the clients: they must find the
 * AbortController, the clock, the host name and the process id that it puts in place.
 */
import { createHook } from "node:async_hooks";
import { syncBuiltinESMExports } from "node:module";
import { Socket } from "node:net";
import os from "node:os";
import type { CountName, Counts } from "./cost.ts";
import { type Dialogue, type WireProtocol, dialogueOf } from "./wire.ts";

const zero = (): Counts => ({
  roundTrips: 0,
  messages: 0,
  statements: 0,
  bytesSent: 0,
  bytesReceived: 0,
  promises: 0,
  timers: 0,
  abortControllers: 0,
});

let counts = zero();
let counting = false;
/** Grows with everything that is sent or received, counted or not. */
let activity = 0;

function count(name: CountName, n = 1): void {
  activity++;
  if (counting) counts[name] += n;
}

// Leases and workers write them into the database: the same bytes on every machine.
os.hostname = () => "cost.example";
syncBuiltinESMExports();
Object.defineProperty(process, "pid", { value: 12_345 });

const { any, timeout } = AbortSignal;
globalThis.AbortController = class extends AbortController {
  constructor() {
    super();
    count("abortControllers");
  }
};
AbortSignal.any = (signals) => {
  count("abortControllers");
  return any.call(AbortSignal, signals);
};
AbortSignal.timeout = (ms) => {
  count("abortControllers");
  return timeout.call(AbortSignal, ms);
};

// Node reports an await as a promise too, since it makes one.
const hook = createHook({
  init(_id, type) {
    if (!counting) return;
    if (type === "PROMISE") counts.promises++;
    else if (type === "Timeout") counts.timers++;
  },
});

/**
 * The library decides some things by the time that has passed: to let other code run, or to tell workers of a job. So
 * before each call this much has passed, and during the call the clock stands still.
 */
const passedMs = 600;
const realNow = performance.now.bind(performance);
let aheadMs = 0;
let stoppedAt: number | undefined;
performance.now = () => stoppedAt ?? realNow() + aheadMs;

export function passTime(): void {
  aheadMs += passedMs;
}

const dialogues = new Map<Socket, Dialogue>();

function dialogueOn(socket: Socket, protocol: WireProtocol): Dialogue {
  let dialogue = dialogues.get(socket);
  if (!dialogue) {
    dialogues.set(socket, (dialogue = dialogueOf(protocol, count)));
    socket.once("close", () => dialogues.delete(socket));
  }
  return dialogue;
}

/** Reads what all sockets send and receive from now on. */
export function readSockets(protocol: WireProtocol): void {
  const own: ReadonlySet<unknown> = new Set([process.stdout, process.stderr]);
  const { write, push } = Socket.prototype;
  Socket.prototype.write = function (this: Socket, chunk: Uint8Array | string, ...rest: never[]) {
    if (!own.has(this)) dialogueOn(this, protocol).sent(Buffer.from(chunk as Uint8Array));
    return write.call(this, chunk, ...rest);
  };
  Socket.prototype.push = function (this: Socket, chunk: Buffer | null, ...rest: never[]) {
    if (chunk) dialogueOn(this, protocol).received(chunk);
    return push.call(this, chunk, ...rest);
  };
}

/** Counts calls of a client that has no sockets. A method in `run` runs a statement, one in `prepare` does not. */
export function readMethods(prototype: object, methods: { run?: string[]; prepare?: string[] }): void {
  const { run = [], prepare = [] } = methods;
  const all = prototype as Record<string, (this: unknown, ...args: unknown[]) => unknown>;
  for (const name of [...run, ...prepare]) {
    const original = all[name];
    if (!original) throw new Error(`The client has no method ${name}`);
    all[name] = function (...args) {
      count("messages");
      if (run.includes(name)) count("statements");
      return original.apply(this, args);
    };
  }
}

/** So many looks, one after the other, without a byte sent or received. */
const quietLooks = 5;
/** Between two looks at a call that goes on after its result. */
const patientMs = 5;

/** Calls back once every request has its answer and nothing follows. It makes no promises, since they are counted. */
function whenQuiet(done: () => void, goesOn: boolean): void {
  let seen = activity;
  let quiet = 0;
  const look = (): void => {
    const waits = [...dialogues.values()].some(({ isWaiting }) => isWaiting);
    quiet = waits || activity !== seen ? 0 : quiet + 1;
    seen = activity;
    if (quiet === quietLooks) done();
    else if (goesOn) uncounted(() => setTimeout(look, patientMs));
    else setImmediate(look);
  };
  look();
}

function uncounted(work: () => void): void {
  const before = counting;
  counting = false;
  work();
  counting = before;
}

/** Resolves once nothing is under way any more. */
export function quiet(): Promise<void> {
  return new Promise((resolve) => whenQuiet(resolve, true));
}

/** From now on Node makes promises more slowly, and of other sizes: measure bytes before. */
export function watchPromises(): void {
  hook.enable();
}

/** What one call costs, including what it leaves for later. `goesOn`: that is more than a few turns of the event loop. */
export function countsOf(call: () => PromiseLike<unknown>, goesOn: boolean): Promise<Counts> {
  return new Promise((resolve, reject) => {
    passTime();
    stoppedAt = performance.now();
    counts = zero();
    counting = true;
    const stop = (): void => {
      counting = false;
      stoppedAt = undefined;
    };
    const ended = (): void => {
      stop();
      resolve(counts);
    };
    const failed = (error: unknown): void => {
      stop();
      reject(error);
    };
    const result = call();
    // The promise of `then` is ours.
    uncounted(() => void result.then(() => whenQuiet(ended, goesOn), failed));
  });
}
