import type { Key, LockRequest } from "../../../seam/key.ts";
import { hexText } from "../dialect.ts";

/** The arguments of an advisory lock function for a key, as SQL made of digits and hexadecimal text only. */
export function argument({ form }: Key): string {
  switch (form.kind) {
    case "name":
      // In quotes: a minus before a cast is an operator.
      return `'${form.hash}'::bigint`;
    case "bigint":
      return `'${form.value}'::bigint`;
    case "int":
      return `${form.a}, ${form.b}`;
    case "hashtext":
      // The server hashes: its encoding and byte order decide, as they do for the code that already takes this lock.
      return form.texts.map((text) => `pg_catalog.hashtext(${hexText(text)})`).join(", ");
    case "getLock":
      throw new TypeError("not a key of this server: GET_LOCK");
    case "hashtextextended":
      return `pg_catalog.hashtextextended(${hexText(form.text)}, ${form.seed})`;
  }
}

/** Whether a row of pg_locks is this lock. It shows one bigint as (high half, low half, 1) and two ints as (a, b, 2), halves as unsigned oids. */
export function isLock(of: string, { key }: LockRequest): string {
  const args = argument(key);
  const two = key.form.kind === "int" || (key.form.kind === "hashtext" && key.form.texts.length === 2);
  if (two) {
    const [a, b] = splitTwo(key);
    return same(of, `(${a})::bigint`, `(${b})::bigint`, 2);
  }
  return same(of, `((${args})::bigint OPERATOR(pg_catalog.>>) 32)`, `(${args})::bigint`, 1);
}

function same(of: string, high: string, low: string, kind: 1 | 2): string {
  const half = (value: string) => `(${value} OPERATOR(pg_catalog.&) 4294967295)::pg_catalog.oid`;
  return `(${of}classid, ${of}objid, ${of}objsubid) OPERATOR(pg_catalog.=) (${half(high)}, ${half(low)}, ${kind}::smallint)`;
}

function splitTwo({ form }: Key): [string, string] {
  if (form.kind === "int") return [String(form.a), String(form.b)];
  if (form.kind === "hashtext" && form.texts.length === 2)
    return [
      `pg_catalog.hashtext(${hexText(form.texts[0])})`,
      `pg_catalog.hashtext(${hexText(form.texts[1])})`,
    ];
  throw new TypeError(`not a key of two integers: ${form.kind}`);
}

type Scope = "xact" | "session";

function name(scope: Scope, mode: LockRequest["mode"], attempt: boolean): string {
  return `pg_catalog.pg_${attempt ? "try_" : ""}advisory${scope === "xact" ? "_xact" : ""}_lock${mode === "shared" ? "_shared" : ""}`;
}

/** Waiting calls, in order. The cast matters: some clients cannot read a `void` column. */
export function waiting(locks: readonly LockRequest[], scope: Scope): string[] {
  return locks.map(({ key, mode }) => `${name(scope, mode, false)}(${argument(key)})::pg_catalog.text`);
}

/** One expression: true if all were free. Stops at the first that is not, so that it says which were taken. */
export function trying(locks: readonly LockRequest[], scope: Scope): string {
  return locks.reduceRight(
    (rest, { key, mode }) =>
      `CASE WHEN ${name(scope, mode, true)}(${argument(key)}) THEN ${rest} ELSE false END`,
    "true",
  );
}

export function unlocking({ key, mode }: LockRequest): string {
  return `pg_catalog.pg_advisory_unlock${mode === "shared" ? "_shared" : ""}(${argument(key)})`;
}
