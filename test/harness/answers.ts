/** Many calls of the command in one process, each as if it had one of its own: starting Node takes longer than most verbs. */
import { fork } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { environment, root } from "./command.ts";

export interface Call {
  readonly args: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  /** Of a terminal; without it, there is none. */
  readonly columns?: number;
}

export interface Answer {
  /** Null: it did not end. */
  readonly code: number | null;
  readonly out: string;
  readonly err: string;
}

export interface Answers extends AsyncDisposable {
  ask(call: Call): Promise<Answer>;
}

const main = fileURLToPath(new URL("answers-main.ts", import.meta.url));
/** Generous: it is only for those that never end. */
const longestMs = 60_000;

/** With `unread`, stdout is a pipe whose reader has gone. */
export async function startAnswers({ unread = false } = {}): Promise<Answers> {
  const child = fork(main, {
    cwd: root,
    execArgv: ["--conditions=holdfast-source"],
    env: environment(),
    stdio: ["ignore", "pipe", "pipe", "ipc"],
  });
  if (unread) child.stdout?.destroy();
  else child.stdout?.resume();
  let said = "";
  child.stderr?.on("data", (chunk: Buffer) => (said += chunk.toString()));
  const ended = once(child, "exit");
  await Promise.race([once(child, "message"), ended]);
  return {
    async ask(call) {
      if (child.exitCode !== null) throw new Error(`The process of the command has ended:\n${said}`);
      const late = new AbortController();
      const answered = once(child, "message", { signal: late.signal }).then(([answer]) => answer as Answer);
      const gone = ended.then((): Answer => ({ code: child.exitCode ?? 1, out: "", err: said }));
      const timer = setTimeout(() => late.abort(), longestMs);
      child.send(call);
      return Promise.race([answered, gone])
        .catch((): Answer => ({ code: null, out: "", err: "It did not end." }))
        .finally(() => clearTimeout(timer));
    },
    async [Symbol.asyncDispose]() {
      child.kill("SIGKILL");
      await ended;
    },
  };
}
