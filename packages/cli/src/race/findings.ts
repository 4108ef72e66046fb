/** What went wrong in a scenario, as the tools of CI take it: a rule, a sentence, and a place in the repository. */
import { existsSync } from "node:fs";
import { dirname, isAbsolute, join, relative, resolve, sep } from "node:path";
import { stripVTControlCharacters } from "node:util";
import { CoverageError, type Turn } from "holdfast/testing";
import { describe } from "../describe.ts";
import { type Outcome, kindOf, replayCommand } from "./outcome.ts";

export interface Place {
  /** From the root of the repository, with "/". */
  readonly file: string;
  readonly line: number;
  readonly column: number;
}

export interface Finding {
  /** The export. */
  readonly key: string;
  readonly scenario: string;
  /** A kind of race, such as `lost-update`, or `could-not-run`, or `coverage`: less was tried than was asked for. */
  readonly rule: string;
  readonly level: "error" | "warning";
  readonly title: string;
  readonly message: string;
  readonly place: Place;
  /** The schedule that failed. */
  readonly turns: readonly Turn[];
}

/** Undefined: it is ok. */
export function findingOf(file: string, outcome: Outcome): Finding | undefined {
  const { key, name: scenario, status } = outcome;
  // Tools show nothing that has no line.
  const start = placeIn(`${resolve(file)}:1:1`) ?? { file, line: 1, column: 1 };
  if (status === "ok") return undefined;
  if (status === "error") {
    const { error } = outcome;
    const [rule, level] =
      error instanceof CoverageError
        ? (["coverage", "warning"] as const)
        : (["could-not-run", "error"] as const);
    const title = `${rule === "coverage" ? "Not enough orders were tried" : "Could not run"}: ${scenario}`;
    return { key, scenario, rule, level, title, message: plain(describe(error)), place: start, turns: [] };
  }
  const { report } = outcome;
  const { anomaly = "race", error, fix = "", turns = [] } = report;
  const stale = turns.filter((turn) => turn.stale);
  const places = [...stale, ...turns.toReversed()].flatMap(({ place = "" }) => placeIn(place) ?? []);
  return {
    key,
    scenario,
    rule: anomaly.replaceAll(" ", "-"),
    level: "error",
    title: `${kindOf(report)}: ${scenario}`,
    message: plain([describe(error), fix, replayCommand(file, outcome) ?? ""].filter(Boolean).join("\n")),
    place: places[0] ?? start,
    turns,
  };
}

/** Undefined: it is not in this repository. */
export function placeIn(text: string): Place | undefined {
  const [, path = "", line, column] = /^(.*):(\d+):(\d+)$/s.exec(text) ?? [];
  const file = relative(root(), path);
  if (!isAbsolute(path) || file.startsWith("..") || isAbsolute(file)) return undefined;
  return { file: file.split(sep).join("/"), line: Number(line), column: Number(column) };
}

/** Of the repository that the command was started in; without one, where it was started. */
function root(): string {
  for (let folder = process.cwd(); folder !== dirname(folder); folder = dirname(folder))
    if (existsSync(join(folder, ".git"))) return folder;
  return process.cwd();
}

/** Values come from a database, and messages may have been painted for a terminal. */
export const plain = (text: string) => stripVTControlCharacters(text);
