import { UsageError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";

/** A value as the text that its type reads; null stays null. */
export function text(value: unknown, type = ""): string | null {
  if (value === null) return null;
  if (typeof value === "object" && /^jsonb?$/.test(type)) return JSON.stringify(value);
  switch (typeof value) {
    case "string":
      return value;
    case "number":
    case "bigint":
    case "boolean":
      return String(value);
    case "object":
      if (value instanceof Date) return dateText(value, type);
      if (value instanceof Uint8Array) return `\\x${Buffer.from(value).toString("hex")}`;
      if (Array.isArray(value)) return arrayText(value, type.replace(/\[\]$/, ""));
      // A type that writes itself, such as a decimal of an ORM, is not a document.
      if (
        Object.getPrototypeOf(value) !== Object.prototype &&
        Object.hasOwn(Object.getPrototypeOf(value), "toString")
      )
        return (value as { toString(): string }).toString();
      return JSON.stringify(value);
    default:
      throw new UsageError(`${typeof value} is no value for a column`);
  }
}

function dateText(value: Date, type: string): string {
  // Drivers read a date as midnight of this process's own zone: sent back in UTC it would be the day before.
  if (type === "date")
    throw new UsageError('a Date is a moment, and the column is a day: pass it as text, "2026-05-01"');
  if (Number.isNaN(value.getTime())) throw new UsageError("an invalid Date is no value for a column");
  return value.toISOString();
}

/** A list as the server reads arrays: every item in quotes, so that nothing in it can end it. */
export function arrayText(values: readonly unknown[], type = ""): string {
  const items = values.map((value) => {
    if (Array.isArray(value)) return arrayText(value, type);
    const item = text(value, type);
    return item === null ? "NULL" : `"${item.replace(/["\\]/g, "\\$&")}"`;
  });
  return `{${items.join(",")}}`;
}

/** A list as text, which every client sends the same way. */
export function list(values: readonly (string | number | boolean | undefined)[]): string {
  return `{${values.map((value) => (typeof value === "string" ? quoted(value) : (value ?? "NULL"))).join(",")}}`;
}

/** Of a list of numbers that came as text. */
export function numbers(value: unknown): (number | undefined)[] {
  const text = String(value);
  if (text === "{}" || value === null) return [];
  return text
    .slice(1, -1)
    .split(",")
    .map((each) => (each === "NULL" ? undefined : Number(each)));
}

export function texts<T>(items: readonly T[], text: (item: T) => string | undefined): string {
  return `{${items.map((item) => quoted(text(item))).join(",")}}`;
}

const special = /["\\]/;

function quoted(text: string | undefined): string {
  if (text === undefined) return "NULL";
  return `"${special.test(text) ? text.replace(/["\\]/g, "\\$&") : text}"`;
}

/** Names of types that are words of SQL, and so cannot be taken for another type. */
const words = new Set(["bigint", "int", "integer", "smallint", "boolean"]);

/** A value as text, which every client sends the same way, cast to a type of the server's own. */
export function typed(value: string | number | boolean | undefined | null, type: string): Statement {
  const text = value === undefined || value === null ? null : String(value);
  return sql`${text}::pg_catalog.text::${sql.raw(words.has(type) ? type : `pg_catalog.${type}`)}`;
}

/** A moment in milliseconds since 1970. As a number: clients read times, and zones, each in its own way. */
export function milliseconds(expression: string): Statement {
  return sql.raw(`(extract(epoch FROM ${expression}) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8`);
}

/** A moment, of milliseconds since 1970. */
export function momentOf(ms: number | undefined): Statement {
  return sql`pg_catalog.to_timestamp(${typed(ms === undefined ? undefined : ms / 1000, "float8")})`;
}
