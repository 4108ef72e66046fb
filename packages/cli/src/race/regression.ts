/** A race that was found, as a test in the reader's own runner: the order that failed, and then all of them. */
import { existsSync, readFileSync } from "node:fs";
import { dirname, relative, resolve, sep } from "node:path";
import { Failure } from "../failure.ts";
import type { Outcome } from "./outcome.ts";

type Runner = "vitest" | "jest" | "node:test";

/** Before anything is run: it would be lost. */
export function checkTest(file: string): void {
  if (!/\.[cm]?[jt]sx?$/.test(file))
    throw new Failure(`--write-test ${file}: name a file of TypeScript or JavaScript, e.g. quota.test.ts.`);
  if (existsSync(file)) throw new Failure(`--write-test ${file}: it is there already. Name another one.`);
}

/** Whichever the nearest package.json names. */
export function runnerFor(file: string): Runner {
  for (let folder = dirname(resolve(file)); ; folder = dirname(folder)) {
    const manifest = resolve(folder, "package.json");
    if (existsSync(manifest)) {
      const { dependencies, devDependencies } = read(manifest);
      const has = (name: string) => Object.hasOwn({ ...dependencies, ...devDependencies }, name);
      return has("vitest") ? "vitest" : has("jest") ? "jest" : "node:test";
    }
    if (folder === dirname(folder)) return "node:test";
  }
}

function read(manifest: string): Partial<Record<"dependencies" | "devDependencies", object>> {
  try {
    return JSON.parse(readFileSync(manifest, "utf8")) as Record<string, object>;
  } catch {
    return {};
  }
}

/** What is to be found again: the name of the export, and the order. */
interface Found {
  readonly key: string;
  readonly name: string;
  readonly replay: string;
  readonly isolation: string | undefined;
  /** The export is a function, which is given the database. */
  readonly made: boolean;
}

/** Those with a race, if there is an order to try. */
export function foundIn(outcomes: readonly Outcome[], made: (key: string) => boolean): Found[] {
  return outcomes.flatMap((outcome) =>
    outcome.status === "race" && outcome.report.replay !== undefined
      ? [
          {
            key: outcome.key,
            name: outcome.name,
            replay: outcome.report.replay,
            isolation: outcome.report.isolation,
            made: made(outcome.key),
          },
        ]
      : [],
  );
}

export function testText(found: readonly Found[], file: string, test: string): string {
  const runner = runnerFor(test);
  const path = relative(dirname(resolve(test)), resolve(file))
    .split(sep)
    .join("/");
  const from = path.startsWith(".") ? path : `./${path}`;
  const imports = [
    ...(runner === "vitest" ? ['import { test } from "vitest";'] : []),
    ...(runner === "node:test" ? ['import { test } from "node:test";'] : []),
    'import { expectNoRace } from "holdfast/testing";',
    // Jest looks for it itself, and its transforms do not know endings of TypeScript.
    `import * as races from ${JSON.stringify(runner === "jest" ? from.replace(/\.tsx?$/, "") : from)};`,
  ];
  const url = found.some(({ made }) => made) ? [database(test)] : [];
  return [...imports, "", ...url, ...found.map((each) => block(each, runner))].join("\n");
}

function database(test: string): string {
  const typed = /\.[cm]?tsx?$/.test(test) ? ": string" : "";
  return `/** Tables are written to: a database for tests. */
function url()${typed} {
  const { DATABASE_URL } = process.env;
  if (!DATABASE_URL) throw new Error("DATABASE_URL names the database for tests");
  return DATABASE_URL;
}
`;
}

function block({ key, name, replay, isolation, made }: Found, runner: Runner): string {
  const access = /^[\p{ID_Start}$_][\p{ID_Continue}$]*$/u.test(key) ? `.${key}` : `[${JSON.stringify(key)}]`;
  const level = isolation ? `, isolation: ${JSON.stringify(isolation)}` : "";
  // Runners give up after 5 s; node:test does not.
  const limit = runner === "node:test" ? "" : ", 30_000";
  return `test(${JSON.stringify(`${name}: no race`)}, async () => {
  const scenario = ${made ? `await races${access}({ url: url() })` : `races${access}`};
  try {
    // The order that failed, then all of them.
    await expectNoRace({ ...scenario, name: ${JSON.stringify(name)}${level}, replay: ${JSON.stringify(replay)} });
    await expectNoRace({ ...scenario, name: ${JSON.stringify(name)}${level} });
  } finally {
    await scenario.close?.();
  }
}${limit});
`;
}
