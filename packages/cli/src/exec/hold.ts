/** A lock held by hand, for maintenance. */
import type { Key } from "holdfast";
import { describe } from "../describe.ts";
import { Failure, interruptible } from "../failure.ts";
import { parseKey, written } from "../keys/parse.ts";
import { look } from "../locks/look.ts";
import { shown } from "../text.ts";
import { type Server, connect } from "../server.ts";
import { age, note, print, printJson } from "../terminal.ts";
import { unless } from "../unless.ts";
import { type Grip, type Wish, isRefusal, take, takeAtLast, tryTake } from "./grip.ts";
import { execCodes } from "./run.ts";
import { leave } from "./soon.ts";
import { holderOf, isOf } from "./who.ts";
import { way, wishOf } from "./wish.ts";

export interface HoldOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly shared?: true;
  readonly wait?: number;
  readonly lease?: true;
  readonly ttl?: number;
  readonly json?: true;
}

const lookMs = 1000;

export async function holdKey(text: string, options: HoldOptions): Promise<void> {
  const key = parseKey(text);
  using interrupt = interruptible();
  const server = await connect({ url: options.url, schema: options.schema, application: "holdfast hold" });
  try {
    await holdOn(server, key, options, interrupt.signal);
  } finally {
    await leave(server);
  }
}

async function holdOn(server: Server, key: Key, options: HoldOptions, signal: AbortSignal): Promise<void> {
  const name = written(key);
  const wish = await wishOf(server, [key], options, (text) => note(`It is ${text}`));
  const grip = await gripOf(server, wish, name, options.wait, signal);
  const started = Date.now();
  const say = (line: string) => (options.json ? note(line) : print(line));
  say(`${name} is held (${way(wish, grip.fences)}${options.shared ? "; shared" : ""}). Ctrl-C releases it.`);
  const waited = new Set<string>();
  const watching = watch(server, key, signal, (session, line) => {
    waited.add(session);
    say(line);
  });
  const lost = new Promise<never>((_, reject) => {
    const onLost = () =>
      reject(
        new Failure(`${name} was lost: ${shown(describe(grip.lost.reason))}`, { exitCode: execCodes.lost }),
      );
    if (grip.lost.aborted) onLost();
    else grip.lost.addEventListener("abort", onLost, { once: true });
  });
  try {
    await unless(signal, Promise.race([lost, watching]));
  } catch (error) {
    if (error instanceof Failure) throw error;
    if (!signal.aborted) throw error;
  }
  try {
    await grip.release();
  } catch (error) {
    throw new Failure(`${name} was lost before it was released: ${shown(describe(error))}`, {
      exitCode: execCodes.lost,
      cause: error,
    });
  }
  const heldMs = Date.now() - started;
  if (options.json) printJson({ key: key.parts, heldMs, waited: [...waited] });
  else print(`${name} is released, after ${age(heldMs)}.`);
}

async function gripOf(
  server: Server,
  wish: Wish,
  name: string,
  wait: number | undefined,
  signal: AbortSignal,
): Promise<Grip> {
  const { hf } = server;
  const grip = await tryTake(hf, wish, signal);
  if (grip) return grip;
  note(`${name} is ${await holderOf(server, wish.keys)}: waiting.`);
  if (wait === undefined) return takeAtLast(hf, wish, signal);
  try {
    return await take(hf, wish, wait, signal);
  } catch (error) {
    if (!isRefusal(error)) throw error;
    throw new Failure(`${name} is ${await holderOf(server, wish.keys, error)}; waited ${wait} ms.`, {
      exitCode: execCodes.busy,
      cause: error,
    });
  }
}

/** Tells of each who comes to wait, and of each who has gone. Never ends. */
async function watch(
  server: Server,
  key: Key,
  signal: AbortSignal,
  say: (session: string, line: string) => void,
): Promise<never> {
  const waiting = new Map<string, string>();
  for (;;) {
    // A look that fails says nothing of the lock: that has a signal of its own.
    const seen = await look(server).catch(() => undefined);
    if (seen && !signal.aborted) {
      const now = seen.entries.filter((entry) => !entry.granted && isOf(entry, key));
      for (const { session } of now) {
        if (waiting.has(session.id)) continue;
        const who = `${shown(session.id)}${session.application ? ` (${shown(session.application)})` : ""}`;
        waiting.set(session.id, who);
        say(session.id, `${who} waits for it.`);
      }
      for (const [id, who] of waiting)
        if (!now.some(({ session }) => session.id === id)) {
          waiting.delete(id);
          say(id, `${who} waits no longer.`);
        }
    }
    await new Promise((resolve) => setTimeout(resolve, lookMs));
  }
}
