/** What a worker's function gets besides its argument. */
export interface WorkerContext {
  send: (name: string, payload?: unknown) => void;
  /** The next message of that name from the test. */
  receive: <T = unknown>(name: string) => Promise<T>;
}

// The argument is what the test passes; only the two of them know its type.
export type WorkerFunction = (arg: any, context: WorkerContext) => unknown;

interface NamedMessage {
  kind: "message";
  name: string;
  payload: unknown;
}

export type ToWorker = { kind: "start"; file: string; arg: unknown } | NamedMessage;

export type FromWorker =
  { kind: "result"; value: unknown } | { kind: "error"; error: PlainError } | NamedMessage;

/** Errors lose their class and their own properties between processes; these are kept. */
export interface PlainError {
  name: string;
  message: string;
  stack: string | undefined;
  code: unknown;
}

export function plainError(error: unknown): PlainError {
  if (!(error instanceof Error)) {
    return { name: "Error", message: String(error), stack: undefined, code: undefined };
  }
  const { name, message, stack } = error;
  return { name, message, stack, code: "code" in error ? error.code : undefined };
}

export function reviveError({ name, message, stack, code }: PlainError): Error {
  const error = Object.assign(new Error(message), { name }, code === undefined ? {} : { code });
  if (stack !== undefined) error.stack = stack;
  return error;
}
