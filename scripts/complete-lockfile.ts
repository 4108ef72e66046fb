/**
 * Adds to package-lock.json the optional packages of other platforms that the registry in use does not have: npm
 * leaves them out of the file it writes, and then `npm ci` refuses that file. Run it after `npm install`.
 */
import { readFileSync, writeFileSync } from "node:fs";

interface Entry {
  version?: string;
  os?: string[];
  cpu?: string[];
  dev?: boolean;
  optional?: boolean;
  optionalDependencies?: Record<string, string>;
}

const file = new URL("../package-lock.json", import.meta.url);
const lock: { packages: Record<string, Entry> } = JSON.parse(readFileSync(file, "utf8"));
const systems = [
  "linux",
  "darwin",
  "win32",
  "freebsd",
  "android",
  "openharmony",
  "wasi",
  "sunos",
  "netbsd",
  "openbsd",
  "aix",
];
const processors = ["arm64", "x64", "arm", "ia32", "ppc64", "riscv64", "s390x", "wasm32", "loong64"];
/** Names of their own that some packages give to these. */
const aliases: Record<string, string> = { windows: "win32", "64": "x64" };
const found = (words: string[], name: string) => {
  const parts = name.split(/[-/]/).map((part) => aliases[part] ?? part);
  return words.filter((word) => parts.includes(word)).slice(0, 1);
};

let added = 0;
for (const { optionalDependencies = {}, dev } of Object.values(lock.packages)) {
  for (const [name, version] of Object.entries(optionalDependencies)) {
    const place = `node_modules/${name}`;
    const system = found(systems, name);
    if (lock.packages[place] || system.length === 0 || !/^\d/.test(version)) continue;
    lock.packages[place] = {
      version,
      cpu: found(processors, name),
      ...(dev && { dev }),
      optional: true,
      os: system,
    };
    added++;
  }
}
const sorted = Object.entries(lock.packages).toSorted(([a], [b]) => (a < b ? -1 : 1));
writeFileSync(file, `${JSON.stringify({ ...lock, packages: Object.fromEntries(sorted) }, undefined, 2)}\n`);
console.log(`${added} added`);
