/**
 * `npm run pack`: what would be published, as files that npm can install: `packed/holdfast.tgz` and `packed/holdfast-cli.tgz`. Both
 * are built in a copy, so that nothing that was built before gets into them.
 */
import { execFileSync } from "node:child_process";
import {
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  realpathSync,
  renameSync,
  rmSync,
  symlinkSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));

/** In the order in which they are built. */
export const packages = { holdfast: "holdfast.tgz", cli: "holdfast-cli.tgz" } as const;
export type PackageName = keyof typeof packages;

/** Returns where the tarballs are, under names without a version. */
export function pack(names: readonly PackageName[], into: string): string[] {
  const copy = realpathSync(mkdtempSync(join(tmpdir(), "holdfast-pack-")));
  const run = (folder: string, command: string, ...args: string[]): string =>
    execFileSync(command, args, { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", 2] });
  try {
    copyFileSync(join(root, "tsconfig.base.json"), join(copy, "tsconfig.base.json"));
    modules(join(root, "node_modules"), join(copy, "node_modules"), ["holdfast", "@holdfast"]);
    symlinkSync(join(copy, "packages/holdfast"), join(copy, "node_modules/holdfast"));
    mkdirSync(into, { recursive: true });
    return names.map((name) => {
      const [from, to] = [join(root, "packages", name), join(copy, "packages", name)];
      mkdirSync(to, { recursive: true });
      for (const entry of readdirSync(from))
        if (entry !== "dist" && entry !== "node_modules" && !entry.endsWith(".tgz"))
          cpSync(join(from, entry), join(to, entry), { recursive: true });
      // What npm could not put where everybody finds it.
      if (existsSync(join(from, "node_modules")))
        symlinkSync(join(from, "node_modules"), join(to, "node_modules"));
      run(to, join(root, "node_modules/.bin/tsc"), "-p", ".");
      const [packed] = JSON.parse(run(to, "npm", "pack", "--json", "--offline", "--silent")) as [
        { filename: string },
      ];
      const file = join(into, packages[name]);
      cpSync(join(to, packed.filename), `${file}.new`);
      renameSync(`${file}.new`, file);
      return file;
    });
  } finally {
    rmSync(copy, { recursive: true, force: true });
  }
}

/** Links to everything that is installed, but for these. */
function modules(from: string, to: string, without: readonly string[]): void {
  mkdirSync(to, { recursive: true });
  for (const name of readdirSync(from))
    if (!without.includes(name)) symlinkSync(join(from, name), join(to, name));
}

if (import.meta.main) {
  const files = pack(["holdfast", "cli"], join(root, "packed"));
  const shown = files.map((file) => relative(process.cwd(), file));
  console.log(shown.join("\n"));
  console.log(`\nIn your project:\n  npm install ${files.join(" ")}`);
}
