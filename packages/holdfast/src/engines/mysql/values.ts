import { UsageError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";

const integer = /^(tiny|small|medium|big)?int|^bit|^year/;
const decimal = /^(decimal|numeric)/;
const real = /^(float|double|real)/;
const binary = /blob|binary/;
const temporal = /^(date|time)/;

export const isInteger = (type: string) => integer.test(type);

/**
 * A value for a column. Of the column's own kind, or the server compares both as floating-point numbers: then
 * 'abc' equals 0, digits after the sixteenth do not count, and no index is used, so that every row is locked.
 */
export function bound(value: unknown, type: string): Statement {
  const plain = simple(value, type);
  if (plain === null) return sql`${null}`;
  if (integer.test(type)) return sql`${whole(plain, type)}`;
  if (decimal.test(type)) return sql`CAST(${String(plain)} AS DECIMAL(65, 30))`;
  if (real.test(type)) return sql`${typeof plain === "string" ? Number(plain) : plain}`;
  if (temporal.test(type) || plain instanceof Uint8Array) return sql`${plain}`;
  return sql`${plain instanceof Date ? plain.toISOString() : String(plain)}`;
}

/** A value to be written: what does not fit is for the server to refuse. */
export function written(value: unknown, type: string): Statement {
  const plain = simple(value, type);
  return sql`${typeof plain === "number" && !integer.test(type) && !real.test(type) ? String(plain) : plain}`;
}

type Simple = null | string | number | bigint | Date | Uint8Array;

function simple(value: unknown, type: string): Simple {
  switch (typeof value) {
    case "string":
    case "number":
    case "bigint":
      return value;
    case "boolean":
      return value ? 1 : 0;
    case "object":
      if (value === null || value instanceof Date) return value;
      if (value instanceof Uint8Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength);
      // A type that writes itself, such as a decimal of an ORM, is not a document.
      if (
        type !== "json" &&
        !Array.isArray(value) &&
        Object.getPrototypeOf(value) !== Object.prototype &&
        Object.hasOwn(Object.getPrototypeOf(value) as object, "toString")
      )
        return String(value);
      return JSON.stringify(value);
    default:
      throw new UsageError(`${typeof value} is no value for a column`);
  }
}

function whole(value: Exclude<Simple, null>, type: string): number | bigint {
  if (typeof value === "bigint" || Number.isSafeInteger(value)) return value as number | bigint;
  if (typeof value === "string" && /^[+-]?\d{1,20}$/.test(value)) return BigInt(value);
  throw new UsageError(
    `${typeof value === "object" ? "an object" : String(value)} is no value for a column of type ${type}`,
  );
}

/** A column as text that `fromText` reads: exact, whatever the client makes of numbers, dates and bytes. */
export function asText(column: Statement, type: string): Statement {
  if (binary.test(type)) return sql`HEX(${column})`;
  if (type.startsWith("bit")) return sql`CAST(CAST(${column} AS UNSIGNED) AS CHAR)`;
  return sql`CAST(${column} AS CHAR)`;
}

export function fromText(text: unknown, type: string): unknown {
  return binary.test(type) ? Buffer.from(String(text), "hex") : String(text);
}
