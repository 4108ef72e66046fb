/** SARIF 2.1.0, which GitHub's code scanning and editors show at the lines of the code. */
import { resolve } from "node:path";
import type { Turn } from "holdfast/testing";
import { type Finding, type Place, findingOf, placeIn, plain } from "./findings.ts";
import { type Outcome, exitCodeOf, meanings } from "./outcome.ts";

const repository = "https://github.com/holdfast-db/holdfast";

export function sarifReport(file: string, outcomes: readonly Outcome[]): string {
  const findings = outcomes.flatMap((outcome) => findingOf(file, outcome) ?? []);
  const rules = [...new Map(findings.map(({ rule, level }) => [rule, level]))];
  const ids = rules.map(([id]) => id);
  const run = {
    tool: {
      driver: {
        name: "holdfast race",
        informationUri: repository,
        rules: rules.map(([id, level]) => ({
          id,
          shortDescription: message(`${id[0]?.toUpperCase()}${id.slice(1).replaceAll("-", " ")}`),
          fullDescription: message(fullDescription(id)),
          help: message(fullDescription(id)),
          helpUri: `${repository}/blob/main/docs/${id in others ? "races" : "anomalies"}.md`,
          defaultConfiguration: { level },
        })),
      },
    },
    // GitHub keeps what each of them has found apart: a run of one file does not close the alerts of another.
    automationDetails: { id: `holdfast-race/${placeIn(`${resolve(file)}:1:1`)?.file ?? file}/` },
    invocations: [
      {
        executionSuccessful: outcomes.every(({ status }) => status !== "error"),
        exitCode: exitCodeOf(outcomes),
      },
    ],
    columnKind: "utf16CodeUnits",
    results: findings.map((finding) => resultOf(finding, ids.indexOf(finding.rule))),
  };
  const log = { $schema: "https://json.schemastore.org/sarif-2.1.0.json", version: "2.1.0", runs: [run] };
  return `${JSON.stringify(log, undefined, 2)}\n`;
}

const others: Readonly<Record<string, string>> = {
  "could-not-run": "The scenario could not run, so nothing was tested.",
  coverage: "Fewer orders were tried than was asked for, so nothing is proven yet.",
};

const fullDescription = (rule: string) =>
  others[rule] ?? new Map<string, string>(Object.entries(meanings)).get(rule.replaceAll("-", " ")) ?? rule;

function resultOf(
  { key, scenario, rule, level, title, message: said, place, turns }: Finding,
  ruleIndex: number,
) {
  const threads = Map.groupBy(
    turns.flatMap((turn) => {
      const at = turn.place === undefined ? undefined : placeIn(turn.place);
      return at ? [{ turn, at }] : [];
    }),
    ({ turn }) => turn.actor,
  );
  const threadFlows = [...threads].map(([id, steps]) => ({
    id,
    locations: steps.map(({ turn, at }) => ({
      location: { physicalLocation: physical(at), message: message(stepText(turn)) },
      executionOrder: turn.n,
      importance: turn.stale || turn.error !== undefined ? "essential" : "important",
    })),
  }));
  return {
    ruleId: rule,
    ruleIndex,
    level,
    message: message(`${title}\n${said}`),
    locations: [
      {
        physicalLocation: physical(place),
        logicalLocations: [{ name: key, fullyQualifiedName: scenario, kind: "function" }],
      },
    ],
    // The same race in the same scenario is the same alert, wherever its line has moved to.
    partialFingerprints: { "holdfastRace/v1": `${key}:${rule}` },
    ...(threadFlows.length > 0 && { codeFlows: [{ threadFlows }] }),
  };
}

const physical = ({ file, line, column }: Place) => ({
  artifactLocation: { uri: file.split("/").map(encodeURIComponent).join("/"), uriBaseId: "%SRCROOT%" },
  region: { startLine: line, startColumn: column },
});

function stepText({ actor, n, statement, waitsFor, stale, error }: Turn): string {
  return [
    `${n}. ${actor}: ${statement}`,
    ...(waitsFor.length > 0 ? [`waits for ${waitsFor.join(", ")}`] : []),
    ...(stale ? ["what it read is stale when it is used"] : []),
    ...(error === undefined ? [] : [`fails: ${error}`]),
  ].join("; ");
}

/** Braces would be placeholders (§3.11.5). */
const message = (text: string) => ({ text: plain(text).replaceAll(/[{}]/g, "$&$&") });
