/** The file, and where it lies. */
import { accessSync, constants, statfsSync } from "node:fs";
import { endianness } from "node:os";
import { dirname } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { type FileWriter, writersOf } from "../../locks/file.ts";
import type { Check } from "../check.ts";
import type { SqlitePatient } from "./patient.ts";

type SqliteCheck = Check<SqlitePatient>;

const version: SqliteCheck = {
  id: "version",
  title: "SQLite is older than 3.38 (of this command; the application brings its own)",
  async run(patient) {
    const [major = 0, minor = 0] = patient.version.split(".").map(Number);
    if (major > 3 || (major === 3 && minor >= 38)) return [];
    return [
      {
        severity: "error",
        what: `SQLite is ${patient.version}`,
        why: "Holdfast refuses it: UPDATE … RETURNING and its fixes are newer.",
        fix: "npm install better-sqlite3@latest   # or a newer Node.js, whose own is newer",
      },
    ];
  },
};

const journalMode: SqliteCheck = {
  id: "journal-mode",
  title: "the journal is not a write-ahead log",
  async run(patient) {
    const [row] = await patient.look("PRAGMA journal_mode");
    const mode = String(row?.["journal_mode"]);
    if (mode === "wal") return [];
    return [
      {
        severity: "warning",
        what: `journal_mode is ${mode}`,
        why: "Readers keep the writer from committing, and the writer keeps readers out: both fail with SQLITE_BUSY where they need not.",
        fix: "PRAGMA journal_mode = WAL;   -- once: it is kept in the file",
      },
    ];
  },
};

/** https://man7.org/linux/man-pages/man2/statfs.2.html; others have other numbers, which are not guessed. */
const networks: ReadonlyMap<number, string> = new Map([
  [0x6969, "NFS"],
  [0xff534d42, "CIFS"],
  [0xfe534d42, "SMB"],
  [0x517b, "SMB"],
  [0x01021997, "9P"],
  [0x5346414f, "AFS"],
  [0x00c36400, "Ceph"],
  [0x0bd00bd0, "Lustre"],
  [0x01161970, "GFS2"],
]);

const networkFile: SqliteCheck = {
  id: "network-file",
  title: "the file is on a network file system (seen on Linux)",
  async run({ file }) {
    if (process.platform !== "linux") return [];
    const kind = networks.get(statfsSync(file).type);
    if (kind === undefined) return [];
    return [
      {
        severity: "error",
        what: `${file} is on ${kind}`,
        why: "Its locks do not work reliably there: two machines can both be the writer, which damages the file.",
        fix: "Move the file to a disk of the machine, with all its processes; or use a server for several machines.",
      },
    ];
  },
};

const readOnly: SqliteCheck = {
  id: "replica",
  title: "the file, or its folder, cannot be written to",
  async run({ file }) {
    const closed = [file, dirname(file)].filter((path) => {
      try {
        accessSync(path, constants.W_OK);
        return false;
      } catch {
        return true;
      }
    });
    return closed.map((path) => ({
      severity: "error" as const,
      what: `${path} cannot be written to by this user`,
      why: "A lock here is being the file's writer; the journal lies in the same folder. Every lock fails.",
      fix: `chmod u+w '${path.replaceAll("'", "'\\''")}'`,
    }));
  },
};

/** As much as is written until SQLite folds it in by itself is 4 MB, unless the application says otherwise. */
const mostPending = 16 * 2 ** 20;

/**
 * Bytes of the write-ahead log that are not in the file yet, as the log's index says (`WalIndexHdr` and `WalCkptInfo` in
 * https://sqlite.org/walformat.html). The log's own size tells nothing: it is used again, and not cut.
 */
function pendingIn(index: Buffer): number {
  const word = (at: number) => (endianness() === "LE" ? index.readUInt32LE(at) : index.readUInt32BE(at));
  const half = endianness() === "LE" ? index.readUInt16LE(14) : index.readUInt16BE(14);
  const pageSize = half === 1 ? 65_536 : half;
  const [frames, foldedIn] = [word(16), word(96)];
  return Math.max(0, frames - foldedIn) * pageSize;
}

const walSize: SqliteCheck = {
  id: "wal-size",
  title: "the write-ahead log has more than 16 MB that are not folded into the file",
  async run(patient) {
    const index = patient.head("-shm", 100);
    const pending = index.length < 100 ? 0 : pendingIn(index);
    if (pending <= mostPending) return [];
    return [
      {
        severity: "warning",
        what: `${Math.round(pending / 2 ** 20)} MB of ${patient.file}-wal are not in the file yet, which has ${Math.round(patient.size() / 2 ** 20)} MB`,
        why: "A reader that never ends its transaction keeps it from being folded in, or wal_autocheckpoint is 0: every read walks through it, and the lock is held longer and longer.",
        fix: "PRAGMA wal_checkpoint(TRUNCATE);   -- after ending the transaction that has been reading",
      },
    ];
  },
};

const freeSpace: SqliteCheck = {
  id: "queue-bloat",
  title: "more than half of the file (and 64 MB) is free space of deleted rows",
  async run(patient) {
    const [row] = await patient.look(
      "SELECT f.freelist_count AS free, c.page_count AS pages, s.page_size AS size FROM pragma_freelist_count f, pragma_page_count c, pragma_page_size s",
    );
    const [free, pages, size] = [row?.["free"], row?.["pages"], row?.["size"]].map(Number);
    if (free! * size! <= 64 * 2 ** 20 || free! * 2 <= pages!) return [];
    return [
      {
        severity: "hint",
        what: `${Math.round((free! * size!) / 2 ** 20)} MB of ${Math.round((pages! * size!) / 2 ** 20)} MB are free`,
        why: "A queue or a log was emptied. The space is used again, but a backup copies it.",
        fix: "VACUUM;   -- the file has no other writer meanwhile",
      },
    ];
  },
};

const patienceMs = 2000;

/** Becomes the writer for an instant and gives up again: nothing is written. */
const writer: SqliteCheck = {
  id: "waits",
  title: "somebody has been the file's writer for more than 2 seconds",
  async run(patient) {
    await using session = await patient.session();
    await session.query("PRAGMA busy_timeout = 0");
    const deadline = performance.now() + patienceMs;
    const seen = new Map<number, FileWriter>();
    for (;;) {
      try {
        await session.query("BEGIN IMMEDIATE");
        await session.query("ROLLBACK");
        return [];
      } catch (error) {
        if ((error as { errcode?: unknown }).errcode !== 5) throw error;
      }
      for (const each of writersOf(patient.file)) seen.set(each.pid, each);
      if (performance.now() > deadline) break;
      await sleep(10 + Math.random() * 20);
    }
    // The same one all the time; of several that take turns none is to blame.
    const [one, ...more] = seen.values();
    const only = one && more.length === 0 ? one : undefined;
    return [
      {
        severity: "error",
        what: only
          ? `process ${only.pid} (${only.command}) is the file's writer: nobody else could become it for ${patienceMs / 1000} s`
          : `nobody else could become the file's writer for ${patienceMs / 1000} s`,
        why: "A transaction is open and does nothing, or many writers leave no gap: everybody else waits, whatever its key is.",
        fix: only
          ? `kill ${only.pid}   # its transaction is rolled back, and everybody goes on`
          : `fuser -v '${patient.file.replaceAll("'", "'\\''")}'   # which processes have it open`,
      },
    ];
  },
};

export const fileChecks: readonly SqliteCheck[] = [
  writer,
  version,
  journalMode,
  networkFile,
  readOnly,
  walSize,
  freeSpace,
];
