/** The one loop that runs work again: what is retried, for how long, and what is known of an answer that was lost. */
import { expect, test } from "vitest";
import {
  type GivenUp,
  Pauses,
  type Retrying,
  type RetryRun,
  retrying,
} from "../../packages/holdfast/src/transaction/retry.ts";

type Why = "lost" | "deadlock";

class Failing extends Error {
  readonly why: Why | undefined;
  constructor(why?: Why) {
    super(why ?? "for good");
    this.why = why;
  }
}

/** Fails as it is told to, run by run, then succeeds; a run that "sends" may have been kept. */
async function run(
  script: readonly { readonly why?: Why; readonly sends?: boolean }[],
  how: Partial<Retrying<Why>> = {},
) {
  const runs: Pick<RetryRun, "attempt" | "perhaps">[] = [];
  let ended: GivenUp<Why> | undefined;
  const outcome = await retrying<string, Why>(
    async ({ attempt, perhaps, sent }) => {
      runs.push({ attempt, perhaps });
      const step = script[attempt - 1];
      if (!step) return "done";
      if (step.sends) sent();
      throw new Failing(step.why);
    },
    {
      why: (error) => (error as Failing).why,
      on: new Set(["lost", "deadlock"]),
      pauseMs: () => 0,
      async failed(_, how) {
        ended = how;
      },
      ...how,
    },
  ).catch((error: unknown) => error);
  return { runs: runs.length, perhaps: runs.map(({ perhaps }) => perhaps), outcome, ended };
}

test("runs again what passes, and nothing else", async () => {
  expect(await run([{ why: "deadlock" }, { why: "lost" }])).toMatchObject({ runs: 3, outcome: "done" });
  expect(await run([{}])).toMatchObject({ runs: 1, ended: { why: undefined, attempts: 1 } });
  expect(await run([{ why: "lost" }], { on: new Set(["deadlock"]) })).toMatchObject({ runs: 1 });
});

test("an answer is lost only if something was on its way", async () => {
  const { perhaps } = await run([
    { why: "lost" },
    { why: "deadlock", sends: true },
    { why: "lost", sends: true },
    {},
  ]);
  expect(perhaps).toEqual([false, false, false, true]);
  expect((await run([{ why: "lost", sends: true }, {}])).ended).toMatchObject({ perhaps: true, attempts: 2 });
  expect((await run([{ why: "deadlock", sends: true }, {}])).ended).toMatchObject({ perhaps: false });
});

test("what may have been kept, and could not be found again, is not run again", async () => {
  const once = { once: true };
  expect(await run([{ why: "lost" }], once)).toMatchObject({ runs: 2, outcome: "done" });
  expect(await run([{ why: "deadlock", sends: true }], once)).toMatchObject({ runs: 2, outcome: "done" });
  expect(await run([{ why: "lost", sends: true }], once)).toMatchObject({
    runs: 1,
    ended: { perhaps: true },
  });
  expect(await run([{ why: "deadlock" }], { ...once, perhaps: true })).toMatchObject({ runs: 1 });
});

test("so often, longer while it is wanted, and never after its time", async () => {
  const always = Array.from({ length: 20 }, () => ({ why: "deadlock" as const }));
  expect(await run(always, { attempts: 3 })).toMatchObject({
    runs: 3,
    ended: { why: "deadlock", attempts: 3 },
  });
  expect(await run(always, { attempts: () => 4 })).toMatchObject({ runs: 4 });
  const later = performance.now() + 600_000;
  expect(await run(always, { attempts: 3, wantedUntil: later })).toMatchObject({ runs: 21, outcome: "done" });
  expect(await run(always, { wantedUntil: later, until: performance.now() - 1 })).toMatchObject({ runs: 1 });
  expect(await run(always, { wanted: () => false })).toMatchObject({ runs: 1 });
});

test("the signal's reason ends it, also in a pause", async () => {
  const stop = new AbortController();
  const reason = new Error("enough");
  const ending = run([{ why: "deadlock" }], {
    signal: stop.signal,
    pauseMs: () => 600_000,
    again: () => stop.abort(reason),
  });
  expect(await ending).toMatchObject({ runs: 1, outcome: reason });
  expect(await run([], { signal: stop.signal })).toMatchObject({ runs: 0, outcome: reason });
});

test("pauses grow with failures in a row, up to a bound, and begin anew", () => {
  const pauses = new Pauses(100, 1000);
  for (const ms of [100, 200, 400, 800, 1000, 1000]) {
    const next = pauses.next();
    expect(next).toBeGreaterThanOrEqual(ms / 2);
    expect(next).toBeLessThanOrEqual(ms * 1.5);
  }
  pauses.reset();
  expect(pauses.next()).toBeLessThanOrEqual(150);
});
