import { type ChildProcess, fork } from "node:child_process";
import { extname } from "node:path";
import { fileURLToPath } from "node:url";
import type { Contestant, FromWorker, Setting, Tally, ToWorker } from "./protocol.ts";

// Beside this file in the sources and in what is built from them.
const workerFile = fileURLToPath(new URL(`./worker${extname(import.meta.url)}`, import.meta.url));

export interface CrewResult {
  readonly tally: Tally;
  readonly latenciesMs: readonly number[];
  readonly seconds: number;
}

type Answer<Kind> = FromWorker & { kind: Kind };

function isOf<Kind extends FromWorker["kind"]>(message: FromWorker, kind: Kind): message is Answer<Kind> {
  return message.kind === kind;
}

/** Processes that call at once, each with connections of its own, as the replicas of a service have. */
export class Crew {
  readonly #workers: readonly ChildProcess[];
  readonly #signal: AbortSignal;

  constructor(size: number, signal: AbortSignal) {
    this.#signal = signal;
    this.#workers = Array.from({ length: size }, () =>
      fork(workerFile, { stdio: ["ignore", "inherit", "inherit", "ipc"] }),
    );
  }

  async setUp(setting: Setting): Promise<void> {
    await Promise.all(
      this.#workers.map((worker) => this.#order(worker, { kind: "set-up", setting }, "ready")),
    );
  }

  async run(
    contestant: Contestant,
    calls: number,
    onProgress: (finished: number) => void,
  ): Promise<CrewResult> {
    const finished = this.#workers.map(() => 0);
    const since = performance.now();
    const size = this.#workers.length;
    const results = await Promise.all(
      this.#workers.map((worker, i) => {
        const share = Math.floor(calls / size) + (i < calls % size ? 1 : 0);
        return this.#order(worker, { kind: "run", contestant, calls: share }, "done", (count) => {
          finished[i] = count;
          onProgress(finished.reduce((sum, n) => sum + n, 0));
        });
      }),
    );
    const seconds = (performance.now() - since) / 1000;
    const tally: Tally = { granted: 0, refused: 0, failed: {} };
    for (const { tally: part } of results) {
      tally.granted += part.granted;
      tally.refused += part.refused;
      for (const [code, n] of Object.entries(part.failed)) tally.failed[code] = (tally.failed[code] ?? 0) + n;
    }
    return { tally, seconds, latenciesMs: results.flatMap(({ latenciesMs }) => latenciesMs) };
  }

  #order<Kind extends FromWorker["kind"]>(
    worker: ChildProcess,
    order: ToWorker,
    answer: Kind,
    onProgress?: (finished: number) => void,
  ): Promise<Answer<Kind>> {
    const { promise, resolve, reject } = Promise.withResolvers<Answer<Kind>>();
    const onMessage = (message: FromWorker): void => {
      if (message.kind === "progress") onProgress?.(message.finished);
      else if (message.kind === "error") reject(new Error(message.message));
      else if (isOf(message, answer)) resolve(message);
    };
    const onExit = (code: number | null, signal: string | null): void => {
      reject(new Error(`a process of the demo ended with ${signal ?? `exit code ${code}`}`));
    };
    const onAbort = (): void => reject(this.#signal.reason);
    worker.on("message", onMessage);
    worker.once("exit", onExit);
    this.#signal.addEventListener("abort", onAbort, { once: true });
    if (this.#signal.aborted) onAbort();
    else if (worker.exitCode !== null || worker.signalCode !== null)
      onExit(worker.exitCode, worker.signalCode);
    else worker.send(order);
    return promise.finally(() => {
      worker.off("message", onMessage);
      worker.off("exit", onExit);
      this.#signal.removeEventListener("abort", onAbort);
    });
  }

  async close(): Promise<void> {
    await Promise.all(
      this.#workers.map(async (worker) => {
        if (worker.exitCode !== null || worker.signalCode !== null) return;
        const { promise, resolve } = Promise.withResolvers<void>();
        worker.once("exit", () => resolve());
        // They end by themselves without a parent to talk to.
        if (worker.connected) worker.disconnect();
        const timer = setTimeout(() => worker.kill("SIGKILL"), 2000);
        await promise;
        clearTimeout(timer);
      }),
    );
  }
}
