/** Runs the command again and again in this process: what it says, and its exit code, as a process of its own would have it. */
import { AsyncLocalStorage } from "node:async_hooks";
import { run } from "../../packages/cli/src/program.ts";
import type { Answer, Call } from "./answers.ts";

class Exit extends Error {}

/** A call that is under way, until it ends the process. */
interface Running {
  out: string;
  err: string;
  over: boolean;
  end(code: number): void;
}

/** A timer of an earlier call may want to end the process, too late. */
const calls = new AsyncLocalStorage<Running>();
let now: Running | undefined;

const leave = process.exit.bind(process);
process.on("disconnect", () => leave());
process.exit = (code?: number | string | null) => {
  calls.getStore()?.end(Number(code ?? process.exitCode ?? 0));
  throw new Exit();
};

function crashed(error: unknown): void {
  if (error instanceof Exit || !now) return;
  now.err += `${error instanceof Error ? error.stack : String(error)}\n`;
  now.end(1);
}
process.on("uncaughtException", crashed);

// What is printed is also written where it belongs, which may be a pipe that nobody reads.
for (const [stream, name] of [
  [process.stdout, "out"],
  [process.stderr, "err"],
] as const) {
  const write = stream.write.bind(stream) as (...given: unknown[]) => boolean;
  stream.write = (...given: unknown[]) => {
    if (now && !now.over) now[name] += String(given[0]);
    return write(...given);
  };
}

async function answer({ args, env, columns }: Call): Promise<Answer> {
  const { promise, resolve } = Promise.withResolvers<number>();
  const running: Running = {
    out: "",
    err: "",
    over: false,
    end(code) {
      running.over = true;
      resolve(code);
    },
  };
  now = running;
  process.argv = [process.execPath, "holdfast", ...args];
  process.exitCode = undefined;
  Object.assign(process.env, env);
  Object.assign(process.stdout, { isTTY: columns !== undefined, columns });
  // It goes on until Ctrl-C.
  const hold = setInterval(() => {
    if (args[0] !== "hold" || !running.out.includes("Ctrl-C releases it.")) return;
    clearInterval(hold);
    process.emit("SIGINT");
  }, 20);
  const done = calls.run(running, run).then(() => running.end(Number(process.exitCode ?? 0)), crashed);
  const code = await promise;
  clearInterval(hold);
  // A command that has ended the process does nothing more; one that has not is waited for.
  await Promise.race([done, new Promise((soon) => setTimeout(soon, 1000))]);
  await new Promise((soon) => setImmediate(soon));
  now = undefined;
  // Of a verb that has ended the process without taking them back.
  for (const signal of ["SIGINT", "SIGTERM"]) process.removeAllListeners(signal);
  for (const name of Object.keys(env)) delete process.env[name];
  process.exitCode = undefined;
  return { code, out: running.out, err: running.err };
}

process.on("message", (call: Call) => void answer(call).then((said) => process.send?.(said)));
process.send?.("ready");
