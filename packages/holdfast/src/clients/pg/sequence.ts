/**
 * Several statements with their values in one message to the server, through a `pg` Client. By itself it sends the next one when
 * the last is answered. What is given here takes part in its queue as one query, as pg-cursor's do.
 *
 * One Sync at the end: if a statement fails, the server throws away all that follows up to there. Nothing is run outside of a
 * transaction whose BEGIN has failed.
 */
import type { Result, Step } from "../../seam/database.ts";

/** The part of pg's protocol that is used here. */
export interface PgWire {
  parse(message: { name?: string | undefined; text: string }): void;
  bind(message: Bind): void;
  describe(message: { type: string; name: string }): void;
  execute(message: object): void;
  sync(): void;
  readonly stream: { cork?(): void; uncork?(): void };
  /** Texts of what the session keeps, by name. */
  readonly parsedStatements: Record<string, string>;
}

interface Bind {
  readonly statement?: string | undefined;
  readonly values?: readonly unknown[];
  readonly valueMapper?: ((value: unknown) => unknown) | undefined;
}

/** A query of pg itself: it knows how values are written and read. */
interface PgQuery extends Handlers {
  callback: (error: Error | null, result?: PgResult | PgResult[]) => void;
  readonly _result: { _types?: unknown };
  prepare(wire: object): void;
  handleReadyForQuery(wire: PgWire): void;
}

interface PgResult {
  readonly rows: Record<string, unknown>[];
  readonly rowCount: number | null;
  readonly command: string;
}

interface Handlers {
  handleRowDescription(message: unknown): void;
  handleDataRow(message: { fields: unknown[] }): void;
  handleCommandComplete(message: { text: string }, wire: PgWire): void;
  handleError(error: Error, wire: PgWire): void;
  handleCopyInResponse?(wire: PgWire): void;
}

/** A step, with the name that the session may keep it by. */
export type NamedStep = Step & { readonly name: string | undefined };

export type QueryOf = new (config: { name?: string | undefined; text: string; values: unknown[] }) => PgQuery;

type Write = (wire: PgWire) => void;

/** One of them. */
interface Part extends Handlers {
  readonly name: string | undefined;
  readonly text: string;
  readonly answer: Promise<Result>;
  /** Throws if its values cannot be written. Nothing is sent yet. */
  write(wire: PgWire): Write[];
}

/** A constant of ours, which tells in a row of texts what its columns are known to be: nothing has to be described. */
class Known implements Part {
  readonly name: string | undefined;
  readonly text: string;
  readonly #values: readonly unknown[];
  readonly #columns: readonly string[];
  readonly #answered = Promise.withResolvers<Result>();
  readonly #rows: Record<string, unknown>[] = [];

  constructor({ name, text, values }: NamedStep, columns: readonly string[]) {
    this.name = name;
    this.text = text;
    this.#values = values;
    this.#columns = columns;
    this.#answered.promise.catch(() => {});
  }

  get answer(): Promise<Result> {
    return this.#answered.promise;
  }

