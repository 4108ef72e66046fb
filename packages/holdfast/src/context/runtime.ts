import { UnsupportedError } from "../seam/errors.ts";

/** As `engines` in package.json has it. */
const least = [22, 13] as const;

/** Said at once and by name, and not by whatever an older Node turns out to lack. Other runtimes say which Node they are like. */
export function checkRuntime(): void {
  const version = (globalThis as { process?: { versions?: { node?: string } } }).process?.versions?.node;
  if (version === undefined) return;
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (major > least[0] || (major === least[0] && minor >= least[1])) return;
  throw new UnsupportedError(`Holdfast needs Node ${least.join(".")} or newer, and this is Node ${version}`);
}
