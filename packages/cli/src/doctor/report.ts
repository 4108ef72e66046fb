/** What was found, for people: the worst first. */
import { plural, shown } from "../text.ts";
import type { Colors } from "../terminal.ts";
import type { Finding, Severity } from "./check.ts";
import type { Examined } from "./examine.ts";

interface Paper {
  readonly width: number;
  readonly colors: Colors;
}

const headings: Record<Severity, string> = { error: "Errors", warning: "Warnings", hint: "Hints" };
const marks: Record<Severity, string> = { error: "✗", warning: "!", hint: "·" };

/** Printed before the first check. */
export function heading(title: string, { width, colors }: Paper): string {
  return [...wrapped(title, width, "").map(colors.bold), ""].join("\n");
}

export function hasErrors({ findings }: Examined): boolean {
  return findings.some(({ severity }) => severity === "error");
}

/** Printed as soon as a check has found them: the worst come first, and the next check may never end. */
export function errorsOf(examined: Examined, isFirst: boolean, paper: Paper): string {
  return section("error", [examined], isFirst, paper).join("\n");
}

/** Printed when all checks have been run, or none can be run any more. */
export function withoutErrors(examined: readonly Examined[], checks: number, paper: Paper): string {
  return [
    ...section("warning", examined, true, paper),
    ...section("hint", examined, true, paper),
    ...unseen(examined, paper),
    summary(examined, checks, paper.colors),
  ].join("\n");
}

function section(severity: Severity, examined: readonly Examined[], titled: boolean, paper: Paper): string[] {
  const { bold, red, yellow, cyan } = paper.colors;
  const shade = { error: red, warning: yellow, hint: cyan }[severity];
  const blocks = examined.flatMap((each) => alike(each, severity));
  if (blocks.length === 0) return [];
  const title = titled ? [bold(shade(headings[severity])), ""] : [];
  return [...title, ...blocks.flatMap((block) => [...drawn(block, shade(marks[severity]), paper), ""])];
}

interface Block {
  readonly id: string;
  readonly findings: readonly Finding[];
  readonly more: number;
}

/** Findings of one check that matter for one reason, which is said once. */
function alike(each: Examined, severity: Severity): Block[] {
  const seen = each.findings.filter((finding) => finding.severity === severity && !finding.blind);
  const byWhy = Map.groupBy(seen, ({ why }) => why);
  const blocks = [...byWhy.values()].map((findings) => ({ id: each.id, findings, more: 0 }));
  const last = blocks.at(-1);
  // The worst come first, so what was left out is of the last kind.
  const isLast = each.findings.at(-1)?.severity === severity;
  return last && isLast ? [...blocks.slice(0, -1), { ...last, more: each.more }] : blocks;
}

function drawn({ id, findings, more }: Block, mark: string, { width, colors }: Paper): string[] {
  const [first] = findings;
  const lines = [`${mark} ${colors.bold(id)}`];
  for (const { what } of findings) lines.push(...wrapped(what, width, "  ", findings.length > 1 ? "- " : ""));
  if (more > 0) lines.push(`  - and ${more} more`);
  lines.push(...wrapped(first?.why ?? "", width, "  ").map(colors.dim));
  for (const fix of new Set(findings.map((finding) => finding.fix)))
    lines.push(...remedy(fix, width).map(colors.green));
  return lines;
}

