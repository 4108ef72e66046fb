import { type Scenario, explore } from "holdfast/testing";
import { expect } from "vitest";

class Enough extends Error {}

/**
 * Explores for about so long, once the first run is over: how long a run takes, and how many there are, depends on the machine. Throws if
 * there is a race.
 */
export async function expectCalm(ms: number, name: string, scenario: Scenario): Promise<void> {
  let first: number | undefined;
  let runs = 0;
  const report = await explore(name, {
    ...scenario,
    maxMs: 120_000,
    minCoverage: 0,
    onProgress(progress) {
      ({ runs } = progress);
      if (runs === 0) return;
      first ??= performance.now();
      if (performance.now() - first > ms) throw new Enough();
    },
  }).catch((error: unknown) => {
    if (error instanceof Enough) return undefined;
    throw error;
  });
  if (report) expect(report.ok, report.text).toBe(true);
  expect(report?.runs ?? runs).toBeGreaterThan(0);
}
