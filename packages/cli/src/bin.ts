#!/usr/bin/env node
// Nothing else is imported before this is known: an older Node may not even be able to read the rest.
import { tooOld } from "./node-version.ts";

const why = tooOld();
if (why === undefined) await (await import("./program.ts")).run();
else {
  console.error(`holdfast: ${why}`);
  process.exitCode = 2;
}
