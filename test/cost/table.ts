/** The committed table: Markdown, with a section for each client and a row for each call. */
import { readFile, writeFile } from "node:fs/promises";
import { type Cost, type CostName, type Measured, costNames, costs } from "./cost.ts";

/** By the name of the client. */
export type Table = ReadonlyMap<string, Measured>;

const file = new URL("table.md", import.meta.url);

const preface = `# What each call costs

\`npm run cost -- --update\` writes this table, and \`cost.test.ts\` compares it with what it measures.
[CONTRIBUTING](../../CONTRIBUTING.md#cost) explains the columns.
`;

export const readTable = async (): Promise<Table> => parsed(await readFile(file, "utf8"));
export const writeTable = (table: Table): Promise<void> => writeFile(file, formatted(table));

/** As prettier has it. */
export function formatted(table: Table): string {
  return [preface, ...[...table].map(([client, calls]) => `## ${client}\n\n${section(calls)}\n`)].join("\n");
}

function section(calls: Measured): string {
  const all = [...calls.values()];
  // A client in this process has no wire.
  const names = costNames.filter((name) => all.some((cost) => cost[name] !== 0));
  const head = ["call", ...names.map((name) => costs[name].title)];
  const rows = [...calls].map(([call, cost]) => [call, ...names.map((name) => String(cost[name]))]);
  const widths = head.map((title, i) =>
    Math.max(title.length, ...rows.map((row) => (row[i] as string).length)),
  );
  const line = (cells: readonly string[]) =>
    `| ${cells.map((cell, i) => (i === 0 ? cell.padEnd(widths[i] as number) : cell.padStart(widths[i] as number))).join(" | ")} |`;
  const rule = widths.map((width, i) => (i === 0 ? "-".repeat(width) : `${"-".repeat(width - 1)}:`));
  return [line(head), line(rule), ...rows.map(line)].join("\n");
}

export function parsed(text: string): Table {
  const table = new Map<string, Measured>();
  for (const part of text.split(/^## /m).slice(1)) {
    const [client = "", ...lines] = part.trim().split("\n");
    const [head = [], , ...rows] = lines
      .filter((line) => line.startsWith("|"))
      .map((line) =>
        line
          .slice(1, -1)
          .split("|")
          .map((cell) => cell.trim()),
      );
    const columns = head.slice(1).map(nameOf);
    const calls = rows.map(([call = "", ...cells]) => {
      const figures = columns.map((name, i) => [name, figureOf(cells[i], `${client}: ${call}`)] as const);
      return [call, { ...nothing, ...Object.fromEntries(figures) }] as const;
    });
    table.set(client, new Map(calls));
  }
  return table;
}

const nothing = Object.fromEntries(costNames.map((name) => [name, 0])) as Cost;

function nameOf(title: string): CostName {
  const name = costNames.find((each) => costs[each].title === title);
  if (!name) throw new Error(`table.md has a column ${JSON.stringify(title)}, which nothing measures`);
  return name;
}

function figureOf(cell: string | undefined, where: string): number {
  if (!/^\d+$/.test(cell ?? "")) throw new Error(`table.md: ${where}: ${JSON.stringify(cell)} is no number`);
  return Number(cell);
}
