import { type Colors, table } from "../terminal.ts";

/** 3, 1234, 12.35; nothing for what was not measured. */
export function figure(value: number): string {
  if (Number.isNaN(value)) return "";
  if (Number.isInteger(value)) return String(value);
  return value >= 100 ? String(Math.round(value)) : value.toFixed(2);
}

/** Columns of numbers are written as figures, one below the other. */
export function tableOfFigures(
  head: readonly string[],
  rows: readonly (readonly unknown[])[],
  colors?: Colors,
): string {
  const columns = head.map((title, i) => {
    const cells = rows.map((row) => row[i]);
    if (cells.length === 0 || !cells.every((cell) => typeof cell === "number"))
      return { title, cells: cells.map(String) };
    const texts = cells.map(figure);
    const width = Math.max(title.length, ...texts.map(({ length }) => length));
    return { title: title.padStart(width), cells: texts.map((text) => text.padStart(width)) };
  });
  return table(
    columns.map(({ title }) => title),
    rows.map((_, i) => columns.map(({ cells }) => cells[i] ?? "")),
    colors,
  );
}
