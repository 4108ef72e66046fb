import { type ChildProcess, fork } from "node:child_process";
import { extname } from "node:path";
import { fileURLToPath } from "node:url";
import { Failure } from "../failure.ts";
import type { FromWorker, Setting, Tally, ToWorker } from "./protocol.ts";
import type { Race, WayName } from "./race.ts";

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
    this.#workers = Array.from({ length: size }, () => {
      // To stderr, whatever it is: stdout is for results.
      const worker = fork(workerFile, { stdio: ["ignore", 2, 2, "ipc"] });
      // An order that did not arrive: its end says why.
      worker.on("error", () => {});
      return worker;
    });
  }

  async setUp(setting: Omit<Setting, "index">): Promise<void> {
    await Promise.all(
      this.#workers.map((worker, index) =>
        this.#order(worker, { kind: "set-up", setting: { ...setting, index } }, "ready"),
      ),
    );
  }

  async run(race: Race, way: WayName, onProgress: (finished: number) => void): Promise<CrewResult> {
    const finished = this.#workers.map(() => 0);
    const since = performance.now();
    const results = await Promise.all(
      this.#workers.map((worker, i) =>
        this.#order(worker, { kind: "run", race: race.name, way }, "done", (count) => {
          finished[i] = count;
          onProgress(race.shared ? Math.max(...finished) : finished.reduce((sum, n) => sum + n, 0));
        }),
      ),
    );
    const seconds = (performance.now() - since) / 1000;
    const tally: Tally = { granted: 0, refused: 0, failed: {}, retried: 0 };
    for (const { tally: part } of results) {
      tally.granted += part.granted;
      tally.refused += part.refused;
      tally.retried += part.retried;
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
      else if (message.kind === "error") reject(new Failure(message.message));
      else if (isOf(message, answer)) resolve(message);
    };
    const onExit = (code: number | null, signal: string | null): void => {
      reject(new Failure(`a process of the demo ended with ${signal ?? `exit code ${code}`}`));
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
