/** The command itself: its signals, its end, and how to end it. */
import { type ChildProcess, spawn } from "node:child_process";
import { constants } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { ProcessTree, markName } from "./tree.ts";

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
  readonly #mark: string;
  /** Whether it was told to end, or was killed. */
  #signalled = false;

  /** `mark`: tells its processes from all others. */
  constructor(command: string, args: readonly string[], env: NodeJS.ProcessEnv, mark: string) {
    this.#mark = mark;
    // One that is inside of another belongs to both.
    const marks = [env[markName], mark].filter((each) => each !== undefined).join(",");
    const marked = { ...env, [markName]: marks };
    this.#process = spawn(command, args, { stdio: "inherit", env: marked, detached: this.#group });
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
      this.#process.once("exit", (code, signal) => {
        this.#signalled ||= signal !== null;
        resolve({ code: code ?? codeOfSignal(signal as NodeJS.Signals) });
      });
    });
  }

  /** Whom to send a signal: its group, where it has one. Undefined: it could not be started. */
  get target(): number | undefined {
    const { pid } = this.#process;
    return pid !== undefined && this.#group ? -pid : pid;
  }

  /** From outside. On a terminal Ctrl-C reaches the command by itself. */
  forward(signal: NodeJS.Signals): void {
    this.#signalled = true;
    if (this.#group || signal !== "SIGINT") this.#signal(signal);
  }

  /**
   * Waits, after its end, for the processes of its group, if a signal ended it. A shell dies of SIGTERM at once, and the
   * program that it runs may need a while to stop. A command that ends by itself may leave processes behind on purpose.
   */
  async rest(onWait: () => void): Promise<void> {
    const { pid } = this.#process;
    if (pid === undefined || !this.#signalled || !this.#group) return;
    const tree = new ProcessTree(pid, this.#mark);
    const isThere = () => tree.look().some(({ group }) => group === pid);
    if (!isThere()) return;
    onWait();
    for (let pauseMs = 20; isThere(); pauseMs = Math.min(250, pauseMs * 1.2)) await sleep(pauseMs);
  }

  /** Ends it and whatever it has started, as far as that can be found. */
  async end(graceMs: number): Promise<void> {
    const { pid } = this.#process;
    if (pid === undefined) return;
    const tree = new ProcessTree(pid, this.#mark);
    this.#signal("SIGTERM", tree);
    if (await this.#gone(tree, graceMs)) return;
    this.#signal("SIGKILL", tree);
    // Nobody can refuse it, but it takes a moment, in which others may have been started.
    await this.#gone(tree, 1000, () => this.#signal("SIGKILL", tree));
  }

  async #gone(tree: ProcessTree, ms: number, again?: () => void): Promise<boolean> {
    const until = performance.now() + ms;
    while (tree.look().length > 0) {
      if (performance.now() >= until) return false;
      await sleep(100);
      again?.();
    }
    return true;
  }

  #signal(signal: NodeJS.Signals, tree?: ProcessTree): void {
    const { pid, exitCode, signalCode } = this.#process;
    if (pid === undefined) return;
    const others = tree?.look() ?? [];
    if (this.#group) send(-pid, signal);
    else if (exitCode === null && signalCode === null) send(pid, signal);
    // Each of them once: to be told a second time means to be quick to some.
    for (const other of others)
      if (other.pid !== pid && !(this.#group && other.group === pid)) send(other.pid, signal);
  }
}

/** It may have ended meanwhile. */
function send(pid: number, signal: NodeJS.Signals): void {
  try {
    process.kill(pid, signal);
  } catch {
    // Nobody is there to get it.
  }
}
