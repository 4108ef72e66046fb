/** Writes down what a stress run does: in memory, or in a file for each process, which outlives a SIGKILL. */
import { closeSync, fstatSync, openSync, readFileSync, writeSync } from "node:fs";
import { UsageError, message } from "../../seam/errors.ts";
import { read } from "../../seam/thrown.ts";
import { type History, type Operation, plain, recorded } from "./operation.ts";

export interface RecorderOptions {
  /** Whose operations these are. Default: the process id. */
  readonly process?: string;
  /** Whether an operation that threw this certainly had no effect. Default: `certainlyNothing`. */
  readonly definite?: (error: unknown) => boolean;
}

export interface RecordOptions<T> {
  /** A caller within the process, if several are at it at the same time. */
  readonly process?: string;
  /** What of the result is kept. It must be JSON. Default: all of it. */
  readonly output?: (value: T) => unknown;
  readonly definite?: (error: unknown) => boolean;
}

export interface Recorder {
  /** Runs `work`, writes down when it began, when it ended and with what, and passes its result or error on. */
  <T>(
    key: string,
    call: string,
    input: unknown,
    work: () => T | Promise<T>,
    options?: RecordOptions<T>,
  ): Promise<T>;
  /** Something whose end nobody will see: what a process may have done when it was killed. */
  began(key: string, call: string, input?: unknown, options?: { readonly process?: string }): void;
  /** What was recorded in memory; of a recorder with a file, use `readHistory`. */
  history(): History;
  close(): void;
}

/** Of these Holdfast promises that nothing was kept. */
const nothingKept = new Set([
  "HF_CONNECTION_LOST",
  "HF_DEADLINE",
  "HF_DEADLOCK",
  "HF_LOCK_NOT_AVAILABLE",
  "HF_LOCK_TIMEOUT",
  "HF_NOT_IN_TRANSACTION",
  "HF_NO_CONNECTION",
  "HF_ONCE_CONFLICT",
  "HF_ONCE_TOO_OLD",
  "HF_POOL_EXHAUSTED",
  "HF_REPLICA",
  "HF_ROWS_MISSING",
  "HF_SCHEMA_MISSING",
  "HF_SERIALIZATION",
  "HF_SERVER_TOO_OLD",
  "HF_SHARDS",
  "HF_STALE_FENCE",
  "HF_STALE_VERSION",
  "HF_TRANSACTION_ABORTED",
  "HF_UNSUPPORTED",
  "HF_USAGE",
  "HF_WRONG_CONNECTION",
]);

/**
 * True for errors of Holdfast that promise that nothing was kept, of an operation that is one transaction. Every other
 * error is one after which the operation may have taken effect.
 */
export function certainlyNothing(error: unknown): boolean {
  const code = read(error, "code");
  return typeof code === "string" && nothingKept.has(code);
}

interface Began {
  readonly run: string;
  readonly id: number;
  readonly process: string;
  readonly key: string;
  readonly call: string;
  readonly input?: unknown;
  readonly at: number;
}

type Ended = { readonly run: string; readonly id: number; readonly at: number } & (
  { readonly output?: unknown } | { readonly error: string; readonly definite: boolean }
);

/**
 * The clock is `process.hrtime`: CLOCK_MONOTONIC, which all processes of one machine share. As a number it is exact to
 * the nanosecond for the first 104 days after the machine's start; times that come out equal count as overlapping.
 */
function now(): number {
  return Number(process.hrtime.bigint());
}

let runs = 0;

/** Without a file, in memory. Processes may not share a file while they run; one may go on with that of a dead one. */
export function recorder(file?: string, options: RecorderOptions = {}): Recorder {
  const { process: who = String(process.pid), definite = certainlyNothing } = options;
  const sink = file === undefined ? inMemory() : inFile(file);
  // A process that was started again goes on in the same file, perhaps under the same id.
  const run = `${process.pid}-${now()}-${++runs}`;
  let id = 0;
  const begin = (
    key: string,
    call: string,
    input?: unknown,
    { process: caller = who }: { readonly process?: string } = {},
  ): number => {
    sink.write({ run, id: ++id, process: caller, key, call, input, at: now() } satisfies Began);
    return id;
  };
  const record = async <T>(
    key: string,
    call: string,
    input: unknown,
    work: () => T | Promise<T>,
    each: RecordOptions<T> = {},
  ): Promise<T> => {
    const mine = begin(key, call, input, each);
    let value: T;
    try {
      value = await work();
    } catch (error) {
      const at = now();
      const nothing = (each.definite ?? definite)(error);
      sink.write({ run, id: mine, at, error: message(error), definite: nothing } satisfies Ended);
      throw error;
    }
    const at = now();
    sink.write({ run, id: mine, at, output: each.output ? each.output(value) : value } satisfies Ended);
    return value;
  };
  const history = () => operations(sink.lines());
  return Object.assign(record, {
    began: (...args: Parameters<Recorder["began"]>) => void begin(...args),
    history,
    close: sink.close,
  });
}

interface Sink {
  write(line: Began | Ended): void;
  lines(): (Began | Ended)[];
  close(): void;
}

function inMemory(): Sink {
  const lines: (Began | Ended)[] = [];
  return {
    write: (line) => void lines.push(recorded(line) as Began | Ended),
    lines: () => lines,
    close() {},
  };
}

function inFile(file: string): Sink {
  const fd = openSync(file, "a");
  // The last line of one who was killed may lack its end.
  if (fstatSync(fd).size > 0) writeSync(fd, "\n");
  return {
    // One write, at once: the kernel keeps it when the process is killed right after.
    write: (line) => void writeSync(fd, `${JSON.stringify(line, plain)}\n`),
    lines() {
      throw new UsageError(`The history is in ${file}: use readHistory("${file}")`);
    },
    close: () => closeSync(fd),
  };
}

/** What the processes of a run have recorded, of all their files together. */
export function readHistory(...files: readonly string[]): History {
  return files
    .flatMap((file) => operations(parsed(readFileSync(file, "utf8"))))
    .toSorted((a, b) => a.start - b.start);
}

function parsed(text: string): (Began | Ended)[] {
  return text.split("\n").flatMap((line) => {
    if (line === "") return [];
    try {
      return [JSON.parse(line) as Began | Ended];
    } catch {
      // Cut off by a kill: what was to begin then never did, and what had ended is unknown.
      return [];
    }
  });
}

function operations(lines: readonly (Began | Ended)[]): Operation[] {
  const name = ({ run, id }: Began | Ended) => `${run}/${id}`;
  const ends = new Map<string, Ended>();
  for (const line of lines) if (!("call" in line)) ends.set(name(line), line);
  return lines.flatMap((line) => {
    if (!("call" in line)) return [];
    const { process: who, key, call, input, at: start } = line;
    return [{ process: who, key, call, input, start, ...ending(ends.get(name(line))) }];
  });
}

function ending(
  ended: Ended | undefined,
): Pick<Operation, "outcome" | "output" | "end"> & { error?: string } {
  if (ended === undefined) return { outcome: "unknown", output: undefined, end: Infinity };
  if (!("error" in ended)) return { outcome: "returned", output: ended.output, end: ended.at };
  const { error, definite, at } = ended;
  if (definite) return { outcome: "failed", output: undefined, error, end: at };
  return { outcome: "unknown", output: undefined, error, end: Infinity };
}
