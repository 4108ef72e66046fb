/** What became of one scenario. */
import { types } from "node:util";
import { type Anomaly, CoverageError, type Exploration } from "holdfast/testing";
import { describe } from "../describe.ts";

/** What each kind of race is. */
export const meanings: Readonly<Record<Anomaly, string>> = {
  deadlock: "Each of them holds what the other one waits for, so the server ended one.",
  "dirty read": "One acted on what another one had written and then took back.",
  "lost update":
    "Both read the same row, and the second write was computed from what the first had replaced.",
  "write skew": "Each checked what the other one then changed, and both wrote on the strength of it.",
  phantom: "A row that was not there when it was looked for was added before the answer was used.",
  "read skew": "What was read in two statements was changed in between, so that it never was so.",
  "double effect": "Both did what was to be done once.",
  fault:
    "Something befell one of them in the middle of what it does: its process ended, an answer was lost, it was called twice, or it lost its lease.",
  race: "The outcome depends on the order of the statements.",
  "not a race": "It fails when one runs after the other, without any concurrency.",
};

/** "Lost update on person" */
export function kindOf({ anomaly = "race", table }: Exploration): string {
  return `${anomaly[0]?.toUpperCase()}${anomaly.slice(1)}${table ? ` on ${table}` : ""}`;
}

interface Named {
  /** The export, as in `--only`. */
  readonly key: string;
  readonly name: string;
}

export type Outcome =
  | (Named & { readonly status: "ok" | "race"; readonly report: Exploration })
  | (Named & { readonly status: "error"; readonly error: unknown });

export const couldNotRun = (named: Named, error: unknown): Outcome => ({ ...named, status: "error", error });

export const ended = (named: Named, report: Exploration): Outcome => ({
  ...named,
  status: report.ok ? "ok" : "race",
  report,
});

export function exitCodeOf(outcomes: readonly Outcome[]): 0 | 1 | 2 {
  if (outcomes.some(({ status }) => status === "error")) return 2;
  return outcomes.some(({ status }) => status === "race") ? 1 : 0;
}

export function summary(outcomes: readonly Outcome[], left: number): string {
  const count = (wanted: Outcome["status"]) => outcomes.filter(({ status }) => status === wanted).length;
  const parts = [
    [count("ok"), "ok"],
    [count("race"), "with a race"],
    [count("error"), "could not run"],
    [left, "not run"],
  ] as const;
  const total = outcomes.length + left;
  const said = parts.filter(([n]) => n > 0).map(([n, what]) => `${n} ${what}`);
  return `${total} scenario${total === 1 ? "" : "s"}: ${said.join(", ")}`;
}

/** So that the one order is tried again. */
export function replayCommand(file: string, outcome: Outcome): string | undefined {
  if (outcome.status !== "race" || outcome.report.replay === undefined) return undefined;
  const { isolation, replay } = outcome.report;
  const level = isolation ? ` --isolation ${isolation.replaceAll(" ", "-")}` : "";
  return `holdfast race ${word(file)} --only ${word(outcome.key)}${level} --replay '${replay}'`;
}

/** For a shell. */
const word = (text: string) =>
  /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", String.raw`'\''`)}'`;

/** All that JSON can say. */
export function asJson(file: string, outcome: Outcome): Readonly<Record<string, unknown>> {
  const { key, name, status } = outcome;
  const head = { name, export: key, status };
  if (outcome.status === "error") return { ...head, ok: false, error: errorOf(outcome.error) };
  const { error, ...report } = outcome.report;
  return {
    ...head,
    ...report,
    ...(report.ok ? {} : { error: errorOf(error), command: replayCommand(file, outcome) }),
  };
}

function errorOf(error: unknown): Readonly<Record<string, unknown>> {
  const name: unknown = types.isNativeError(error) ? error.name : typeof error;
  return {
    name: typeof name === "string" ? name : "Error",
    message: describe(error),
    ...(error instanceof CoverageError && { unexplored: error.unexplored }),
  };
}
