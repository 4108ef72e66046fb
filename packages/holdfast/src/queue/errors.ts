import { HoldfastError } from "../seam/errors.ts";
import { described } from "../seam/thrown.ts";

const silent =
  "it did not give a sign of life for too long, and another has the job now. End the transaction without committing; the handler's signal has aborted";

/** The job is not this worker's any more: the worker was given up for dead, or the handler has ended. Nothing was written. */
export class JobLostError extends HoldfastError {
  readonly queue: string;
  readonly job: number;

  constructor(queue: string, job: number, cause?: unknown, why = silent) {
    super(
      "HF_JOB_LOST",
      `Job ${job} of queue ${JSON.stringify(queue)} is not this worker's any more: ${why}.`,
      {
        cause,
      },
    );
    this.queue = queue;
    this.job = job;
  }
}

/** For `onTrouble`: until that transaction ends, the job can neither end nor run again. */
export class JobUndecidedError extends HoldfastError {
  constructor(queue: string, job: number, cause: unknown) {
    super(
      "HF_JOB_UNDECIDED",
      `Job ${job} of queue ${JSON.stringify(queue)} was completed in a transaction that is still open, though its handler has ended. ` +
        "The worker waits until that transaction is committed or rolled back: end it, and await it in the handler.",
      { cause },
    );
  }
}

/** For `onTrouble`: the worker was stopped, and could not wait any longer for what it had under way. */
export class WorkerLeftError extends HoldfastError {
  constructor(queue: string, running: number) {
    super(
      "HF_WORKER_LEFT",
      `The worker of queue ${JSON.stringify(queue)} was stopped and left without having come to an end (handlers that still run: ${running}): ` +
        `what it had not written down runs again elsewhere.`,
    );
  }
}

/** A payload that the queue's schema does not accept. */
export class PayloadError extends HoldfastError {
  readonly issues: readonly { readonly message: string; readonly path?: readonly unknown[] }[];

  constructor(queue: string, issues: PayloadError["issues"]) {
    const words = issues.map(({ message, path }) =>
      path && path.length > 0 ? `${path.map(String).join(".")}: ${message}` : message,
    );
    super(
      "HF_PAYLOAD",
      `The payload does not fit the schema of queue ${JSON.stringify(queue)}: ${words.join("; ")}`,
    );
    this.issues = issues;
  }
}

/** As `failed()` shows it: the message, where it came from, and what caused it. */
export function words(thrown: unknown): string {
  return described(thrown, 4000);
}
