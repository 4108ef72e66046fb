import { fileURLToPath } from "node:url";
import { defineConfig } from "vitest/config";
import { BaseSequencer, type TestSpecification } from "vitest/node";
import { without } from "./test/mutants/protections.ts";

/** Those that take minutes come first, so that none of them is left to run alone at the end. */
const longest = [
  "conformance/postgres",
  "conformance/mariadb",
  "conformance/mysql",
  "conformance/files",
  "conformance/embedded",
  "conformance/pgbouncer",
  "exact",
  "chaos",
  "lost-update",
  "leases",
  "transfers",
  "faults",
  "once",
  "traps-duckdb",
  "pools",
  "busy-loop",
];

class LongestFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const rank = ({ moduleId }: TestSpecification) => {
      const found = longest.findIndex((name) => moduleId.endsWith(`/${name}.test.ts`));
      return found < 0 ? longest.length : found;
    };
    // oxlint-disable-next-line unicorn/no-array-sort -- it is the sequencer's own.
    const usual = await super.sort(files);
    return usual.toSorted((a, b) => rank(a) - rank(b));
  }
}

// Tests run the workspace's sources, not what was built last.
const source = "holdfast-source";

// Hundreds of processes are started, each of which would compile the same sources: 0.1 s of a core in place of 0.6.
process.env["NODE_COMPILE_CACHE"] ??= fileURLToPath(
  new URL("node_modules/.cache/holdfast-tests", import.meta.url),
);

/** With HOLDFAST_MUTANT: the library without that protection, here and in every process that a test starts. */
const mutant = process.env["HOLDFAST_MUTANT"];
if (mutant) {
  const hook = new URL("test/mutants/hook.ts", import.meta.url).href;
  process.env["NODE_OPTIONS"] = `${process.env["NODE_OPTIONS"] ?? ""} --import=${hook}`;
}
const mutation = {
  name: "holdfast-mutant",
  enforce: "pre" as const,
  transform: (code: string, id: string) =>
    mutant && id.endsWith("/seam/protections.ts") ? without(mutant, code) : undefined,
};

export default defineConfig({
  plugins: [mutation],
  resolve: { conditions: [source, "module", "node", "development|production"] },
  ssr: {
    resolve: {
      conditions: [source, "module", "node", "development|production"],
      externalConditions: [source, "node", "module-sync"],
    },
  },
  test: {
    // What was transformed for a mutant must not be found by others, nor theirs by it.
    fsModuleCache: !mutant,
    include: ["test/**/*.test.ts", "packages/*/src/**/*.test.ts"],
    globalSetup: ["test/harness/servers.ts"],
    setupFiles: ["test/harness/cpu.ts"],
    sequence: { sequencer: LongestFirst },
    pool: "forks",
    // On two cores: many tests wait more than they work.
    maxWorkers: 4,
    // Of tests that say that they may run side by side: more than this, and two cores are late for what they time.
    maxConcurrency: 2,
    execArgv: [`--conditions=${source}`],
    testTimeout: 120_000,
    // Four files at a time on two cores: what takes a second alone may take ten.
    env: { HOLDFAST_EXPLORE_MS: "20000" },
    hookTimeout: 120_000,
  },
});
