/**
 * The library's sources in few files, for the processes that tests start: a process that loads 240 modules is busy for
 * 0.4 s before it does anything, with these for 0.1 s, and a run starts thousands of them.
 */
import { mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { entries, folder } from "./bundled.ts";

const library = fileURLToPath(new URL("../../packages/holdfast/", import.meta.url));
/** By where this one is, the library knows its own frames in a stack. */
const selfFile = "context/self.js";

export async function bundleLibrary(): Promise<void> {
  const sources = entries().map(({ source }) => join(library, source));
  const common = {
    write: false,
    format: "esm",
    platform: "node",
    target: "node22",
    logLevel: "silent",
  } as const;
  const apart = await build({
    ...common,
    entryPoints: [join(library, "src/context/self.ts")],
    outfile: join(folder, selfFile),
  });
  const parts = await build({
    ...common,
    entryPoints: sources,
    outdir: folder,
    outbase: join(library, "src"),
    bundle: true,
    splitting: true,
    packages: "external",
    plugins: [
      {
        name: "self",
        setup({ onResolve }) {
          onResolve({ filter: /\/self\.ts$/ }, () => ({ path: join(folder, selfFile), external: true }));
        },
      },
    ],
  });
  for (const { path, contents } of [...apart.outputFiles, ...parts.outputFiles]) replace(path, contents);
}

/** Whole, or not at all: another run may be reading it. What is the same stays, and so does what Node has compiled of it. */
function replace(path: string, contents: Uint8Array): void {
  try {
    if (readFileSync(path).equals(contents)) return;
  } catch {
    mkdirSync(dirname(path), { recursive: true });
  }
  const draft = join(folder, `${relative(folder, path).replaceAll("/", "-")}.${process.pid}`);
  writeFileSync(draft, contents);
  renameSync(draft, path);
}
