/** The schedules that the guides show are what the explorer finds, in the code that they show. */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { type Recorded, names, record } from "../site/record.ts";
import { blocksOf, files, textOf } from "./docs/markdown.ts";
import { root } from "./harness/command.ts";
import { createDatabase, unavailable } from "./harness/databases.ts";

const why = unavailable("postgres");
const recorded = (name: string): Recorded =>
  JSON.parse(readFileSync(join(root, "site/schedules", `${name}.json`), "utf8"));

/** Whom the server ends to break a deadlock depends on who is first to look, so on the machine: then it does not matter who ended how. */
function stepsOf({ turns }: Recorded): readonly string[] {
  const steps = turns.map(({ actor, statement }) => `${actor}: ${statement}`);
  const isDeadlock = turns.some(({ error }) => error?.includes("deadlock"));
  return isDeadlock
    ? steps.map((step) => step.replace(/^\w+: (?:COMMIT|ROLLBACK)$/, "the end of one"))
    : steps;
}

test.for(names)("%s breaks its rule, in that order", { timeout: 180_000 }, async (name, { skip }) => {
  skip(why !== undefined, why);
  const database = await createDatabase("postgres");
  try {
    const now = await record(name, database.url);
    const then = recorded(name);
    expect(now.anomaly).toBe(then.anomaly);
    expect(now.error).toBe(then.error);
    expect(stepsOf(now)).toEqual(stepsOf(then));
    expect(Object.keys(now)).toEqual(Object.keys(then));
  } finally {
    await database.drop();
  }
});

test("guides show them, and the code that they are of", () => {
  const shown = new Set<string>();
  for (const file of files) {
    const text = textOf(file);
    for (const { index, 1: name = "" } of text.matchAll(/^<!-- schedule: ([\w-]+) -->$/gm)) {
      shown.add(name);
      const line = text.slice(0, index).split("\n").length;
      const blocks = blocksOf(file);
      const after = blocks.find((block) => block.line > line);
      const before = blocks.findLast((block) => block.line < line);
      expect(after?.code.trimEnd(), `${file}: run npm run docs:record`).toBe(recorded(name).text);
      const scenario = readFileSync(join(root, "site/scenarios", `${name}.ts`), "utf8");
      expect(scenario, `${file}: the code before the schedule ${name}`).toContain(before?.code);
    }
  }
  expect([...shown].toSorted()).toEqual([...names].toSorted());
});
