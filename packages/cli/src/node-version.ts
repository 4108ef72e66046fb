/** Written for any Node that knows modules: it is what tells people that theirs is too old. */
import { readFileSync } from "node:fs";

/** What to say to whoever runs a Node that is older than what package.json asks for. */
export function tooOld(): string | undefined {
  const { engines } = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8")) as {
    engines: { node: string };
  };
  const needed = engines.node.replace(">=", "");
  const here = process.versions.node;
  return isBelow(here, needed)
    ? `Node ${needed} or newer is needed, and this is Node ${here} (${process.execPath}).`
    : undefined;
}

function isBelow(version: string, least: string): boolean {
  const [major = 0, minor = 0] = version.split(".").map(Number);
  const [leastMajor = 0, leastMinor = 0] = least.split(".").map(Number);
  return major < leastMajor || (major === leastMajor && minor < leastMinor);
}
