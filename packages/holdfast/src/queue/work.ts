/** What a worker is told, checked; and its start, in each database of its queue. */
import { type HoldfastError, UsageError, message } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { troubleOf } from "../transaction/present.ts";
import { milliseconds } from "../waiting/wait.ts";
import { backoffOf } from "./backoff.ts";
import type { QueueBatcher } from "./batcher.ts";
import type { Payloads } from "./payload.ts";
import type { QueueSettings } from "./store.ts";
import { TransactionalWorker } from "./transactional.ts";
import type { QueueOptions, WorkOptions, Worker } from "./types.ts";
import { QueueWorker } from "./worker.ts";
import type { WorkerSettings } from "./worker/settings.ts";
import { Crew, Starting } from "./worker/starting.ts";

/** A queue, as its workers need to know it. */
interface WorkedQueue<Output> {
  readonly name: string;
  readonly batchers: readonly QueueBatcher[];
  readonly settings: QueueSettings;
  readonly payloads: Payloads<unknown, Output>;
  readonly backoff: QueueOptions<never, never>["backoff"];
}

type TheirOptions = WorkOptions & { readonly transactional?: boolean };

const workOptions = new Set([
  "concurrency",
  "batch",
  "signal",
  "pollMs",
  "ttlMs",
  "onTrouble",
  "transactional",
]);

/** `handler`: of the kind that `transactional` says. */
export function work<Output>(
  queue: WorkedQueue<Output>,
  handler: (job: never, tx: never) => unknown,
  options: TheirOptions,
): Worker {
  if (typeof (handler as unknown) !== "function")
    throw new UsageError("work(handler, options): the handler must be a function");
  checkNames("work", options, workOptions);
  const { name, batchers } = queue;
  // Throws here, and not later, where nobody listens, if the engine has none.
  for (const { store } of batchers) void store;
  const { signal, transactional } = options;
  const terms = workerSettings(queue, options);
  const started = batchers.map((batcher) => {
    const trouble = (error: unknown) =>
      terms.trouble(troubleOf(batcher.context.database, error, `queue ${batcher.context.show(name)}`));
    const settings = { ...terms, trouble };
    return new Starting(batcher, name, queue.settings, trouble, signal, (number, stop) =>
      transactional
        ? new TransactionalWorker(batcher, { ...settings, number }, handler as never, stop)
        : new QueueWorker(batcher, { ...settings, number }, handler as never, stop),
    );
  });
  const [only, ...more] = started as [Starting, ...Starting[]];
  return more.length === 0 ? only : new Crew(started);
}

/** But for the number of the queue, which is found later. */
function workerSettings<Output>(
  { name, settings, payloads, backoff }: WorkedQueue<Output>,
  options: TheirOptions,
): Omit<WorkerSettings<Output>, "number" | "trouble"> & { trouble(error: HoldfastError): void } {
  const { concurrency = 10, signal, pollMs = 1000, ttlMs = 30_000, transactional } = options;
  const { batch = transactional ? 25 : 500 } = options;
  const tell = options.onTrouble ?? warner(name);
  const trouble = (error: HoldfastError) => {
    emit("holdfast:queue:trouble", () => ({ queue: name, error }));
    tell(error);
  };
  checkSignal(signal);
  for (const [what, value] of [
    ["concurrency", concurrency],
    ["batch", batch],
  ] as const)
    if (!Number.isSafeInteger(value) || value < 1)
      throw new UsageError(`work: ${what} must be a whole number from 1`);
  const { attempts, most, groupMost, groupRate } = settings;
  const limited = most !== undefined || groupMost !== undefined || groupRate !== undefined;
  if (transactional && limited)
    throw new UsageError("work: limits are not counted for transactional jobs; leave one or the other out");
  return {
    queue: name,
    concurrency,
    most: batch,
    pollMs: milliseconds(pollMs, "work: pollMs", 1),
    ttlMs: milliseconds(ttlMs, "work: ttlMs", 100),
    attempts,
    limited,
    read: (payload) => payloads.read(payload),
    again: backoffOf(name, backoff, trouble),
    trouble,
  };
}

/** What goes wrong in a worker has nobody to be thrown to. The same is said once a minute. */
function warner(queue: string): (error: unknown) => void {
  let said = "";
  let at = 0;
  return (error) => {
    const text = `The worker of queue ${JSON.stringify(queue)} goes on after: ${message(error)}`;
    if (text === said && performance.now() - at < 60_000) return;
    said = text;
    at = performance.now();
    process.emitWarning(text, "HoldfastWarning");
  };
}
