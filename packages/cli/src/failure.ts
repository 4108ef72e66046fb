/** How a verb that could not do its work ends: one line for people, and a code for scripts. */
import { describe } from "./describe.ts";
import { type JsonError, printJsonError } from "./json.ts";
import { remedyOfNoConnection } from "./no-connection.ts";
import { shownLines } from "./text.ts";

/**
 * 0: it did what it was asked, and all is well. 1: it did, and the answer is no (something was found, the lock was busy).
 * 2: it could not. 130: it was stopped.
 */
export const exitCodes = { ok: 0, no: 1, failed: 2, stopped: 130 } as const;

/** Something that people can mend: said in one line, without a stack. */
export class Failure extends Error {
  readonly exitCode: number;

  constructor(
    message: string,
    { exitCode = exitCodes.failed, cause }: { exitCode?: number; cause?: unknown } = {},
  ) {
    super(message, { cause });
    this.exitCode = exitCode;
  }
}

/** Ctrl-C. */
export class Interrupted extends Error {}

/** To whoever reads, and to whatever does. */
export function complain(error: unknown): void {
  const told = jsonErrorOf(error);
  process.exitCode = told.exitCode;
  // Who has stopped it knows.
  if (!(error instanceof Interrupted)) console.error(`holdfast: ${shownLines(told.message)}`);
  printJsonError(told);
}

/** As `--json` has it. */
export function jsonErrorOf(error: unknown): JsonError {
  if (error instanceof Interrupted) return { message: "It was stopped.", exitCode: exitCodes.stopped };
  // A failure of ours has said what to do.
  const remedy = error instanceof Failure ? undefined : remedyOfNoConnection(serversOwn(error));
  return {
    message: remedy === undefined ? describe(error) : `${describe(error)} ${remedy}`,
    exitCode: error instanceof Failure ? error.exitCode : exitCodes.failed,
    code: codeOf(error),
  };
}

/** As the server or the driver has said it, whatever was made of it on its way here. */
export function serversOwn(error: unknown): unknown {
  const { cause } = (error ?? {}) as { cause?: unknown };
  return cause !== undefined && codeOf(error) !== undefined ? serversOwn(cause) : error;
}

/** Of Holdfast's own errors: what others call theirs depends on the driver. */
function codeOf(error: unknown): string | undefined {
  const { code, cause } = (error ?? {}) as { code?: unknown; cause?: unknown };
  if (typeof code === "string" && code.startsWith("HF_")) return code;
  return error instanceof Failure ? codeOf(cause) : undefined;
}

/** Aborts with Ctrl-C or SIGTERM; the second time, the process ends at once. */
export function interruptible(): { readonly signal: AbortSignal } & Disposable {
  const stop = new AbortController();
  const onSignal = (): void => {
    if (stop.signal.aborted) process.exit(exitCodes.stopped);
    stop.abort(new Interrupted());
  };
  process.on("SIGINT", onSignal);
  process.on("SIGTERM", onSignal);
  return {
    signal: stop.signal,
    [Symbol.dispose]() {
      process.off("SIGINT", onSignal);
      process.off("SIGTERM", onSignal);
    },
  };
}
