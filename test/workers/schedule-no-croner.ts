/** A program that has no croner. */
import { registerHooks } from "node:module";
import { nextRuns } from "holdfast/schedule";

export default async function noCroner(): Promise<{ every: number; cron: string }> {
  registerHooks({
    resolve(specifier, context, next) {
      if (specifier !== "croner") return next(specifier, context);
      throw Object.assign(new Error("Cannot find package 'croner'"), { code: "ERR_MODULE_NOT_FOUND" });
    },
  });
  const every = await nextRuns({ every: "15 minutes" }, 2);
  const cron = await nextRuns({ cron: "0 3 * * *" }).then(
    () => "it was there",
    (error: Error & { code?: string }) => `${error.code} ${error.message}`,
  );
  return { every: every.length, cron };
}
