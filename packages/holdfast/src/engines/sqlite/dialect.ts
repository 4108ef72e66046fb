import type { Row, SqlConnection } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { defaultSchema, prefixNames } from "../../seam/names.ts";
import type { Lexis } from "../../seam/redact.ts";
import {
  type Dialect,
  type Names,
  type Rendered,
  type Statement,
  render as renderWith,
} from "../../seam/sql.ts";
import { Interrupted } from "./errors.ts";
import type { OpenFile } from "./open-file.ts";
import type { WriterQueue } from "./writer-queue.ts";

export interface SqliteConnection extends SqlConnection {
  /** Whether the handle is inside BEGIN … COMMIT. */
  readonly inTransaction: boolean;
  /** What was opened: whether it can write does not change afterwards. */
  readonly opened: object;
  /** Whether another connection could begin writing now: then this one has not begun to. Undefined: no way to tell. */
  writerIsFree?(): boolean | undefined | Promise<boolean | undefined>;
  /** Of a statement of ours inside of a transaction, by its text: answered before it returns. Absent where it has to be waited for. */
  atOnce?(text: string, values: readonly unknown[]): readonly Row[];
  /** Begins at once, unless it returns a promise. `ours`: no statement of the caller's will be in it. */
  begin(mode: "deferred" | "immediate", ours?: boolean): Soon<void>;
  /** To roll back what has ended already is no mistake. */
  end(how: "commit" | "rollback"): Soon<void>;
  /** BEGIN brings a connection of its own: what was set before it says nothing of the transaction. */
  readonly switches?: boolean;
  /** Where those of this process stand who want to write to the same file, and where its writer tells what it holds. */
  readonly writerQueue?: WriterQueue | undefined;
  /** Tells whether the file is still at its path; absent where there is none, or its path is not known. */
  readonly file?: OpenFile | undefined;
  /** Ends the wait of what is not part of a transaction yet, if whoever waits does not want it any more. */
  readonly giveUp?: GiveUp;
  /** Finds the file, and so the line, of a caller's own transaction. */
  locate?(): Promise<void>;
  /** The transaction on it that we began: nobody else's is ours to roll back. */
  begun?: { readonly readOnly: boolean } | undefined;
}

/** Waits happen between statements here, where nobody but us could end them. */
export class GiveUp {
  #controller: AbortController | undefined;

  get signal(): AbortSignal {
    return (this.#controller ??= new AbortController()).signal;
  }

  now(): void {
    (this.#controller ??= new AbortController()).abort(new Interrupted());
  }
}

/** Most clients here are synchronous. */
export type Soon<T> = T | Promise<T>;

const names = prefixNames(defaultSchema);

export const dialect: Dialect = {
  names,
  placeholder: () => "?",
  quote: (name) => `"${name.replaceAll('"', '""')}"`,
};

export function render(statement: Statement, called: Names = names): Rendered {
  const { text, values } = renderWith(statement, dialect, called);
  return { text, values: values.map(bound) };
}

/**
 * A value as SQLite keeps it. Whole numbers as integers: clients bind every number as REAL, which a text column would
 * store as "7.0", and a column without a type as 7.0.
 */
export function bound(value: unknown): unknown {
  switch (typeof value) {
    case "string":
    case "bigint":
      return value;
    case "number":
      return Number.isSafeInteger(value) ? BigInt(value) : value;
    case "boolean":
      return value ? 1n : 0n;
    case "object":
      if (value === null) return null;
      if (value instanceof Date) return value.toISOString();
      if (value instanceof Uint8Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength);
      if (value instanceof ArrayBuffer) return Buffer.from(value);
      // A type that writes itself, such as a decimal, is not a document.
      if (!isDocument(value)) return (value as { toString(): string }).toString();
      return JSON.stringify(value);
    default:
      throw new UsageError(`${typeof value} is no value for a column`);
  }
}

function isDocument(value: object): boolean {
  const prototype: unknown = Object.getPrototypeOf(value);
  return (
    Array.isArray(value) ||
    prototype === null ||
    prototype === Object.prototype ||
    !Object.hasOwn(prototype as object, "toString")
  );
}

/** A quoted name that no column has is read as a text. */
export const lexis: Lexis = {
  quotedNames: "tables",
  otherNames: ["`", "["],
  backslashes: false,
  moreTexts: false,
  nestedComments: false,
  returns: false,
  unicodeBlanks: false,
  hashComments: false,
};
