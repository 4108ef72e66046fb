/** `--import` this, and `holdfast` is the bundle that was made of the sources when the run began. */
import { readFileSync } from "node:fs";
import { registerHooks } from "node:module";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

export const folder = fileURLToPath(new URL("../../node_modules/.cache/holdfast-bundle/", import.meta.url));

const source = "--conditions=holdfast-source";

/** Arguments of Node for a process of the tests. Without a protection of the library (a mutant), it is its sources that run. */
export const bundled: readonly string[] = process.env["HOLDFAST_MUTANT"]
  ? [source]
  : [source, `--import=${import.meta.url}`];

/** What is exported by a name. */
export function entries(): readonly { readonly name: string; readonly source: string }[] {
  const manifest = JSON.parse(
    readFileSync(new URL("../../packages/holdfast/package.json", import.meta.url), "utf8"),
  ) as { exports: Record<string, string | { readonly "holdfast-source": string }> };
  return Object.entries(manifest.exports).flatMap(([name, target]) =>
    typeof target === "string"
      ? []
      : [{ name: name.replace(".", "holdfast"), source: target["holdfast-source"] }],
  );
}

if (process.execArgv.some((each) => each === `--import=${import.meta.url}`)) {
  const urls = new Map(
    entries().map(({ name, source }) => {
      const file = join(folder, source.replace("./src/", "").replace(/\.ts$/, ".js"));
      return [name, pathToFileURL(file).href];
    }),
  );
  registerHooks({
    resolve(specifier, context, next) {
      const url = urls.get(specifier);
      return url === undefined ? next(specifier, context) : { url, format: "module", shortCircuit: true };
    },
  });
}
