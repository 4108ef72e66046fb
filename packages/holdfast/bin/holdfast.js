#!/usr/bin/env node
// The command lives in a package of its own, so that applications don't install what only people use.
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

// The project's own first: with a linked or a global library, the one beside it may be another version.
const places = [pathToFileURL(join(process.cwd(), "package.json")), import.meta.url];

function find() {
  for (const place of places) {
    try {
      const file = createRequire(place).resolve("@holdfast/cli/bin");
      if (existsSync(file)) return file;
    } catch {
      // Not installed there, or one that is too old to be called like this.
    }
  }
  return undefined;
}

const file = find();
if (file === undefined) {
  console.error(
    "The holdfast command is in another package: npm install --save-dev @holdfast/cli (or, without installing: npx @holdfast/cli demo)",
  );
  process.exitCode = 2;
} else {
  await import(pathToFileURL(file).href);
}
