/** What verbs print: results to stdout, all else to stderr; colours and lines that move only where somebody watches. */
import { stripVTControlCharacters } from "node:util";
import Table from "cli-table3";
import picocolors from "picocolors";

export { printJson } from "./json.ts";

export type Colors = ReturnType<typeof picocolors.createColors>;

/** Continuous integration counts as a terminal for picocolors; here it does not. isTTY is undefined if it is none. */
export const colorsOf = (stream: NodeJS.WriteStream): Colors =>
  picocolors.createColors((stream.isTTY ?? false) && picocolors.isColorSupported);

const frameless: Partial<Record<Table.CharName, string>> = { mid: "─", "mid-mid": "──", middle: "  " };
for (const part of [
  ...([
    "top",
    "top-mid",
    "top-left",
    "top-right",
    "bottom",
    "bottom-mid",
    "bottom-left",
    "bottom-right",
  ] as const),
  ...(["left", "left-mid", "right", "right-mid"] as const),
])
  frameless[part] = "";

/** Without a frame, so that it fits. Numbers to the right. */
export function table(
  head: readonly string[],
  rows: readonly (readonly (string | number)[])[],
  colors: Colors = colorsOf(process.stdout),
): string {
  const drawn = new Table({
    head: head.map((title) => colors.bold(title)),
    colAligns: head.map((_, i) =>
      rows.length > 0 && rows.every((row) => typeof row[i] === "number") ? "right" : "left",
    ),
    chars: frameless,
    // Its own colours know nothing of NO_COLOR.
    style: { head: [], border: [], compact: true, "padding-left": 0, "padding-right": 0 },
  });
  for (const row of rows) drawn.push(row.map(String));
  return drawn
    .toString()
    .split("\n")
    .map((line) => line.trimEnd())
    .join("\n");
}

export function print(text = ""): void {
  process.stdout.write(`${text}\n`);
}

/** Remarks that are no part of the result. */
export function note(text: string): void {
  process.stderr.write(`${colorsOf(process.stderr).dim(text)}\n`);
}

/** A text no wider than this, whatever colours are in it: if it is cut, it has none. */
export function fit(text: string, width: number): string {
  const plain = stripVTControlCharacters(text);
  if (plain.length <= width) return text;
  return width < 1 ? "" : `${plain.slice(0, width - 1)}…`;
}

/** 950 ms, 12 s, 3 min, 2 h, 5 d. */
export function age(ms: number): string {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = ms / 1000;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = seconds / 60;
  if (minutes < 100) return `${Math.round(minutes)} min`;
  const hours = minutes / 60;
  return hours < 48 ? `${Math.round(hours)} h` : `${Math.round(hours / 24)} d`;
}
