import { type ChildProcess, spawn } from "node:child_process";
import { randomInt } from "node:crypto";
import { closeSync, openSync, readFileSync, rmSync, statSync } from "node:fs";
import { chmod, chown, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createServer, Socket } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

/** The user a server runs under; undefined is the user of this process. */
export type Identity = { uid: number; gid: number } | undefined;

export interface Command {
  file: string;
  args: string[];
}

/** What a server may use while it is being set up. */
export interface ServerPlace {
  /** Owned by the server's user, removed when the server stops. */
  dir: string;
  identity: Identity;
  /** Runs a command as the server's user, and throws with the end of its output if it fails. */
  run(command: Command): Promise<void>;
  /** Writes a file into the directory that only the server's user can read, and returns its path. */
  write(name: string, text: string): Promise<string>;
}

export interface ServerOptions {
  /** For messages and the name of the temporary directory. */
  name: string;
  /** Without it a free port is picked. */
  port?: number;
  /** Asks the server for an orderly end that does not wait for its clients. */
  stopSignal: "INT" | "TERM";
  prepare?(place: ServerPlace): Promise<void>;
  command(place: ServerPlace, port: number): Command | Promise<Command>;
  /** Called until it stops throwing. */
  ready(port: number): Promise<void>;
  /** How long the server may take to get ready, in milliseconds. */
  timeout?: number;
}

export interface ServerProcess {
  readonly port: number;
  readonly pid: number;
  readonly dir: string;
  /** Ends the server and starts it again on the same port; resolves when it is ready. */
  restart(signal: NodeJS.Signals): Promise<void>;
  readonly stop: () => Promise<void>;
}

/** Postgres and PgBouncer refuse to run as root, so root lends them the rights of nobody. */
export function serverIdentity(): Identity {
  if (process.getuid?.() !== 0) return undefined;
  const line = readFileSync("/etc/passwd", "utf8")
    .split("\n")
    .find((entry) => entry.startsWith("nobody:"));
  const [, , uid, gid] = line?.split(":") ?? [];
  if (uid === undefined || gid === undefined) {
    throw new Error("Running as root needs a user `nobody` in /etc/passwd, for the servers to run under.");
  }
  // macOS writes the ids of nobody as -2; the kernel knows them as unsigned.
  return { uid: Number(uid) >>> 0, gid: Number(gid) >>> 0 };
}

/** The temporary directory, as long as the servers' user can get into it. */
export function serverTempDir(): string {
  const temp = tmpdir();
  if (process.getuid?.() !== 0) return temp;
  for (let at = temp; ; at = dirname(at)) {
    if ((statSync(at).mode & 0o001) === 0) return "/tmp";
    if (at === dirname(at)) return temp;
  }
}

/**
 * A port nobody listens on. It comes from below the range that systems hand to outgoing connections: a
 * server that restarts on its port would else, at times, find a client's socket there.
 */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = randomInt(10_240, 32_768);
    const free = await new Promise<boolean>((resolve) => {
      const probe = createServer();
      probe.once("error", () => resolve(false));
      probe.listen({ port, host: "127.0.0.1", exclusive: true }, () => probe.close(() => resolve(true)));
    });
    if (free) return port;
  }
}

// Lives until its stdin ends, which also happens when the owner is killed; then ends the server and removes
// its directory. It runs as the server's user, so that a stale pid can't make root kill a stranger.
const WATCHDOG = `
trap '' INT TERM HUP QUIT
while read -r _; do :; done
dir=$1 signal=$2
# An orphan stays a zombie for as long as init likes.
zombie() { read -r stat < "/proc/$pid/stat" && case "\${stat##*) }" in Z*) true ;; *) false ;; esac; }
alive() { [ -n "$pid" ] && kill -s 0 -- "-$pid" && ! zombie; }
pid=$(cat "$dir/server.pid")
if alive; then
  kill -s "$signal" -- "-$pid"
  n=0
  while alive && [ $n -lt 200 ]; do sleep 0.05; n=$((n + 1)); done
  if alive; then
    kill -s CONT -- "-$pid"
    kill -s QUIT -- "-$pid"
    n=0
    while alive && [ $n -lt 40 ]; do sleep 0.05; n=$((n + 1)); done
  fi
  kill -s KILL -- "-$pid"
fi
n=0
while [ -e "$dir" ] && [ $n -lt 40 ]; do rm -rf "$dir" && break; sleep 0.05; n=$((n + 1)); done
`;

// The pid is on disk before the server exists, hence there is no moment at which the watchdog would miss it.
const LAUNCHER = `echo "$$" > "$0" && exec "$@"`;

/**
 * Starts a server as a child process under a user it accepts, in a directory of its own, and waits until it
 * is ready. The server and the directory go when `stop` is called or when this process ends, however it
 * ends. They don't keep this process alive.
 */
