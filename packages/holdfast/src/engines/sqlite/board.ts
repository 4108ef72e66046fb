/**
 * Which keys the writer of a file has locked, for others to read. The file's own lock says that somebody writes, not
 * what for. It is what excludes; a notice that is missing or late only changes what somebody is told who was refused.
 *
 * Each process has a file of its own beside the database, `<database>-holdfast/<id>.keys`, which it changes with one
 * write of 2 µs, and a lock that the operating system takes from it when it dies: that of SQLite on `<id>.lock`. A
 * process number would mean nothing in another container on the same volume.
 */
import { randomUUID } from "node:crypto";
import {
  chmodSync,
  chownSync,
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readFileSync,
  readdirSync,
  rmSync,
  rmdirSync,
  statSync,
  writeSync,
} from "node:fs";
import { join } from "node:path";
import type { DatabaseSync } from "node:sqlite";
import { builtinSqlite } from "./builtin.ts";

/** Handles that are not the application's. */
export const unseen = new WeakSet<object>();

interface BoardEntry {
  readonly ids: Set<string>;
  /** Of a transaction whose end is not told to us. */
  readonly holds: (() => boolean) | undefined;
}

/** What this process has beside the database. */
interface Place {
  readonly fd: number;
  readonly lock: DatabaseSync;
  readonly folder: string;
  readonly id: string;
}

/** How often to look whether a transaction that is not ours has ended. */
const lookMs = 20;
/** Whoever makes a lock's file holds the lock soon after. */
const orphanMs = 60_000;

export class Board {
  readonly #folder: string;
  readonly #file: string;
  readonly #entries = new Map<object, BoardEntry>();
  #place: Place | undefined;
  /** A folder that cannot be written to, or a runtime without node:sqlite: what is locked is known in this process alone. */
  #closed = false;
  #written = "[]";
  #timer: NodeJS.Timeout | undefined;
  #later: NodeJS.Immediate | undefined;

  constructor(file: string) {
    this.#file = file;
    this.#folder = `${file}-holdfast`;
  }

  /** Until `owner` is cleared, or `holds` says no. */
  publish(owner: object, ids: readonly string[], holds?: () => boolean): void {
    if (ids.length === 0) return;
    const before = this.#entries.get(owner);
    this.#entries.set(owner, { ids: new Set([...(before?.ids ?? []), ...ids]), holds });
    this.#write();
    if (holds) this.#timer ??= setInterval(() => this.#look(), lookMs).unref();
  }

