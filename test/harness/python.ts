/** Debian's Python, with a driver for PostgreSQL: for applications in another language. */
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { DebianPackage } from "./debian.ts";

const PYTHON = "/usr/bin/python3";

export const psycopgPackage: DebianPackage = {
  name: "python3-psycopg2",
  installed: () => existsSync("/usr/lib/python3/dist-packages/psycopg2"),
};

/** Why it is not here; undefined: it is. */
export function noPsycopg(): string | undefined {
  return psycopgPackage.installed() ? undefined : "there is no python3-psycopg2";
}

/** Runs `fixtures/upload_server.py` on this database. */
export async function startUploads(url: string): Promise<{ readonly port: number; stop(): void }> {
  const file = fileURLToPath(new URL("fixtures/upload_server.py", import.meta.url));
  const env = { ...process.env, DATABASE_URL: url };
  const server = spawn(PYTHON, [file], { env, stdio: ["ignore", "pipe", "inherit"] });
  const port = await new Promise<number>((resolve, reject) => {
    server.once("error", reject);
    server.once("exit", () => reject(new Error("the server has ended")));
    server.stdout.once("data", (said) => resolve(Number(said)));
  });
  return { port, stop: () => void server.kill("SIGKILL") };
}
