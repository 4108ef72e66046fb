import type { SqlConnection } from "../../seam/database.ts";
import { UnsupportedError, UsageError } from "../../seam/errors.ts";
import { defaultSchema, prefixNames } from "../../seam/names.ts";
import type { Lexis } from "../../seam/redact.ts";
import {
  type Dialect,
  type Names,
  type Rendered,
  type Statement,
  render as renderWith,
} from "../../seam/sql.ts";
import type { InProcessLocks } from "./in-process-locks.ts";

export interface DuckdbConnection extends SqlConnection {
  /** The client's own connection: what is held is held by this. */
  readonly session: object;
  /** Of the database, which several instances may share. */
  readonly inProcess: Promise<InProcessLocks>;
  /** Runs a body on another connection of the same instance, which sees what is committed now. */
  aside<T>(body: (other: DuckdbConnection) => Promise<T>): Promise<T>;
}

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

/** A value that the client can tell the type of. */
function bound(value: unknown): unknown {
  switch (typeof value) {
    case "string":
    case "number":
    case "bigint":
    case "boolean":
      return value;
    case "object":
      if (value === null) return null;
      if (value instanceof Date) return value.toISOString();
      if (value instanceof Uint8Array)
        throw new UnsupportedError(
          "A blob as a value: bind it with the client's own blobValue, on tx.client",
        );
      if (Array.isArray(value) || isPlain(value)) return JSON.stringify(value);
      // Values of the client's own, such as a decimal or a list.
      return value;
    default:
      throw new UsageError(`${typeof value} is no value for a column`);
  }
}

function isPlain(value: object): boolean {
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === null || prototype === Object.prototype;
}

export const lexis: Lexis = {
  quotedNames: "always",
  otherNames: [],
  backslashes: false,
  moreTexts: true,
  nestedComments: true,
  returns: true,
  unicodeBlanks: true,
  hashComments: false,
};
