/** What a server's processes have used of the processors, by what Linux counts: 100 ticks a second. */
import { readFileSync, readdirSync } from "node:fs";

const tickMs = 10;

interface Process {
  readonly pid: number;
  readonly parent: number;
  /** Of its own, and of its children that have ended. */
  readonly ticks: number;
}

function processOf(pid: number): Process | undefined {
  let text: string;
  try {
    text = readFileSync(`/proc/${pid}/stat`, "utf8");
  } catch {
    // It has ended.
    return undefined;
  }
  // A name may have spaces and brackets in it; what follows its last bracket is numbered from the state on.
  const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
  const ticks = fields.slice(11, 15).reduce((sum, each) => sum + Number(each), 0);
  return { pid, parent: Number(fields[1]), ticks };
}

/** Milliseconds, of a process and all below it. */
export function cpuMs(root: number): number {
  const all = readdirSync("/proc")
    .filter((name) => /^\d+$/.test(name))
    .flatMap((name) => processOf(Number(name)) ?? []);
  const children = Map.groupBy(all, ({ parent }) => parent);
  const below = (pid: number): number =>
    (children.get(pid) ?? []).reduce((sum, child) => sum + child.ticks + below(child.pid), 0);
  return ((all.find(({ pid }) => pid === root)?.ticks ?? 0) + below(root)) * tickMs;
}