  write({ parsedStatements }: PgWire): Write[] {
    const { name, text } = this;
    const parsed = name !== undefined && parsedStatements[name] !== undefined;
    return [
      (wire) => {
        if (!parsed) wire.parse({ name, text });
        wire.bind({ statement: name, values: this.#values });
        wire.execute({});
      },
    ];
  }

  handleRowDescription(): void {}

  handleDataRow({ fields }: { fields: unknown[] }): void {
    this.#rows.push(Object.fromEntries(this.#columns.map((column, i) => [column, fields[i]])));
  }

  handleCommandComplete({ text }: { text: string }): void {
    this.#answered.resolve({ rows: this.#rows, affected: 0, command: text });
  }

  handleError(error: Error): void {
    this.#answered.reject(error);
  }
}

/** Any other. */
class Asked implements Part {
  readonly name: string | undefined;
  readonly text: string;
  readonly answer: Promise<Result>;
  readonly #query: PgQuery;

  constructor({ name, text, values }: NamedStep, Query: QueryOf, types: unknown) {
    this.name = name;
    this.text = text;
    const query = (this.#query = new Query({ name, text, values: [...values] }));
    query._result._types ??= types;
    this.answer = new Promise((resolve, reject) => {
      query.callback = (error, found) => {
        const last = Array.isArray(found) ? found.at(-1) : found;
        if (error || !last) return reject(error ?? new Error("pg gave no result"));
        resolve({ rows: last.rows, affected: last.rowCount ?? 0, command: last.command });
      };
    });
    this.answer.catch(() => {});
  }

  /** As pg itself would, up to the Sync. */
  write({ parsedStatements }: PgWire): Write[] {
    const writes: Write[] = [];
    this.#query.prepare({
      parsedStatements,
      // What is never come to, since something before it fails, is not kept by the session.
      submittedNamedStatements: {},
      parse: (message: Parameters<PgWire["parse"]>[0]) => writes.push((wire) => wire.parse(message)),
      bind({ valueMapper, values = [], ...message }: Bind) {
        const written = valueMapper ? values.map((value) => valueMapper(value)) : values;
        writes.push((wire) => wire.bind({ ...message, values: written }));
      },
      describe: (message: { type: string; name: string }) => writes.push((wire) => wire.describe(message)),
      execute: (message: object) => writes.push((wire) => wire.execute(message)),
      close() {},
      sync() {},
      flush() {},
    });
    return writes;
  }

  handleRowDescription(message: unknown): void {
    this.#query.handleRowDescription(message);
  }

  handleDataRow(message: { fields: unknown[] }): void {
    this.#query.handleDataRow(message);
  }

  handleCommandComplete(message: { text: string }, wire: PgWire): void {
    this.#query.handleCommandComplete(message, wire);
    this.#query.handleReadyForQuery(wire);
  }

  handleError(error: Error, wire: PgWire): void {
    this.#query.handleError(error, wire);
  }

  handleCopyInResponse(wire: PgWire): void {
    this.#query.handleCopyInResponse?.(wire);
  }
}

/** What is given to `client.query`. */
export class Sequence {
  readonly #parts: readonly Part[];
  /** Told what one has failed with that the session was to keep. */
  readonly #onKept: (error: Error, text: string) => void;
  /** The one that is being answered. */
  #at = 0;
  /** The client's, if it has a time limit for queries. */
  callback: ((error: Error | null) => void) | undefined;

  constructor(
    steps: readonly NamedStep[],
    { Query, types, onKept }: { Query: QueryOf; types: unknown; onKept(error: Error, text: string): void },
  ) {
    this.#onKept = onKept;
    this.#parts = steps.map((step) =>
      step.columns ? new Known(step, step.columns) : new Asked(step, Query, types),
    );
  }

  get answers(): readonly Promise<Result>[] {
    return this.#parts.map(({ answer }) => answer);
  }

  /** Asked by the client when a statement has been parsed: by its name the session keeps it. */
  get name(): string | undefined {
    return this.#parts[this.#at]?.name;
  }

  get text(): string | undefined {
    return this.#parts[this.#at]?.text;
  }

  submit(wire: PgWire): Error | null {
    let writes: Write[];
    try {
      writes = this.#parts.flatMap((part) => part.write(wire));
    } catch (error) {
      return error as Error;
    }
    wire.stream.cork?.();
    try {
      for (const write of writes) write(wire);
      wire.sync();
    } finally {
      wire.stream.uncork?.();
    }
    return null;
  }

  handleRowDescription(message: unknown): void {
    this.#parts[this.#at]?.handleRowDescription(message);
  }

  handleDataRow(message: { fields: unknown[] }): void {
    this.#parts[this.#at]?.handleDataRow(message);
  }

  handleCommandComplete(message: { text: string }, wire: PgWire): void {
    this.#parts[this.#at++]?.handleCommandComplete(message, wire);
  }

  handleEmptyQuery(wire: PgWire): void {
    this.handleCommandComplete({ text: "" }, wire);
  }

  handlePortalSuspended(): void {}

  handleCopyInResponse(wire: PgWire): void {
    this.#parts[this.#at]?.handleCopyInResponse?.(wire);
  }

  handleCopyData(): void {}

  handleReadyForQuery(): void {
    this.callback?.(null);
  }

  handleError(error: Error, wire: PgWire): void {
    const [failed, ...others] = this.#parts.slice(this.#at);
    if (failed?.name !== undefined) this.#onKept(error, failed.text);
    failed?.handleError(error, wire);
    for (const part of others) part.handleError(error, wire);
    this.#at = this.#parts.length;
    this.callback?.(error);
  }
}
