/** The command itself: its signals, its end, and how to end it. */
import { type ChildProcess, spawn, spawnSync } from "node:child_process";
import { constants } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

/** As shells have it. */
const notExecutable = 126;
const notFound = 127;

export const forwarded = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"] as const;

export function codeOfSignal(signal: NodeJS.Signals): number {
  return 128 + constants.signals[signal];
}

export class Child {
  /** Its exit code, 128 + n after a signal; or why it could not be started. */
  readonly ended: Promise<{ readonly code: number; readonly why?: string }>;
  readonly #process: ChildProcess;
  /** A group of its own can be signalled as a whole; but it could not read from the terminal's keyboard. */
  readonly #group: boolean = !process.stdin.isTTY;

  constructor(command: string, args: readonly string[], env: NodeJS.ProcessEnv) {
    this.#process = spawn(command, args, { stdio: "inherit", env, detached: this.#group });
    this.ended = new Promise((resolve) => {
      this.#process.once("error", (error: NodeJS.ErrnoException) => {
        // Also told of signals that could not be sent.
        if (this.#process.pid !== undefined) return;
        const missing = error.code === "ENOENT";
        resolve({
          code: missing ? notFound : notExecutable,
          why: missing ? "command not found" : error.code === "EACCES" ? "permission denied" : error.message,
        });
      });
      this.#process.once("exit", (code, signal) =>
        resolve({ code: code ?? codeOfSignal(signal as NodeJS.Signals) }),
      );
    });
  }

  /** From outside. On a terminal Ctrl-C reaches the command by itself. */
  forward(signal: NodeJS.Signals): void {
    if (this.#group || signal !== "SIGINT") this.#signal(signal, false);
  }

  /** Ends it and whatever it has started. */
  async end(graceMs: number): Promise<void> {
    const { pid } = this.#process;
    if (pid === undefined) return;
    // Found before: children of one that has ended are not its children any more.
    const others = this.#group ? [] : descendants(pid);
    this.#signal("SIGTERM", true, others);
    if (await this.#gone(others, graceMs)) return;
    this.#signal("SIGKILL", true, others);
    // Nobody can refuse it, but it takes a moment.
    await this.#gone(others, 1000);
  }

  async #gone(others: readonly number[], ms: number): Promise<boolean> {
    const until = performance.now() + ms;
    while (this.#isThere(others)) {
      if (performance.now() >= until) return false;
      await sleep(20);
    }
    return true;
  }

  #signal(signal: NodeJS.Signals, all: boolean, others: readonly number[] = []): void {
    const { pid } = this.#process;
    if (pid === undefined) return;
    if (this.#group) send(-pid, signal);
    else {
      if (this.#process.exitCode === null && this.#process.signalCode === null) send(pid, signal);
      if (all) for (const other of others) send(other, signal);
    }
  }

  #isThere(others: readonly number[]): boolean {
    const { pid, exitCode, signalCode } = this.#process;
    const running = exitCode === null && signalCode === null;
    if (this.#group) return running || send(-(pid as number), 0);
    return running || others.some((other) => send(other, 0));
  }
}

/** Whether there was somebody to get it. */
function send(pid: number, signal: NodeJS.Signals | 0): boolean {
  try {
    process.kill(pid, signal);
    return true;
  } catch {
    return false;
  }
}

function descendants(root: number): number[] {
  const { stdout } = spawnSync("ps", ["-A", "-o", "pid=,ppid="], { encoding: "utf8" });
  const pairs = (stdout ?? "").split("\n").map((line) => line.trim().split(/\s+/).map(Number));
  const found = [root];
  for (let i = 0; i < found.length; i++)
    for (const [pid, parent] of pairs) if (parent === found[i] && pid !== undefined) found.push(pid);
  return found.slice(1);
}
