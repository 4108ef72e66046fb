/** A command under a lock. */
import { FileBusyError } from "holdfast";
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import { parseKey, written } from "../keys/parse.ts";
import { shown } from "../text.ts";
import { type Server, connect } from "../server.ts";
import { note } from "../terminal.ts";
import { Child, codeOfSignal, forwarded } from "./child.ts";
import { type Grip, type Wish, isRefusal, take, takeAtLast, tryTake } from "./grip.ts";
import { leave } from "./soon.ts";
import { holderOf } from "./who.ts";
import { passing, way, wishOf } from "./wish.ts";

export interface ExecOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly lock: readonly string[];
  readonly wait?: number;
  readonly skip?: true;
  readonly follow?: true;
  readonly lease?: true;
  readonly ttl?: number;
  readonly shared?: true;
  readonly keepGoing?: true;
  readonly grace: number;
  readonly quiet?: true;
}

/** As in sysexits.h: try again later; and what should not happen. */
export const execCodes = { busy: 75, lost: 70 } as const;

class Stopped extends Error {
  readonly signal: NodeJS.Signals;
  constructor(signal: NodeJS.Signals) {
    super(signal);
    this.signal = signal;
  }
}

/** The exit code. */
export async function execute(
  [command = "", ...args]: readonly string[],
  options: ExecOptions,
): Promise<number> {
  const keys = options.lock.map(parseKey);
  const names = keys.map(written).join(", ");
  const say = (text: string): void => {
    if (!options.quiet) note(`holdfast: ${text}`);
  };
  const stop = new AbortController();
  let child: Child | undefined;
  const onSignal = (signal: NodeJS.Signals): void => {
    if (child) child.forward(signal);
    else stop.abort(new Stopped(signal));
  };
  for (const signal of forwarded) process.on(signal, onSignal);
  let server: Server | undefined;
  try {
    server = await connect({ url: options.url, schema: options.schema, application: "holdfast exec" });
    const wish = await wishOf(server, keys, options, say);
    const grip = await gripOf(server, wish, names, options, stop.signal, say);
    if (!grip) return 0;
    say(`under ${names} (${way(wish, grip.fences)}): ${shown(command)}`);
    if (stop.signal.aborted) {
      await grip.release();
      throw stop.signal.reason;
    }
    child = new Child(command, args, environment(options.lock, grip));
    return await watch(child, grip, shown(command), names, options);
  } catch (error) {
    if (error instanceof Stopped) return codeOfSignal(error.signal);
    throw error;
  } finally {
    if (server) await leave(server);
    for (const signal of forwarded) process.off(signal, onSignal);
  }
}

/** Undefined: it is not to be run. */
async function gripOf(
  server: Server,
  wish: Wish,
  names: string,
  { wait, skip, follow }: ExecOptions,
  signal: AbortSignal,
  say: (text: string) => void,
): Promise<Grip | undefined> {
  const { hf } = server;
  if (wait !== undefined) {
    try {
      return await take(hf, wish, wait, signal);
    } catch (error) {
      if (!isRefusal(error)) throw error;
      throw new Failure(
        `${names} is ${await holderOf(server, wish.keys, error)}; waited ${wait} ms, and did not run the command.`,
        { exitCode: execCodes.busy, cause: error },
      );
    }
  }
  const grip = await tryTake(hf, wish, signal, skip).catch(async (error: unknown) => {
    if (!(error instanceof FileBusyError)) throw error;
    throw new Failure(`${names} is ${await holderOf(server, wish.keys, error)}.`, {
      exitCode: execCodes.busy,
      cause: error,
    });
  });
  if (grip) return grip;
  const holder = await holderOf(server, wish.keys);
  if (skip) {
    say(`${names} is ${holder}: skipped.`);
    return undefined;
  }
  say(`${names} is ${holder}: waiting${follow ? " until it has ended" : ""}.`);
  if (!follow) return takeAtLast(hf, wish, signal);
  const free = await takeAtLast(hf, await passing(hf, wish), signal);
  await free.release();
  say(`${names} is free: whoever had it has ended, and the command is not run here.`);
  return undefined;
}

function environment(locks: readonly string[], { fences }: Grip): NodeJS.ProcessEnv {
  return {
    ...process.env,
    HOLDFAST_LOCK: locks.join(","),
    ...(fences.length > 0 && { HOLDFAST_FENCE: fences.join(",") }),
  };
}

async function watch(
  child: Child,
  grip: Grip,
  command: string,
  names: string,
  { keepGoing, grace }: ExecOptions,
): Promise<number> {
  let ending: Promise<void> | undefined;
  const warn = (text: string): void => void process.stderr.write(`holdfast: ${text}\n`);
  const onLost = (): void => {
    const why = shown(describe(grip.lost.reason));
    warn(`${why} ${keepGoing ? "The command goes on without it." : "Ending the command."}`);
    if (!keepGoing) ending = child.end(grace);
  };
  if (grip.lost.aborted) onLost();
  else grip.lost.addEventListener("abort", onLost, { once: true });
  const { code, why } = await child.ended;
  grip.lost.removeEventListener("abort", onLost);
  if (why !== undefined) warn(`${command}: ${why}`);
  await ending;
  if (ending) return execCodes.lost;
  try {
    if (!grip.lost.aborted) await grip.release();
  } catch (error) {
    warn(`${names} was lost before the command ended: ${shown(describe(error))}`);
    if (!keepGoing) return execCodes.lost;
  }
  return code;
}
