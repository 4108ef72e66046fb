/** The clients that are measured, each in a process of its own. */
import { fork } from "node:child_process";
import { once } from "node:events";
import { text } from "node:stream/consumers";
import { fileURLToPath } from "node:url";
import { backendNamed } from "../backends.ts";
import type { Cost, Measured } from "./cost.ts";

/** By their names in `test/backends.ts`. */
export const clients = [
  "pg",
  "postgres.js",
  "mysql2 on MySQL",
  "mysql2 on MariaDB",
  "better-sqlite3",
  "node:sqlite",
] as const;

export const serverOf = (client: string) => backendNamed(client).server;

const file = fileURLToPath(new URL("process.ts", import.meta.url));

const execArgv = [
  "--conditions=holdfast-source",
  "--expose-gc",
  // Megabytes: room for all that is allocated while bytes are measured, so that nothing is collected then.
  "--min-semi-space-size=64",
  "--max-semi-space-size=64",
  // Optimizing compilers leave out some allocations, and not the same ones each time.
  "--no-opt",
  "--no-maglev",
];

/** Takes 3 to 6 s of processor time. The database must be empty, and is left full. */
export async function measure(client: string, url: string): Promise<Measured> {
  // Hazards are watched as in production, and the order of locks is not written down.
  const { HOLDFAST_ORDER: _, ...env } = process.env;
  const child = fork(file, [client, url], {
    execArgv,
    env: { ...env, NODE_ENV: "production" },
    stdio: ["ignore", "ignore", "pipe", "ipc"],
  });
  try {
    let measured: [string, Cost][] | undefined;
    child.on("message", (message) => (measured = message as [string, Cost][]));
    const [said, [code, signal]] = await Promise.all([
      child.stderr ? text(child.stderr) : "",
      once(child, "close"),
    ]);
    if (!measured) throw new Error(`The process that measures ${client} ended (${signal ?? code}):\n${said}`);
    return new Map(measured);
  } finally {
    child.kill();
  }
}
