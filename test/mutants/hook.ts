/** Loaded before anything else (`node --import`): the library without the protection that HOLDFAST_MUTANT names. */
import { registerHooks } from "node:module";
import { file, without } from "./protections.ts";

const name = process.env["HOLDFAST_MUTANT"];

if (name)
  registerHooks({
    load(url, context, next) {
      const loaded = next(url, context);
      if (url !== file.href) return loaded;
      return { ...loaded, source: without(name, String(loaded.source)) };
    },
  });
