/** Errors of a transaction's own calls: what is told of them, and what they mean for the transaction. */
import type { Connection, Failure } from "../../seam/database.ts";
import { NotInTransactionError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import type { Instance } from "../instance.ts";
import { isAtCommit } from "../lock-support.ts";
import { present } from "../present.ts";

/** Of errors that were told. `root`: of the transaction. */
const meanings = new WeakMap<object, { readonly failure: Failure; readonly root: object }>();

/** A statement of ours that failed inside a transaction. */
export interface FailedWork {
  /** What it is about, for people; undefined: tables of the caller's. */
  readonly names: readonly string[] | undefined;
  readonly waitedMs: number;
  readonly attempt: number;
  /** Of the transaction. */
  readonly root: object;
}

/** What is told of it. What it means for the transaction stays known to it. */
export function explain<Native, C extends Connection>(
  context: Instance<Native, C>,
  error: unknown,
  { names, waitedMs, attempt, root }: FailedWork,
): unknown {
  const { database, show } = context;
  const failure = classify(database, error);
  if (failure === "not-in-transaction") {
    return new NotInTransactionError(
      "this client is in no transaction: a lock would be gone at once, and what is written would be kept whatever comes later. BEGIN first, or use hf.transaction(…).",
      error,
    );
  }
  const shown = present(database, error, {
    names: (names ?? []).map((name) => show(name)),
    theirs: names === undefined,
    waitedMs,
    inside: true,
    attempts: attempt,
    atCommit: isAtCommit(context),
  });
  if (shown !== error && failure !== undefined) meanings.set(shown as object, { failure, root });
  return shown;
}

/** What an error of ours means for the transaction, if it is one of its own statements that failed. */
export function failureWithin(root: object | undefined, error: object): Failure | undefined {
  const meaning = meanings.get(error);
  return meaning && meaning.root === root ? meaning.failure : undefined;
}
