/** JUnit's XML, as Jenkins and GitLab read it. */
import { resolve } from "node:path";
import { describe } from "../describe.ts";
import { type Finding, findingOf, placeIn, plain } from "./findings.ts";
import { type Outcome, replayCommand } from "./outcome.ts";
import { escape } from "./text.ts";

/** `skipped`: the names of those that were not run. */
export function junitReport(file: string, outcomes: readonly Outcome[], skipped: readonly string[]): string {
  const path = placeIn(`${resolve(file)}:1:1`)?.file ?? file;
  const cases = [
    ...outcomes.map((outcome) => testCase(file, path, outcome)),
    ...skipped.map((name) => element("testcase", { name, classname: path, file: path }, "<skipped/>")),
  ];
  const failures = outcomes.filter((outcome) => failed(findingOf(file, outcome))).length;
  const errors = outcomes.filter(({ status }) => status !== "ok").length - failures;
  const counts = {
    tests: cases.length,
    failures,
    errors,
    skipped: skipped.length,
    time: seconds(outcomes.reduce((sum, outcome) => sum + msOf(outcome), 0)),
  };
  const suite = element("testsuite", { name: path, ...counts }, `\n${cases.join("\n")}\n`);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${element("testsuites", { name: "holdfast race", ...counts }, `\n${suite}\n`)}\n`;
}

function testCase(file: string, path: string, outcome: Outcome): string {
  const finding = findingOf(file, outcome);
  const attributes = { name: outcome.name, classname: path, file: path, time: seconds(msOf(outcome)) };
  const text = outcome.status === "error" ? describe(outcome.error) : outcome.report.text;
  if (!finding) return element("testcase", attributes, element("system-out", {}, escaped(text)));
  const { title, rule } = finding;
  const body = [text, replayCommand(file, outcome) ?? ""].filter(Boolean).join("\n");
  const what = element(failed(finding) ? "failure" : "error", { message: title, type: rule }, escaped(body));
  return element("testcase", attributes, what);
}

/** Everything else than a race, and less coverage than was asked for, is an error of the test itself. */
const failed = (finding: Finding | undefined) => finding !== undefined && finding.rule !== "could-not-run";

const msOf = (outcome: Outcome) => (outcome.status === "error" ? 0 : outcome.report.ms);
const seconds = (ms: number) => (ms / 1000).toFixed(3);
const escaped = (text: string) => escape(plain(text));

function element(
  name: string,
  attributes: Readonly<Record<string, string | number>>,
  content: string,
): string {
  const all = Object.entries(attributes).map(
    // A line break in an attribute would be read as a space.
    ([key, value]) => ` ${key}="${escaped(String(value)).replaceAll("\n", "&#10;")}"`,
  );
  return `<${name}${all.join("")}>${content}</${name}>`;
}
