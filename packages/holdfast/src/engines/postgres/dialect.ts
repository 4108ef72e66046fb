import type { SqlConnection } from "../../seam/database.ts";
import { defaultSchema, schemaText } from "../../seam/names.ts";
import { UsageError } from "../../seam/errors.ts";
import type { Lexis } from "../../seam/redact.ts";
import {
  type Dialect,
  type Names,
  type Rendered,
  type Statement,
  render as renderWith,
} from "../../seam/sql.ts";
import { type Key, keyIn } from "../../seam/key.ts";
import { hash } from "node:crypto";

const quote = (name: string) => `"${name.replaceAll('"', '""')}"`;

/** Of names, on every server that was not built otherwise: what is longer is cut off without a word. */
export const longest = 63;

/** A schema of its own. What a function's body or a text of SQL could take for its end is refused. */
export function namesIn(given: unknown): Names {
  const schema = schemaText(given, "a schema on PostgreSQL");
  const refuse = (why: string) => {
    throw new UsageError(`schema: ${JSON.stringify(schema)} cannot be a schema of Holdfast's: ${why}`);
  };
  if (Buffer.byteLength(schema) > longest) refuse(`PostgreSQL keeps ${longest} bytes of a name`);
  if (/['"\\$%]/.test(schema)) refuse("it has a quote, a backslash, $ or % in it");
  if (/\p{C}|[\u2028\u2029]/u.test(schema)) refuse("it has characters in it that cannot be seen");
  if (/^pg_/i.test(schema) || schema === "information_schema")
    refuse("the server keeps such names for itself");
  if (schema === "public")
    refuse(
      "its tables have names such as queue and lock, and must not be mistaken for yours: give it one of its own",
    );
  const written = schemaOf({ schema });
  // A channel's name is as long as any other, with what is added to it.
  const short =
    Buffer.byteLength(schema) <= longest - 20
      ? schema
      : `holdfast_${hash("sha256", schema, "hex").slice(0, 16)}`;
  return { schema, own: (name) => `${written}.${name}`, label: (name) => `${short}_${name}` };
}

const names = namesIn(defaultSchema);

/** The schema itself, as it is written in SQL. */
export function schemaOf({ schema }: Pick<Names, "schema">): string {
  return schema === defaultSchema ? schema : quote(schema);
}

export const dialect: Dialect = { placeholder: (index) => `$${index}`, quote, names };

/** What our own things are called, on this connection. */
export function namesOf(connection: SqlConnection): Names {
  return connection.names ?? names;
}

/** The lock that a key of ours names for those whose schema this is. */
export function ownKey({ schema }: Pick<Names, "schema">, given: Key): Key {
  return schema === defaultSchema ? given : keyIn(schema, given);
}

export function render(statement: Statement, called: Names = names): Rendered {
  return renderWith(statement, dialect, called);
}

/**
 * A text literal for the one-message open, which cannot bind values: hexadecimal digits only, so nothing in the
 * text can end the literal whatever the server's quoting settings are.
 */
export function hexText(text: string): string {
  return `pg_catalog.convert_from(pg_catalog.decode('${Buffer.from(text, "utf8").toString("hex")}', 'hex'), 'UTF8')`;
}

/** `standard_conforming_strings` is a setting of the session. */
export const lexis: Lexis = {
  quotedNames: "always",
  otherNames: [],
  backslashes: true,
  moreTexts: true,
  nestedComments: true,
  returns: true,
  unicodeBlanks: false,
  hashComments: false,
};
