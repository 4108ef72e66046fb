/** How verbs about patterns show things. */
import { shown } from "../text.ts";
import { colorsOf, fit, print, table } from "../terminal.ts";

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

/** Texts are not cut to less than this, and times not at all. */
const least = 16;
const isTime = (text: Cell | undefined): boolean =>
  typeof text === "string" && /^\d{4}-\d\d-\d\d /.test(text);

/**
 * A table no wider than the terminal: its widest texts give way, and before they become too short, columns that can be
 * spared are left out, in this order. If that is not enough, each row becomes a block of lines, with all columns. In a pipe
 * nothing is cut.
 */
export function printTable(
  head: readonly string[],
  rows: readonly (readonly Cell[])[],
  spare: readonly string[] = [],
): void {
  const columns = columnsOf();
  if (columns === Infinity) print(table(head, rows));
  else print(fitted(head, rows, spare, columns) ?? blocks(head, rows, columns));
}

/** Undefined: it is too wide, without what can be spared too. */
function fitted(
  head: readonly string[],
  rows: readonly (readonly Cell[])[],
  spare: readonly string[],
  columns: number,
): string | undefined {
  const { widths, soft } = measured(head, rows);
  const all = () => widths.reduce((sum, width) => sum + width + 2, -2);
  const atLeast = widths.reduce((sum, width, i) => sum + (soft[i] ? Math.min(width, least) : width) + 2, -2);
  if (atLeast > columns) {
    const [first, ...others] = spare;
    if (first === undefined) return undefined;
    const at = head.indexOf(first);
    return fitted(
      head.toSpliced(at, 1),
      rows.map((row) => row.toSpliced(at, 1)),
      others,
      columns,
    );
  }
  while (all() > columns) {
    const widest = Math.max(...widths.filter((_, i) => soft[i]));
    widths[widths.findIndex((width, i) => soft[i] && width === widest)] = widest - 1;
  }
  const cut = (each: Cell, i: number) =>
    typeof each === "string" && soft[i] ? fit(each, widths[i] ?? 0) : each;
  return table(
    head,
    rows.map((row) => row.map(cut)),
  );
}

function blocks(head: readonly string[], rows: readonly (readonly Cell[])[], columns: number): string {
  return rows
    .map((row) =>
      facts(
        head.map((title, i) => [title, row[i]]),
        columns,
      ).join("\n"),
    )
    .join("\n\n");
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
export function printFacts(named: Readonly<Record<string, Cell | undefined>>): void {
  for (const line of facts(Object.entries(named), columnsOf())) print(line);
}

function facts(named: readonly (readonly [string, Cell | undefined])[], columns: number): string[] {
  const { dim } = colorsOf(process.stdout);
  const said = named.filter(([, value]) => value !== undefined && value !== "");
  const width = Math.max(0, ...said.map(([name]) => name.length));
  return said.flatMap(([name, value]) =>
    folded(String(cell(value)), Math.max(least, columns - width - 2)).map(
      (line, i) => `${i === 0 ? dim(name.padEnd(width)) : " ".repeat(width)}  ${line}`,
    ),
  );
}

/** Of the terminal; in a pipe there is room for everything. */
export function columnsOf(): number {
  const { isTTY, columns } = process.stdout;
  return isTTY && columns ? columns : Infinity;
}

/** Lines no wider than this, between words where there are any. */
export function folded(text: string, width: number): string[] {
  const lines: string[] = [];
  let rest = text;
  while (rest.length > width) {
    const blank = rest.lastIndexOf(" ", width);
    const end = blank > width / 2 ? blank : width;
    lines.push(rest.slice(0, end));
    rest = rest.slice(end).trimStart();
  }
  return [...lines, rest];
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
