/** Which process writes to a file that is a database: Linux lists locks of files with whoever has them. */
import { readFileSync, statSync } from "node:fs";
import { fit } from "../terminal.ts";
import { withoutAddresses } from "../url.ts";

export interface FileWriter {
  readonly pid: number;
  /** The program, and its first argument. */
  readonly command: string;
}

/** Of the write-ahead log's index (WAL_WRITE_LOCK), and of the file itself without it (RESERVED). https://sqlite.org/fileformat2.html */
const writersByte = { "-shm": 120, "": 0x40000001 };

/** None: nobody, or the system does not tell. Not this process. */
export function writersOf(path: string): FileWriter[] {
  const bytes = new Map<number, number>();
  for (const [suffix, byte] of Object.entries(writersByte)) {
    const inode = statSync(`${path}${suffix}`, { throwIfNoEntry: false })?.ino;
    if (inode !== undefined) bytes.set(inode, byte);
  }
  const pids = locks().flatMap(({ mode, pid, inode, from, to }) => {
    const byte = bytes.get(inode);
    return mode === "WRITE" && byte !== undefined && from <= byte && byte <= to && pid > 0 ? [pid] : [];
  });
  return [...new Set(pids)]
    .filter((pid) => pid !== process.pid)
    .map((pid) => ({ pid, command: commandOf(pid) }));
}

/** "1: POSIX  ADVISORY  WRITE 4711 08:01:1234 120 120". */
function locks() {
  let text: string;
  try {
    text = readFileSync("/proc/locks", "utf8");
  } catch {
    return [];
  }
  return text.split("\n").flatMap((line) => {
    const [, , , mode, pid, file, from, to] = line.trim().replace("-> ", "").split(/\s+/);
    if (file === undefined) return [];
    const end = to === "EOF" ? Infinity : Number(to);
    return { mode, pid: Number(pid), inode: Number(file.split(":")[2]), from: Number(from), to: end };
  });
}

/** Enough to know it by. */
const longest = 120;

function commandOf(pid: number): string {
  try {
    const [program = "", ...args] = readFileSync(`/proc/${pid}/cmdline`, "utf8").split("\0");
    // A program's own arguments may hold passwords.
    const script = args.find((each) => !each.startsWith("-")) ?? "";
    return fit(withoutAddresses(`${program} ${script}`.replaceAll(/\s+/g, " ").trim()), longest);
  } catch {
    return "";
  }
}
