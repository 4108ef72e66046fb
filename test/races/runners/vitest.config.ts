/** Vitest as it comes, with its own 5 s for a test. */
import { defineConfig } from "vitest/config";

const conditions = ["holdfast-source", "module", "node", "development|production"];

export default defineConfig({
  ssr: { resolve: { conditions, externalConditions: ["holdfast-source", "node", "module-sync"] } },
  test: {
    root: import.meta.dirname,
    include: ["*.spec.ts"],
    pool: "forks",
    execArgv: ["--conditions=holdfast-source"],
  },
});