export async function startServer(options: ServerOptions): Promise<ServerProcess> {
  const identity = serverIdentity();
  const dir = await mkdtemp(join(serverTempDir(), `holdfast-${options.name}-`));
  await chmod(dir, 0o700);
  if (identity) await chown(dir, identity.uid, identity.gid);
  const watchdog = startWatchdog(dir, options.stopSignal, identity);
  const place: ServerPlace = {
    dir,
    identity,
    async run(command) {
      const child = launch(dir, identity, command, "setup.log");
      const { code } = await child.wait();
      if (code !== 0) {
        throw new Error(`${command.file} failed:\n${await lastLines(join(dir, "setup.log"))}`);
      }
    },
    async write(name, text) {
      const path = join(dir, name);
      await writeFile(path, text, { mode: 0o600 });
      if (identity) await chown(path, identity.uid, identity.gid);
      return path;
    },
  };
  const stop = async (): Promise<void> => {
    watchdog.process.ref();
    watchdog.process.stdin?.end();
    await watchdog.exited;
    // The watchdog empties the directory, but can't remove it from a parent only root may write to.
    await rm(dir, { recursive: true, force: true });
  };

  let port = options.port ?? (await freePort());
  let server: Launched;
  try {
    await options.prepare?.(place);
    for (let attempt = 1; ; attempt++) {
      try {
        server = await launchReady(options, place, port);
        break;
      } catch (error) {
        if (!(error instanceof PortTaken) || options.port !== undefined || attempt === 5) throw error;
        port = await freePort();
      }
    }
  } catch (error) {
    await stop();
    throw error;
  }

  return {
    port,
    dir,
    get pid() {
      return server.pid;
    },
    stop,
    async restart(signal) {
      server.process.kill(signal);
      await server.wait();
      for (let attempt = 1; ; attempt++) {
        try {
          server = await launchReady(options, place, port);
          return;
        } catch (error) {
          if (!(error instanceof PortTaken) || attempt === 20) throw error;
          await sleep(250);
        }
      }
    },
  };
}

class PortTaken extends Error {}

async function launchReady(options: ServerOptions, place: ServerPlace, port: number): Promise<Launched> {
  const log = join(place.dir, "server.log");
  const server = launch(place.dir, place.identity, await options.command(place, port), "server.log");
  const deadline = performance.now() + (options.timeout ?? 60_000);
  let refusal: unknown;
  while (server.end() === undefined && performance.now() < deadline) {
    try {
      await options.ready(port);
      // Somebody else's server may have answered, while ours gave up on the port.
      if (server.end() === undefined) return server;
    } catch (error) {
      refusal = error;
    }
    await sleep(20);
  }
  const lines = await lastLines(log);
  const end = server.end();
  if (end === undefined) {
    server.process.kill("SIGKILL");
    await server.wait();
    throw new Error(`${options.name} did not get ready on port ${port}: ${lines}`, { cause: refusal });
  }
  const message = `${options.name} ended while starting on port ${port} (${describeExit(end)}):\n${lines}`;
  throw /address already in use|could not bind/i.test(lines) ? new PortTaken(message) : new Error(message);
}

interface Exit {
  code: number | null;
  signal: NodeJS.Signals | null;
}

interface Launched {
  process: ChildProcess;
  pid: number;
  /** Undefined while it runs. */
  end(): Exit | undefined;
  /** Resolves when it has ended, and keeps this process alive meanwhile. */
  wait(): Promise<Exit>;
}

function launch(dir: string, identity: Identity, command: Command, logName: string): Launched {
  const pidFile = join(dir, "server.pid");
  const log = openSync(join(dir, logName), "w");
  let child: ChildProcess;
  try {
    child = spawn("/bin/sh", ["-c", LAUNCHER, pidFile, command.file, ...command.args], {
      ...identity,
      cwd: dir,
      // Ours may hold PG* settings or a locale the server does not know.
      env: { PATH: process.env["PATH"] ?? "/usr/bin:/bin", HOME: dir, LC_ALL: "C", TZ: "UTC" },
      stdio: ["ignore", log, log],
      // Ctrl-C is for this process to handle, not for the server.
      detached: true,
    });
  } finally {
    closeSync(log);
  }
  let end: Exit | undefined;
  const exited = exitOf(child).then((exit) => {
    rmSync(pidFile, { force: true });
    end = exit;
    return exit;
  });
  child.unref();
  return {
    process: child,
    pid: child.pid ?? -1,
    end: () => end,
    wait: () => {
      if (end === undefined) child.ref();
      return exited;
    },
  };
}

function startWatchdog(dir: string, signal: string, identity: Identity) {
  const child = spawn("/bin/sh", ["-c", WATCHDOG, "holdfast-watchdog", dir, signal], {
    ...identity,
    cwd: "/",
    env: { PATH: process.env["PATH"] ?? "/usr/bin:/bin" },
    stdio: ["pipe", "ignore", "ignore"],
    detached: true,
  });
  const exited = exitOf(child);
  child.stdin.on("error", () => {});
  child.unref();
  if (child.stdin instanceof Socket) child.stdin.unref();
  return { process: child, exited };
}

function exitOf(child: ChildProcess): Promise<Exit> {
  return new Promise((resolve) => {
    child.once("error", () => resolve({ code: -1, signal: null }));
    child.once("exit", (code, signal) => resolve({ code, signal }));
  });
}

function describeExit({ code, signal }: Exit): string {
  return signal ? `signal ${signal}` : `exit code ${code}`;
}

async function lastLines(file: string): Promise<string> {
  const text = await readFile(file, "utf8").catch(() => "");
  return text.trimEnd().split("\n").slice(-20).join("\n") || "(no output)";
}