  /** Written a moment later: the next transaction of this process writes anyway. */
  clear(owner: object): void {
    if (this.#entries.delete(owner)) this.#later ??= setImmediate(() => this.#write());
  }

  /** Whether one of these keys is known to be locked. */
  taken(ids: readonly string[]): boolean {
    this.#look();
    for (const entry of this.#entries.values()) if (ids.some((id) => entry.ids.has(id))) return true;
    return listed(this.#folder, this.#place?.id, ".keys").some((id) => {
      const held = read(join(this.#folder, `${id}.keys`));
      return ids.some((each) => held.has(each)) && isAlive(this.#folder, id);
    });
  }

  #look(): void {
    let joined = false;
    for (const [owner, { holds }] of this.#entries) {
      if (!holds) continue;
      if (holds()) joined = true;
      else this.clear(owner);
    }
    if (joined) return;
    clearInterval(this.#timer);
    this.#timer = undefined;
  }

  #write(): void {
    clearImmediate(this.#later);
    this.#later = undefined;
    const text = JSON.stringify([...this.#entries.values()].flatMap(({ ids }) => [...ids]));
    if (text === this.#written || this.#closed) return;
    try {
      this.#place ??= this.#open();
      // In one call, ended by a line feed: what is left of a longer text counts for nothing.
      writeSync(this.#place.fd, `${text}\n`, 0);
      this.#written = text;
    } catch {
      this.#closed = true;
      if (this.#place) leave(this.#place);
    }
  }

  #open(): Place {
    // As SQLite does it with the files that it makes beside the database: who may write to that may write to these.
    const { mode, uid, gid } = statSync(this.#file);
    const like = (path: string, bits: number) => {
      chmodSync(path, bits & 0o777);
      tolerant(() => chownSync(path, uid, gid));
    };
    if (mkdirSync(this.#folder, { recursive: true })) like(this.#folder, mode | ((mode & 0o444) >> 2));
    const id = randomUUID();
    const [keys, locked] = [join(this.#folder, `${id}.keys`), join(this.#folder, `${id}.lock`)];
    // The lock first: what has none is taken for the rest of somebody who died.
    const lock = handle(locked);
    lock.exec("PRAGMA journal_mode = MEMORY");
    lock.exec("BEGIN EXCLUSIVE");
    const fd = openSync(keys, "w");
    for (const path of [locked, keys]) like(path, mode);
    const place = { fd, lock, folder: this.#folder, id };
    keep(this, place);
    sweep(this.#folder, id);
    return place;
  }
}

/** Ids of all processes but this one. */
function listed(folder: string, own: string | undefined, end: ".keys" | ".lock"): string[] {
  try {
    const ids = readdirSync(folder).flatMap((name) =>
      name.endsWith(end) ? [name.slice(0, -end.length)] : [],
    );
    return ids.filter((id) => id !== own);
  } catch {
    return [];
  }
}

function tolerant(work: () => void): void {
  try {
    work();
  } catch {
    // It stays as it is.
  }
}

function handle(file: string, readOnly = false): DatabaseSync {
  const { DatabaseSync: Handle } = builtinSqlite() as typeof import("node:sqlite");
  const made = new Handle(file, { readOnly });
  unseen.add(made);
  return made;
}

/** Keys in a file of another process; none if it is being written this very moment. */
function read(file: string): Set<string> {
  try {
    const text = readFileSync(file, "utf8");
    return new Set(JSON.parse(text.slice(0, text.indexOf("\n"))) as string[]);
  } catch {
    return new Set();
  }
}

/** Reading what somebody has locked exclusively fails; and those who try do not disturb one another. */
function isAlive(folder: string, id: string): boolean {
  const file = join(folder, `${id}.lock`);
  let lock: DatabaseSync | undefined;
  try {
    lock = handle(file, true);
    lock.exec("SELECT 1 FROM sqlite_schema");
  } catch (error) {
    if ((error as { errcode?: number }).errcode === 5) return true;
    // It may not be read by this user: nothing is known of it.
    if (existsSync(file)) return false;
  } finally {
    lock?.close();
  }
  remove(folder, id);
  return false;
}

function remove(folder: string, id: string): void {
  for (const kind of ["keys", "lock"]) tolerant(() => rmSync(join(folder, `${id}.${kind}`), { force: true }));
}

/** Removes what processes have left that were killed. */
function sweep(folder: string, own: string): void {
  for (const id of listed(folder, own, ".keys")) isAlive(folder, id);
  for (const id of listed(folder, own, ".lock"))
    tolerant(() => {
      if (Date.now() - statSync(join(folder, `${id}.lock`)).mtimeMs > orphanMs) isAlive(folder, id);
    });
}

function leave({ fd, lock, folder, id }: Place): void {
  places.delete(id);
  tolerant(() => closeSync(fd));
  tolerant(() => lock.close());
  remove(folder, id);
  // Unless others have something in it.
  tolerant(() => rmdirSync(folder));
}

const places = new Map<string, Place>();
const forgotten = new FinalizationRegistry<Place>(leave);
let listening = false;

function keep(board: Board, place: Place): void {
  if (!listening) process.once("exit", () => [...places.values()].forEach(leave));
  listening = true;
  places.set(place.id, place);
  forgotten.register(board, place);
}
