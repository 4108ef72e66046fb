/** Keys that a database knows now: by its sessions, and by the tables of locks, leases, queues and schedules. */
import { key } from "holdfast";
import { type Look, look, plainName } from "../locks/look.ts";
import type { Row, Server } from "../server.ts";
import { hashOf } from "./facts.ts";
import { readings } from "./parse.ts";

/** Where a key was seen. */
export type Place = "lock" | "lock row" | "lease" | "queue" | "schedule";

export interface Used {
  readonly name: string;
  readonly place: Place;
  /** The 64 bits, signed; undefined: it is not a key, or its id is not to be known from its name. */
  readonly bigint: bigint | undefined;
}

/** An advisory lock that is held or waited for under no name. */
export interface Bare {
  readonly session: string;
  readonly application: string;
  /** As pg_locks has it: one number, or two. */
  readonly number: bigint | readonly [number, number];
}

export interface InUse {
  readonly used: readonly Used[];
  readonly bare: readonly Bare[];
}

/** More of a table than this is not listed. */
const most = 10_000;

export async function inUse(server: Server): Promise<InUse> {
  const seen = await look(server);
  const { used, bare } = fromLocks(seen, server.schema);
  const rows = await fromTables(server);
  return { used: [...used, ...rows], bare };
}

function fromLocks({ entries }: Look, schema: string): { used: Used[]; bare: Bare[] } {
  const used: Used[] = [];
  const bare: Bare[] = [];
  for (const { kind, name, session } of entries) {
    if (kind !== "advisory" && kind !== "lock row") continue;
    const number = /(?:^| \()bigint (-?\d+)\)?$/.exec(name)?.[1];
    const two = /(?:^| \()int (-?\d+),(-?\d+)\)?$/.exec(name);
    const plain = plainName(name);
    if (number !== undefined && plain !== name)
      used.push({ name: plain, place: "lock", bigint: BigInt(number) });
    else if (number !== undefined) bare.push({ ...who(session), number: BigInt(number) });
    else if (two) bare.push({ ...who(session), number: [Number(two[1]), Number(two[2])] });
    else used.push({ name: plain, place: "lock", bigint: idOf(plain, schema) });
  }
  return { used, bare };
}

function who({ id, application }: { id: string; application: string }) {
  return { session: id, application };
}

/** If the name can be read in one way only. */
function idOf(name: string, schema: string): bigint | undefined {
  const [only, ...others] = name === "" || name.includes("?") || name.endsWith("...") ? [] : readings(name);
  return only && others.length === 0 ? hashOf(only, schema) : undefined;
}

const ofId = /^(?:(?:lease|permit) )?n(-?\d+)$/;

async function fromTables(server: Server): Promise<Used[]> {
  const { query, own } = server;
  const has = await tables(server);
  const found: Used[] = [];
  const add = (rows: readonly Row[], place: Place): void => {
    for (const row of rows) {
      const id = ofId.exec(text(row["id"]))?.[1];
      const name = text(row["name"]);
      found.push({ name, place, bigint: id === undefined ? undefined : BigInt(id) });
    }
  };
  const ask = (columns: string, table: string) => query(`SELECT ${columns} FROM ${own(table)} LIMIT ${most}`);
  if (has.has("lock")) add(await ask("id, name", "lock"), "lock row");
  if (has.has("lease"))
    add(await query(`SELECT DISTINCT resource AS id, name FROM ${own("lease")} LIMIT ${most}`), "lease");
  if (has.has("queue")) add(await ask("'' AS id, name", "queue"), "queue");
  if (has.has("schedule")) add(await ask("'' AS id, name", "schedule"), "schedule");
  return found;
}

/** A column of bytes, or text. */
function text(value: unknown): string {
  return value instanceof Uint8Array ? Buffer.from(value).toString() : String(value ?? "");
}

/** Those of Holdfast that are there, and may be read. */
async function tables({ kind, query, schema }: Server): Promise<Set<string>> {
  const rows =
    kind === "postgres"
      ? await query(
          `SELECT c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
          WHERE n.nspname = $1 AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')`,
          [schema],
        )
      : kind === "sqlite"
        ? await query("SELECT name AS name FROM sqlite_schema WHERE type = 'table'")
        : await query(
            "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE()",
          );
  const names = rows.map(({ name }) => text(name));
  if (kind === "postgres") return new Set(names);
  const prefix = `${schema}_`;
  return new Set(names.filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length)));
}

/** The first part of a key, as far as it can be told from its name. */
export function namespaceOf(name: string): string {
  return name.split(":")[0] ?? name;
}

export interface Collision {
  readonly bigint: string;
  /** Different names of one number. */
  readonly names: readonly string[];
  /** Sessions that hold or want the number, or the two halves of it, under no name. */
  readonly bare: readonly (Bare & { readonly same: boolean })[];
}

export function collisions({ used, bare }: InUse): Collision[] {
  const found: Collision[] = [];
  const byNumber = Map.groupBy(
    used.filter(({ bigint }) => bigint !== undefined),
    ({ bigint }) => bigint as bigint,
  );
  for (const [number, entries] of byNumber) {
    const names = [...new Set(entries.map(({ name }) => name).filter((name) => name !== ""))];
    const others = bare.flatMap((each) => {
      if (typeof each.number === "bigint") return each.number === number ? [{ ...each, same: true }] : [];
      // PostgreSQL keeps the two kinds apart, though pg_locks shows them in the same columns.
      const [a, b] = each.number;
      const joined = BigInt.asIntN(
        64,
        (BigInt.asUintN(32, BigInt(a)) << 32n) | BigInt.asUintN(32, BigInt(b)),
      );
      return joined === number ? [{ ...each, same: false }] : [];
    });
    if (names.length > 1 || others.length > 0) found.push({ bigint: String(number), names, bare: others });
  }
  return found;
}

/** Every key that these names can be read as, for looking one up by its number. */
export function candidates(names: Iterable<string>, schema: string): Map<bigint, ReturnType<typeof key>> {
  const found = new Map<bigint, ReturnType<typeof key>>();
  for (const name of names) {
    if (name === "" || !name.isWellFormed()) continue;
    for (const each of readings(name))
      if (!found.has(hashOf(each, schema))) found.set(hashOf(each, schema), each);
  }
  return found;
}
