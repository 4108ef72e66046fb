import { defineConfig } from "vitest/config";

// Tests run the workspace's sources, not what was built last.
const source = "holdfast-source";

export default defineConfig({
  resolve: { conditions: [source, "module", "node", "development|production"] },
  ssr: {
    resolve: {
      conditions: [source, "module", "node", "development|production"],
      externalConditions: [source, "node", "module-sync"],
    },
  },
  test: {
    include: ["test/**/*.test.ts", "packages/*/src/**/*.test.ts"],
    globalSetup: ["test/harness/servers.ts"],
    pool: "forks",
    maxWorkers: 2,
    execArgv: [`--conditions=${source}`],
    testTimeout: 120_000,
    hookTimeout: 120_000,
  },
});
