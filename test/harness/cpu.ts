/** How much of the processors each file of tests took, its processes included, and not the servers: for the tally. */
import { readFileSync } from "node:fs";
import { afterAll } from "vitest";

declare module "vitest" {
  interface TaskMeta {
    cpuSeconds?: number;
  }
}

const ticksPerSecond = 100;

// Of a file that comes first, so that it runs after the last of the others' hooks.
// oxlint-disable-next-line no-empty-pattern -- vitest reads from it which fixtures are wanted.
afterAll(({}, file) => {
  file.meta.cpuSeconds = cpuSeconds();
});

function cpuSeconds(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6 + ofChildren();
}

/** Of those that have ended, and theirs: Node does not tell. */
function ofChildren(): number {
  try {
    // After the name, which may hold anything: state is field 3, cutime and cstime are 16 and 17.
    const fields = readFileSync("/proc/self/stat", "utf8").split(") ").at(-1)?.split(" ") ?? [];
    return (Number(fields[13]) + Number(fields[14])) / ticksPerSecond;
  } catch {
    return 0;
  }
}
