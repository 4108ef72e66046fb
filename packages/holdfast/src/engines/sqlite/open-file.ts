/**
 * Whether the file that a client has open is still the one at its path. In WAL mode SQLite does not notice that it was deleted or
 * replaced: a process would go on to lock and to write in a file that nobody else can open. Without WAL it notices before it writes
 * (SQLITE_READONLY_DBMOVED).
 */
import { fstatSync, readdirSync, statSync } from "node:fs";
import { resolve } from "node:path";
import { FileReplacedError } from "../../seam/errors.ts";

/** How often to look, at most: a look takes a few microseconds, and more on a slow file system. */
const lookMs = 1000;

interface Identity {
  readonly dev: number;
  readonly ino: number;
}

const gone = new Set(["ENOENT", "ENOTDIR"]);

/** Undefined: it cannot be told. */
function identityOf(path: string): Identity | "gone" | undefined {
  try {
    return statSync(path);
  } catch (error) {
    return gone.has(String((error as NodeJS.ErrnoException).code)) ? "gone" : undefined;
  }
}

const isSame = (a: Identity, b: Identity): boolean => a.ino === b.ino && a.dev === b.dev;

/** Whether this process has it open still. A client that has connected again has not. */
function isOpen(identity: Identity): boolean {
  try {
    return readdirSync("/dev/fd").some((fd) => {
      try {
        return isSame(fstatSync(Number(fd)), identity);
      } catch {
        // Closed meanwhile.
        return false;
      }
    });
  } catch {
    // Not on this system.
    return true;
  }
}

export class OpenFile {
  readonly path: string;
  #identity: Identity | undefined;
  #lookedAt: number;

  /** To be made when the client has opened the file. */
  constructor(path: string) {
    this.path = resolve(path);
    this.#lookedAt = performance.now();
    const found = identityOf(this.path);
    if (found !== "gone") this.#identity = found;
  }

  /** Throws if the file is not at its path any more. `now`: even if it was looked at a moment ago. */
  check(now = false): void {
    const at = performance.now();
    if (!now && at - this.#lookedAt < lookMs) return;
    const found = identityOf(this.path);
    const known = this.#identity;
    if (found !== undefined && known && (found === "gone" || !isSame(found, known)) && isOpen(known))
      throw new FileReplacedError(this.path, found === "gone");
    if (found !== undefined && found !== "gone") this.#identity = found;
    this.#lookedAt = at;
  }
}

const files = new WeakMap<object, OpenFile>();

/** Of one handle, from when it is first seen. */
export function openFileOf(handle: object, path: string): OpenFile {
  let file = files.get(handle);
  if (!file) files.set(handle, (file = new OpenFile(path)));
  return file;
}
