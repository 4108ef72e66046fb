/** A command under a lock. */
import { randomUUID } from "node:crypto";
import { FileBusyError } from "holdfast";
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import { parseKey, written } from "../keys/parse.ts";
import { shown } from "../text.ts";
import { type Server, connect } from "../server.ts";
import { note } from "../terminal.ts";
import { Child, codeOfSignal, forwarded } from "./child.ts";
import { type Grip, type Wish, isRefusal, take, takeAtLast, tryTake } from "./grip.ts";
import { type ExecRun, type OwnRun, beginRun, commandText, described, runsOf } from "./record.ts";
import { leave, soon } from "./soon.ts";
import { watchdog } from "./watchdog.ts";
import { holderOf, sessionOf } from "./who.ts";
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
    if (typeof grip === "number") return grip;
    say(`under ${names} (${way(wish, grip.fences)}): ${shown(command)}`);
    const written = await writeDown(server, wish, [command, ...args]);
    if (stop.signal.aborted) {
      await grip.release();
      throw stop.signal.reason;
    }
    const mark = randomUUID();
    using dog = options.keepGoing ? undefined : watchdog(mark, options.grace);
    child = new Child(command, args, environment(options.lock, grip), mark);
    if (child.target !== undefined) dog?.watch(child.target);
    return await watch(child, grip, written, shown(command), names, options, say);
  } catch (error) {
    if (error instanceof Stopped) return codeOfSignal(error.signal);
    throw error;
  } finally {
    if (server) await leave(server);
    for (const signal of forwarded) process.off(signal, onSignal);
  }
}

function warn(text: string): void {
  process.stderr.write(`holdfast: ${text}\n`);
}

/** So that those who follow know how it ended, and those who find the lock held know why. Undefined: it cannot be. */
async function writeDown(server: Server, wish: Wish, words: readonly string[]): Promise<OwnRun | undefined> {
  try {
    const session = await sessionOf(server, wish.keys);
    const alone = !(wish.lock ?? wish.lease).shared;
    return await soon(beginRun(server, wish.keys, { command: commandText(words), session, alone }));
  } catch (error) {
    warn(`that the command runs could not be written down: ${shown(describe(error))}`);
    return undefined;
  }
}

/** The exit code, if it is not to be run. */
async function gripOf(
  server: Server,
  wish: Wish,
  names: string,
  options: ExecOptions,
  signal: AbortSignal,
  say: (text: string) => void,
): Promise<Grip | number> {
  const { wait, skip, follow } = options;
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
  const before = follow ? await runsOf(server, wish.keys) : undefined;
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
    return 0;
  }
  say(`${names} is ${holder}: waiting${follow ? " until it has ended" : ""}.`);
  if (!follow) return takeAtLast(hf, wish, signal);
  const after = await followed(server, wish, before, signal);
  if (after === undefined || after.length === 0) {
    const why = after
      ? "whoever had it ran no command"
      : "how it went for whoever had it is not known, without the table of runs (holdfast migrate makes it)";
    say(`${names} is free: ${why}, so it is this one's turn.`);
    return gripOf(server, wish, names, options, signal, say);
  }
  const failed = after.find(({ code }) => code !== 0);
  if (!failed) {
    say(`${names} is free: whoever had it has ended well, and the command is not run here.`);
    return 0;
  }
  const { code } = failed;
  const how =
    code === undefined ? "was cut off: it lost the lock, or was killed" : `failed with exit code ${code}`;
  warn(
    `${names}: ${shown(described(failed))}, which this one followed, ${how}. The command is not run here.`,
  );
  return code ?? execCodes.lost;
}

/**
 * Waits until whoever has it has ended. Resolves to what ran meanwhile, as far as it had not ended before; undefined: that is not
 * known.
 */
async function followed(
  server: Server,
  wish: Wish,
  before: readonly ExecRun[] | undefined,
  signal: AbortSignal,
): Promise<readonly ExecRun[] | undefined> {
  const { hf } = server;
  const over = new Set(before?.filter(({ code }) => code !== undefined).map(({ id }) => id));
  const past = async (way: Wish) => {
    const free = await takeAtLast(hf, way, signal);
    try {
      return (await runsOf(server, wish.keys))?.filter(({ id }) => !over.has(id));
    } finally {
      await free.release();
    }
  };
  const runs = await past(await passing(hf, wish));
  // It may go on where it has shared the lock with whoever only passes. Nobody shares it with one who wants all of it.
  return runs?.some(({ code }) => code === undefined) ? past(wish) : runs;
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
  written: OwnRun | undefined,
  command: string,
  names: string,
  { keepGoing, grace }: ExecOptions,
  say: (text: string) => void,
): Promise<number> {
  let ending: Promise<void> | undefined;
  const onLost = (): void => {
    const why = shown(describe(grip.lost.reason));
    warn(`${why} ${keepGoing ? "The command goes on without it." : "Ending the command."}`);
    if (!keepGoing) ending = child.end(Math.min(grace, grip.graceMs(grip.lost.reason)));
  };
  if (grip.lost.aborted) onLost();
  else grip.lost.addEventListener("abort", onLost, { once: true });
  const { code, why } = await child.ended;
  if (why !== undefined) warn(`${command}: ${why}`);
  await child.rest(() => {
    if (!ending)
      say(`${command} was ended by a signal; ${names} is held until the processes it started have ended.`);
  });
  grip.lost.removeEventListener("abort", onLost);
  await ending;
  const result = ending ? execCodes.lost : code;
  // Before others have the lock.
  await (written && soon(written.ended(result)))?.catch((error: unknown) =>
    warn(
      `how the command ended could not be written down, so those who follow take it for cut off: ${shown(describe(error))}`,
    ),
  );
  if (ending) return result;
  try {
    if (!grip.lost.aborted) await grip.release();
  } catch (error) {
    warn(`${names} was lost before the command ended: ${shown(describe(error))}`);
    if (!keepGoing) return execCodes.lost;
  }
  return code;
}
