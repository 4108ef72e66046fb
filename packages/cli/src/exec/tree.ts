/** Everything that a command has started, also what has gone into a session of its own, or lost its parent. */
import { spawnSync } from "node:child_process";
import { readFileSync, readdirSync } from "node:fs";

/** Says of a process, and of all that it starts with its environment, under which `holdfast exec` it runs. */
export const markName = "HOLDFAST_EXEC_ID";

export interface RunningProcess {
  readonly pid: number;
  readonly parent: number;
  readonly group: number;
  /** Tells it from a later one that has its number. Empty where the system does not say. */
  readonly started: string;
  readonly marked: boolean;
}

export class ProcessTree {
  readonly #root: number;
  readonly #mark: string;
  /** Those that were found once stay: what a parent has left behind, without its environment, could not be found again. */
  #found: readonly RunningProcess[] = [];

  constructor(root: number, mark: string) {
    this.#root = root;
    this.#mark = mark;
  }

  /** Those that run now. */
  look(): readonly RunningProcess[] {
    const all = running(this.#mark);
    const known = new Set(this.#found.map(({ pid, started }) => `${pid} ${started}`));
    const tree = all.filter(
      ({ pid, group, started, marked }) =>
        marked || pid === this.#root || group === this.#root || known.has(`${pid} ${started}`),
    );
    const pids = new Set(tree.map(({ pid }) => pid));
    // Grows while it is gone through.
    for (const { pid } of tree)
      for (const child of all)
        if (child.parent === pid && !pids.has(child.pid)) {
          pids.add(child.pid);
          tree.push(child);
        }
    this.#found = tree;
    return tree;
  }
}

/** Without those that have ended, and that nobody has waited for. */
function running(mark: string): RunningProcess[] {
  return process.platform === "linux" ? fromProc(mark) : fromPs(mark);
}

function fromProc(mark: string): RunningProcess[] {
  return readdirSync("/proc")
    .filter((name) => /^\d+$/.test(name))
    .flatMap((name) => {
      try {
        const stat = readFileSync(`/proc/${name}/stat`, "utf8");
        // Its name, in parentheses, may be anything.
        const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
        const [state = "", parent, group] = fields;
        if (state === "Z" || state === "X") return [];
        return {
          pid: Number(name),
          parent: Number(parent),
          group: Number(group),
          started: fields[19] ?? "",
          marked: isMarked(name, mark),
        };
      } catch {
        // It has ended meanwhile.
        return [];
      }
    });
}

function isMarked(pid: string, mark: string): boolean {
  try {
    return readFileSync(`/proc/${pid}/environ`, "utf8")
      .split("\0")
      .some((each) => each.startsWith(`${markName}=`) && each.includes(mark));
  } catch {
    // Another user's.
    return false;
  }
}

/** `-E` shows the environment behind the command, on macOS and the BSDs. */
function fromPs(mark: string): RunningProcess[] {
  const { stdout } = spawnSync("ps", ["-A", "-E", "-o", "pid=,ppid=,pgid=,stat=,command="], {
    encoding: "utf8",
  });
  return (stdout ?? "").split("\n").flatMap((line) => {
    const [pid, parent, group, state = "Z"] = line.trim().split(/\s+/);
    if (state.startsWith("Z")) return [];
    return {
      pid: Number(pid),
      parent: Number(parent),
      group: Number(group),
      started: "",
      marked: line.includes(mark),
    };
  });
}
