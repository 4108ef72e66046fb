/** The command, as people and scripts start it. */
import { type ChildProcessByStdio, spawn } from "node:child_process";
import type { Readable, Writable } from "node:stream";
import { fileURLToPath } from "node:url";
import { bundled } from "./bundled.ts";

export const root = fileURLToPath(new URL("../../", import.meta.url));

export interface Outcome {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly out: string;
  readonly err: string;
}

export interface CommandOptions {
  readonly env?: NodeJS.ProcessEnv;
  readonly cwd?: string;
  readonly input?: string;
}

const main = `${root}packages/cli/src/bin.ts`;
/** Arguments of Node for the command in this checkout. */
export const bin = [...bundled, main] as const;
/** Threads of the explorer need the library's own files. */
const binOfRaces = ["--conditions=holdfast-source", main] as const;

/** Without the variables that would name a database, or change what is printed. */
export function environment(more: NodeJS.ProcessEnv = {}): NodeJS.ProcessEnv {
  const {
    HOLDFAST_URL: _,
    DATABASE_URL: __,
    HOLDFAST_SCHEMA: ___,
    DEBUG: ____,
    FORCE_COLOR: _____,
    ...rest
  } = process.env;
  return { ...rest, NO_COLOR: "1", ...more };
}

/** Under way. */
export interface Running {
  readonly child: ChildProcessByStdio<Writable, Readable, Readable>;
  /** All of it so far. */
  readonly out: () => string;
  readonly err: () => string;
  readonly done: Promise<Outcome>;
}

export function start(args: readonly string[], { env, cwd = root, input }: CommandOptions = {}): Running {
  const child = spawn(process.execPath, [...(args[0] === "race" ? binOfRaces : bin), ...args], {
    cwd,
    env: environment(env),
    stdio: ["pipe", "pipe", "pipe"],
  });
  child.stdin.on("error", () => {});
  child.stdin.end(input ?? "");
  let [out, err] = ["", ""];
  child.stdout.on("data", (chunk: Buffer) => (out += chunk.toString()));
  child.stderr.on("data", (chunk: Buffer) => (err += chunk.toString()));
  const done = new Promise<Outcome>((resolve) =>
    child.once("close", (code, signal) => resolve({ code, signal, out, err })),
  );
  return { child, out: () => out, err: () => err, done };
}

export function command(args: readonly string[], options?: CommandOptions): Promise<Outcome> {
  return start(args, options).done;
}
