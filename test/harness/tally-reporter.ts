import { writeFileSync } from "node:fs";
import type { Reporter, TestCase, TestModule } from "vitest/node";
import type { SerializedError } from "vitest";

/** What a run came to, for scripts/test.ts. Unlike the JSON reporter's, it tells why a test was skipped. */
export interface Tally {
  passed: number;
  /** Also those that have no result, as their process ended. */
  failed: { name: string; message: string }[];
  skipped: { name: string; reason: string }[];
  /** Files that could not be loaded, failing hooks, and errors outside of tests. */
  errors: number;
  /** Of the processors, by file, its processes included, and not the servers. */
  cpuSeconds: Record<string, number>;
}

/** Characters of one failure. */
const mostShown = 4000;

export default class TallyReporter implements Reporter {
  readonly #file: string | undefined = process.env["HOLDFAST_TALLY"];

  /** At once: the other reporters tell why only when all tests have ended. */
  onTestCaseResult(test: TestCase): void {
    const { state, errors = [] } = test.result();
    if (state !== "failed") return;
    for (const { message, diff = "" } of errors)
      console.log(`failed: ${nameOf(test)}: ${message}\n${diff}`.slice(0, mostShown));
  }

  onTestRunEnd(modules: readonly TestModule[], unhandled: readonly SerializedError[]): void {
    const tally: Tally = { passed: 0, failed: [], skipped: [], errors: unhandled.length, cpuSeconds: {} };
    for (const module of modules) {
      tally.cpuSeconds[module.relativeModuleId] = module.meta().cpuSeconds ?? 0;
      tally.errors += module.errors().length;
      for (const suite of module.children.allSuites()) tally.errors += suite.errors().length;
      for (const test of module.children.allTests()) count(tally, test);
    }
    if (this.#file !== undefined) writeFileSync(this.#file, JSON.stringify(tally));
  }
}

const nameOf = (test: TestCase) => `${test.module.relativeModuleId} > ${test.fullName}`;

function count(tally: Tally, test: TestCase): void {
  const result = test.result();
  const name = nameOf(test);
  if (result.state === "passed") tally.passed++;
  else if (result.state === "skipped") {
    const reason = result.note ?? `marked ${test.options.mode}`;
    tally.skipped.push({ name, reason });
  } else {
    const [line = ""] = (result.errors?.[0]?.message ?? "it came to no end").split("\n");
    tally.failed.push({ name, message: line.slice(0, 200) });
  }
}
