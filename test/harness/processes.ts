import { type ChildProcess, fork, spawn } from "node:child_process";
import { Socket } from "node:net";
import { fileURLToPath, pathToFileURL } from "node:url";
import { bundled } from "./bundled.ts";
import { Inbox } from "./inbox.ts";
import { reviveError, type FromWorker, type ToWorker } from "./worker-protocol.ts";

export interface Worker<T = unknown> {
  readonly pid: number;
  /** What the worker's function returned. Rejects with what it threw, or if the worker died before. */
  readonly result: Promise<T>;
  /** The next message of that name from the worker. Each message is handed out once. */
  message<P = unknown>(name: string): Promise<P>;
  send(name: string, payload?: unknown): void;
  sigkill(): void;
  sigstop(): void;
  sigcont(): void;
  readonly exited: Promise<{ code: number | null; signal: NodeJS.Signals | null }>;
}

const MAIN = fileURLToPath(new URL("./worker-main.ts", import.meta.url));
const DEADLINE = 60_000;

/** Runs the default export of a module in `count` processes at once, and returns what each returned. */
export async function runWorkers<T = unknown>(
  file: string | URL,
  count: number,
  arg?: unknown,
): Promise<T[]> {
  const workers = Array.from({ length: count }, () => startWorker<T>(file, arg));
  try {
    return await Promise.all(workers.map((worker) => worker.result));
  } finally {
    for (const worker of workers) worker.sigkill();
  }
}

/** Runs the default export of a module, `(arg, context: WorkerContext) => Promise<result>`, in a process. */
export function startWorker<T = unknown>(file: string | URL, arg?: unknown): Worker<T> {
  const href = file instanceof URL || file.startsWith("file:") ? String(file) : pathToFileURL(file).href;
  const child = fork(MAIN, {
    execArgv: [...bundled],
    serialization: "advanced",
    stdio: ["ignore", "inherit", "inherit", "ipc"],
  });
  const inbox = new Inbox();
  let resolve!: (value: any) => void;
  let reject!: (error: Error) => void;
  const result = new Promise<T>((...settle) => ([resolve, reject] = settle));
  // A test that kills its worker need not look at the result.
  result.catch(() => {});

  child.on("message", (message: any) => {
    const received: FromWorker = message;
    if (received.kind === "message") inbox.put(received.name, received.payload);
    else if (received.kind === "result") resolve(received.value);
    else {
      const error = reviveError(received.error);
      reject(error);
      inbox.close(error);
    }
  });
  const exited = new Promise<Awaited<Worker["exited"]>>((settle) => {
    child.once("error", (error) => {
      reject(error);
      inbox.close(error);
      settle({ code: null, signal: null });
    });
    child.once("exit", (code, signal) => settle({ code, signal }));
  });
  const afterwards = async (): Promise<void> => {
    const [{ code, signal }] = await Promise.all([exited, drained(child)]);
    const error = new Error(`The worker ended (${signal ?? `exit code ${code}`})`);
    reject(error);
    inbox.close(error);
  };
  void afterwards();

  const send = (message: ToWorker): void => {
    // It may be dead on purpose; who waits for an answer learns that.
    if (child.connected) child.send(message, () => {});
  };
  send({ kind: "start", file: href, arg });
  const guard = stoppedGuard(child);
  return {
    pid: child.pid ?? -1,
    result,
    exited,
    message: (name) => inbox.take(name, DEADLINE),
    send: (name, payload) => send({ kind: "message", name, payload }),
    sigkill() {
      child.kill("SIGKILL");
    },
    sigstop() {
      guard.arm();
      child.kill("SIGSTOP");
    },
    sigcont() {
      child.kill("SIGCONT");
      guard.disarm();
    },
  };
}

/** What the worker said before its end may come in after the news of that end. */
function drained(child: ChildProcess): Promise<void> {
  return new Promise((resolve) => {
    if (child.connected) child.once("disconnect", () => resolve());
    else resolve();
  });
}

/** A stopped worker can't notice that its parent died: a shell does that for it. */
function stoppedGuard(child: ChildProcess): { arm(): void; disarm(): void } {
  let shell: ReturnType<typeof spawnGuard> | undefined;
  const disarm = (): void => {
    shell?.stdin.end("disarmed\n");
    shell = undefined;
  };
  child.once("exit", disarm);
  return {
    arm() {
      if (child.exitCode === null && child.signalCode === null) shell ??= spawnGuard(child.pid ?? 0);
    },
    disarm,
  };
}

function spawnGuard(pid: number) {
  const shell = spawn("/bin/sh", ["-c", `read -r _ || kill -s KILL ${pid}`], {
    stdio: ["pipe", "ignore", "ignore"],
    detached: true,
  });
  shell.stdin.on("error", () => {});
  shell.unref();
  if (shell.stdin instanceof Socket) shell.stdin.unref();
  return shell;
}