/** Code stays as it is, however long, since it is there to be copied; a remark beside it goes below if there is no room. */
function remedy(fix: string, width: number): string[] {
  const indent = "    ";
  return clean(fix, true)
    .split("\n")
    .flatMap((line) => {
      if (/^[A-Z][a-z]/.test(line)) return wrapped(line, width, indent);
      const [, code, remark] = /^(.*?) {3}((?:--|#|\/\/|;) .*)$/.exec(line) ?? [];
      const fits = indent.length + line.length <= width;
      if (fits || code === undefined || remark === undefined) return `${indent}${line}`;
      const [mark = ""] = remark.split(" ", 1);
      return [`${indent}${code}`, ...wrapped(remark.slice(mark.length + 1), width, `${indent}${mark} `)];
    });
}

/** Checks that could not look, together where one right would let them all. */
function unseen(examined: readonly Examined[], { width, colors }: Paper): string[] {
  const blinds = examined.flatMap(({ id, findings }) =>
    findings.filter(({ blind }) => blind).map((finding) => ({ id, finding })),
  );
  if (blinds.length === 0) return [];
  const lines = [colors.bold("Could not look"), ""];
  for (const group of Map.groupBy(blinds, ({ finding }) => `${finding.what}\n${finding.fix}`).values()) {
    const [first] = group;
    lines.push(
      ...wrapped(group.map(({ id }) => id).join(", "), width, "", "? ").map(colors.bold),
      ...wrapped((first?.finding.what ?? "").replace(/^could not look: /, ""), width, "  "),
      ...remedy(first?.finding.fix ?? "", width).map(colors.green),
      "",
    );
  }
  return lines;
}

function summary(examined: readonly Examined[], checks: number, colors: Colors): string {
  const count = (severity: Severity): number =>
    examined.reduce((sum, { findings, more }) => {
      const here = findings.filter((finding) => finding.severity === severity && !finding.blind).length;
      // The worst come first, so what was left out is of the last kind.
      return sum + here + (findings.at(-1)?.severity === severity ? more : 0);
    }, 0);
  const counts = [
    [count("error"), "error", colors.red],
    [count("warning"), "warning", colors.yellow],
    [count("hint"), "hint", colors.cyan],
  ] as const;
  const parts = counts.filter(([n]) => n > 0).map(([n, word, shade]) => shade(plural(n, word)));
  const blind = examined.filter(({ status }) => status === "could-not-look").length;
  const said = parts.length === 0 ? [colors.green("nothing found")] : parts;
  if (blind > 0) said.push(`${blind} could not look`);
  const all = plural(checks, "check");
  const run = examined.length < checks ? `${examined.length} of ${all}, the others were not run` : all;
  return `${run}: ${said.join(", ")}`;
}

export function listed(
  kinds: readonly { readonly name: string; readonly checks: readonly { id: string; title: string }[] }[],
  { width, colors }: Paper,
): string {
  const column = Math.max(...kinds.flatMap(({ checks }) => checks.map(({ id }) => id.length))) + 2;
  return kinds
    .map(({ name, checks }) =>
      [
        colors.bold(name),
        ...checks.flatMap(({ id, title }) =>
          wrapped(title, width - column, "").map(
            (line, i) => `${i === 0 ? colors.cyan(id.padEnd(column)) : " ".repeat(column)}${line}`,
          ),
        ),
      ].join("\n"),
    )
    .join("\n\n");
}

/** Statements keep their lines. */
function clean(text: string, keepLines = false): string {
  return keepLines ? text.split("\n").map(shown).join("\n") : shown(text);
}

/** Lines no wider than this; a bullet stands before the first. */
export function wrapped(text: string, width: number, indent: string, bullet = ""): string[] {
  const lines: string[] = [];
  const room = Math.max(20, width - indent.length - bullet.length);
  let line = "";
  // "5 s" stays together.
  for (const word of clean(text)
    .replaceAll(/(?<=\d) (?=(?:ms|s|min|h|d|%|kB|MB)\b)/g, "\u00A0")
    .split(" ")) {
    if (line !== "" && line.length + 1 + word.length > room) {
      lines.push(line);
      line = word;
    } else line = line === "" ? word : `${line} ${word}`;
  }
  lines.push(line);
  return lines.map(
    (each, i) => `${indent}${i === 0 ? bullet : " ".repeat(bullet.length)}${each.replaceAll("\u00A0", " ")}`,
  );
}
