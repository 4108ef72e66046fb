/** How verbs about patterns show things. */
import { shown } from "../text.ts";
import { fit, print, table } from "../terminal.ts";

export type Cell = string | number;

/** Undefined is nothing. Text of anybody's, safe for a terminal. */
export function cell(value: string | number | undefined): Cell {
  return value === undefined ? "" : typeof value === "number" ? value : shown(value);
}

/** 2026-05-01 12:30:05, in UTC. */
export function when(moment: Date | number | undefined): string {
  if (moment === undefined) return "";
  const date = new Date(moment);
  return Number.isNaN(date.getTime()) ? "?" : date.toISOString().slice(0, 19).replace("T", " ");
}

export function iso(ms: number | undefined): string | undefined {
  return ms === undefined ? undefined : new Date(ms).toISOString();
}

/** Texts are not cut to less than this, and times not at all: a row that still does not fit is folded by the terminal. */
const least = 16;
const isTime = (text: Cell | undefined): boolean =>
  typeof text === "string" && /^\d{4}-\d\d-\d\d /.test(text);

/**
 * A table no wider than the terminal: its widest texts give way, and before they become too short, columns that can be
 * spared are left out, in this order. In a pipe nothing is cut.
 */
export function printTable(
  head: readonly string[],
  rows: readonly (readonly Cell[])[],
  spare: readonly string[] = [],
): void {
  const { isTTY, columns } = process.stdout;
  if (!isTTY || !columns) {
    print(table(head, rows));
    return;
  }
  const { widths, soft } = measured(head, rows);
  const atLeast = widths.reduce((sum, width, i) => sum + (soft[i] ? Math.min(width, least) : width) + 2, -2);
  const [first, ...others] = spare;
  if (atLeast > columns && first !== undefined) {
    const at = head.indexOf(first);
    printTable(
      head.toSpliced(at, 1),
      rows.map((row) => row.toSpliced(at, 1)),
      others,
    );
    return;
  }
  const all = () => widths.reduce((sum, width) => sum + width + 2, -2);
  while (all() > columns) {
    const widest = Math.max(...widths.filter((_, i) => soft[i]));
    if (widest <= least) break;
    widths[widths.findIndex((width, i) => soft[i] && width === widest)] = widest - 1;
  }
  const cut = (each: Cell, i: number) =>
    typeof each === "string" && soft[i] ? fit(each, widths[i] ?? 0) : each;
  print(
    table(
      head,
      rows.map((row) => row.map(cut)),
    ),
  );
}

function measured(head: readonly string[], rows: readonly (readonly Cell[])[]) {
  return {
    widths: head.map((title, i) => Math.max(title.length, ...rows.map((row) => String(row[i]).length))),
    soft: head.map(
      (_, i) => rows.some((row) => typeof row[i] === "string") && !rows.some((row) => isTime(row[i])),
    ),
  };
}

/** Names and values, one below the other; those without a value are left out. */
export function printFacts(facts: Readonly<Record<string, string | number | undefined>>): void {
  const said = Object.entries(facts).filter(([, value]) => value !== undefined && value !== "");
  const width = Math.max(0, ...said.map(([name]) => name.length));
  for (const [name, value] of said) print(`${name.padEnd(width)}  ${cell(value)}`);
}

export function firstLine(text: string): string {
  return text.split("\n", 1)[0] ?? "";
}

export function quoted(text: string): string {
  return `"${shown(text)}"`;
}

/** Of counts that end at a hundred thousand. */
export function counted(n: number): Cell {
  return n >= 100_000 ? "≥ 100,000" : n;
}
