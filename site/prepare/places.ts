/** Where files of the repository are found, and where they are in the site. */
import { existsSync, mkdirSync, readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

export const root = fileURLToPath(new URL("../../", import.meta.url));
const pages = join(root, "site", "pages");

export const read = (path: string): string => readFileSync(join(root, path), "utf8");

/** A page, or a file that pages show. The same text is not written again: who serves the site would load it again. */
export function write(path: string, text: string | Uint8Array): void {
  const file = join(pages, path);
  mkdirSync(dirname(file), { recursive: true });
  const old = existsSync(file) ? readFileSync(file) : undefined;
  if (!old?.equals(Buffer.from(text))) writeFileSync(file, text);
  written.add(file);
}

const written = new Set<string>();

/** Pages of before, whose source is gone. */
export function stale(): string[] {
  return readdirSync(pages, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name))
    .filter((file) => !written.has(file));
}

/** Files below a folder of the repository, by their paths in it. */
export function filesIn(folder: string, ending = ""): string[] {
  return readdirSync(join(root, folder), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith(ending))
    .map((entry) => relative(root, join(entry.parentPath, entry.name)))
    .filter((path) => !/(^|\/)(node_modules|generated)\//.test(path))
    .toSorted();
}

const isFolder = (path: string) => statSync(join(root, path)).isDirectory();

/** Pages that are made of files beside docs/. */
const others: Record<string, string> = {
  "README.md": "/index.md",
  "packages/holdfast/README.md": "/index.md",
  "packages/cli/README.md": "/command.md",
  "CHANGELOG.md": "/changelog.md",
  "CONTRIBUTING.md": "/contributing.md",
  "examples/README.md": "/examples/index.md",
  examples: "/examples/index.md",
};

/** The page of a file of the repository; undefined if it has none. A file that is not there is a dead link. */
export function pageOf(path: string): string | undefined {
  if (!existsSync(join(root, path))) throw new Error(`There is no ${path}`);
  const other = others[path];
  if (other !== undefined) return other;
  const [, example] = /^examples\/([^/.]+)(?:\/|$)/.exec(path) ?? [];
  if (example !== undefined) return `/examples/${example}.md`;
  if (!path.startsWith("docs/")) return undefined;
  const inside = path.slice("docs".length);
  return isFolder(path) ? `${inside.replace(/\/$/, "")}/index.md` : inside;
}
