/** What a key is on each kind of server. */
import { createHash } from "node:crypto";
import { type Key, key as keyOf } from "holdfast";
import { shown } from "../text.ts";
import { defaultSchema, ownIn } from "../url.ts";

export interface Facts {
  readonly schema: string;
  readonly name: string;
  readonly parts: readonly string[];
  /** The 64 bits, as 16 hexadecimal digits. */
  readonly hex: string;
  /** The same as a signed number: the argument of PostgreSQL's functions. */
  readonly bigint: string;
  /** As pg_locks shows it, with objsubid 1. */
  readonly classid: number;
  readonly objid: number;
  /** The row of holdfast_lock, and what leases are kept under. */
  readonly id: string;
  /** Of a session on MySQL and MariaDB, where it depends on the database's name; undefined: that is not known. */
  readonly getLock: string | undefined;
  readonly sql: {
    readonly postgres: string;
    readonly holders: string;
    readonly mysql: string;
  };
}

/** In a schema that was chosen, other numbers. */
export function hashOf(key: Key, schema: string): bigint {
  const { form } = inSchema(key, schema);
  if (form.kind === "name") return form.hash;
  throw new TypeError(`not a named key: ${form.kind}`);
}

function inSchema(key: Key, schema: string): Key {
  return schema === defaultSchema ? key : keyOf.in(schema, key);
}

export function factsOf(given: Key, schema: string, database: string | undefined): Facts {
  const key = inSchema(given, schema);
  const hash = hashOf(given, schema);
  const bits = BigInt.asUintN(64, hash);
  const classid = Number(bits >> 32n);
  const objid = Number(bits & 0xffff_ffffn);
  const { id, name, parts } = key;
  return {
    schema,
    name,
    parts,
    hex: bits.toString(16).padStart(16, "0"),
    bigint: String(hash),
    classid,
    objid,
    id,
    getLock: database === undefined ? undefined : getLockName(database, id),
    sql: {
      postgres: `SELECT pg_advisory_xact_lock(${hash});`,
      holders: `SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = ${classid} AND objid = ${objid} AND objsubid = 1;`,
      // Both quotes are safe: a name is printable ASCII, and nothing else is in it but digits.
      mysql: `INSERT INTO ${schema}_lock (id, name) VALUES ('${id}', '${name.replaceAll("\\", "\\\\").replaceAll("'", "''")}') ON DUPLICATE KEY UPDATE turn = turn + 1;`,
    },
  };
}

/** As the library makes it in SQL: names are shared by all databases of a server, and are no longer than 64 characters. */
export function getLockName(database: string, id: string): string {
  return `holdfast:${createHash("sha256").update(`${database}:${id}`).digest("hex").slice(0, 40)}`;
}

/** The same lock by name, where SQL can spell it. */
export function byName({ schema, parts }: Facts): string | undefined {
  if (parts.some((part) => shown(part) !== part)) return undefined;
  return `${ownIn("postgres", schema)("key")}(${parts.map((part) => `'${part.replaceAll("'", "''")}'`).join(", ")})`;
}
