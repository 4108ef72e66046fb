/** What an engine keeps of calls that are to happen once: the contract behind `once`, and what it is keyed by. */
import { hash } from "node:crypto";
import type { Connection } from "./database.ts";
import { UsageError } from "./errors.ts";
import { type Key, type KeyPart, key } from "./key.ts";

export interface KeptAnswer {
  /** Of what the call was given; empty if it was given nothing. */
  readonly fingerprint: string;
  /** JSON text; empty if the call returned nothing. */
  readonly result: string;
  readonly at: Date;
}

export interface Keep extends Omit<KeptAnswer, "at"> {
  readonly id: string;
  readonly keepMs: number;
  /**
   * When the message was made. The record lasts for `keepMs` from now or from then, whichever is later: so once the
   * record is gone, the message is older than that, also if the clock it was made by is ahead of the database's.
   */
  readonly issuedAt: Date | undefined;
}

/** A record with its times as the engine writes them. */
export interface KeptRecord {
  readonly id: string;
  readonly fingerprint: string;
  readonly result: string;
  readonly at: string;
  readonly until: string;
}

/** Calls run inside the transaction that does the work, with the id's lock held. Times are the database's. */
export interface Replay<C extends Connection> {
  /** `kept` undefined: it never happened, or longer ago than it is kept for. */
  find(connection: C, id: string): Promise<{ readonly kept: KeptAnswer | undefined; readonly now: Date }>;
  /** Takes the place of a record that has run out. False: there is one that has not. */
  keep(connection: C, entry: Keep): Promise<boolean>;
  /** Absent where several databases have no map, so that no record is routed elsewhere later. */
  readonly copies?: ReplayCopies<C>;
}

/** Records that are copied from one of several databases to others. */
export interface ReplayCopies<C extends Connection> {
  /** Those that have not run out, by id. */
  list(connection: C, after: string | undefined, most: number): Promise<readonly KeptRecord[]>;
  /** Adds records. Of two with one id the one stays that lasts longer. */
  add(connection: C, records: readonly KeptRecord[]): Promise<void>;
}

const namespace = "holdfast-once";

/** The lock of an id. */
export function idLock(parts: readonly KeyPart[]): Key {
  return key(namespace, ...parts);
}

/** The id as a key: what it is called in errors, and what its shard is chosen by. */
export function idKey([first, ...rest]: readonly KeyPart[]): Key {
  return key(String(first), ...rest);
}

/** What a lock is for, as the caller wrote it: the id, if it is the lock of one. */
export function asWritten(lock: Key): Key {
  return lock.parts[0] === namespace ? idKey(lock.parts.slice(1)) : lock;
}

/** Ids are read by people in the table, but an index entry has its limits: 2,704 bytes and less. */
const longestId = 400;

/** What an id is kept under. JSON keeps ["a", "b"] and ["a,b"] apart, and has a way to write NUL. */
export function idText({ parts }: Key): string {
  const text = JSON.stringify(parts);
  return Buffer.byteLength(text) <= longestId ? text : `sha256:${hash("sha256", text, "hex")}`;
}

/** The id as a key, of what it is kept under. Undefined: only its hash is. */
export function keyOfText(text: string): Key | undefined {
  return text.startsWith("sha256:") ? undefined : idKey(JSON.parse(text) as readonly string[]);
}

export function fingerprint(payload: unknown): string {
  return hash("sha256", json(payload, "payload", true), "hex");
}

/**
 * JSON text of a value that is JSON through and through. What JSON.stringify drops or changes (undefined, Date, Map,
 * NaN, …) is refused: it would come back as something else. `sorted`: equal values have equal texts.
 */
export function json(value: unknown, name: string, sorted = false): string {
  const above = new Set<object>();
  const write = (part: unknown, path: string): string => {
    if (part === null || typeof part === "string" || typeof part === "boolean" || Number.isFinite(part))
      return JSON.stringify(part);
    const list = Array.isArray(part);
    if (!(list || isPlain(part)) || above.has(part)) throw notJson(name, path, part);
    above.add(part);
    const text = list
      ? // Not `map`, which passes over holes.
        `[${Array.from(part, (item: unknown, i) => write(item, `${path}[${i}]`)).join()}]`
      : `{${(sorted ? Object.keys(part).toSorted() : Object.keys(part))
          .map((k) => `${JSON.stringify(k)}:${write(part[k], property(path, k))}`)
          .join()}}`;
    above.delete(part);
    return text;
  };
  return write(value, name);
}

/** Of any realm: its prototype is one that has none itself. */
function isPlain(value: unknown): value is Record<string, unknown> {
  if (typeof value !== "object" || value === null) return false;
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === null || Object.getPrototypeOf(prototype) === null;
}

function property(path: string, name: string): string {
  return /^[\p{L}_$][\p{L}\d_$]*$/u.test(name) ? `${path}.${name}` : `${path}[${JSON.stringify(name)}]`;
}

function notJson(name: string, path: string, value: unknown): UsageError {
  return new UsageError(
    `once: the ${name} must be JSON, so that it can be kept and compared, but ${path} is ${shown(value)}`,
  );
}

function shown(value: unknown): string {
  if (value instanceof Date) return "a Date: write it as text, e.g. with toISOString()";
  if (typeof value === "bigint") return "a bigint: write it as text";
  if (value === undefined) return "undefined: leave it out, or write null";
  if (typeof value === "number") return String(value);
  if (typeof value !== "object" || value === null) return `a ${typeof value}`;
  if (Array.isArray(value) || isPlain(value)) return "a part of itself";
  return `a ${value.constructor?.name || "thing of its own class"}: copy what is needed into a plain object`;
}
