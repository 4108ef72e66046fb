import { HoldfastError } from "../seam/errors.ts";
import { described } from "../seam/thrown.ts";

/** The job is not this worker's any more: it was given up for dead, and the job to another. Nothing was written. */
export class JobLostError extends HoldfastError {
  readonly queue: string;
  readonly job: number;

  constructor(queue: string, job: number, cause?: unknown) {
    super(
      "HF_JOB_LOST",
      `Job ${job} of queue ${JSON.stringify(queue)} is not this worker's any more: it did not give a sign of life for too long, and another has the job now. End the transaction without committing; the handler's signal has aborted.`,
      { cause },
    );
    this.queue = queue;
    this.job = job;
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
