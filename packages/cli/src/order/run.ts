/** `holdfast order`: reads what processes have written, and tells. */
import { readFile } from "node:fs/promises";
import { relative } from "node:path";
import { describe } from "../describe.ts";
import { Failure, exitCodes } from "../failure.ts";
import { printTable } from "../patterns/show.ts";
import { type Colors, colorsOf, print, printJson } from "../terminal.ts";
import { plural, shown } from "../text.ts";
import { type Line, type Order, type Step, merged } from "./graph.ts";

export interface OrderOptions {
  readonly json?: true;
  readonly mermaid?: true;
}

/** Returns the exit code. */
export async function runOrder(files: readonly string[], options: OrderOptions): Promise<number> {
  const lines = (await Promise.all(files.map(read))).flat();
  const order = merged(lines);
  if (options.json) printJson({ files, ...order });
  else if (options.mermaid) print(diagram(order));
  else say(order, plural(files.length, "file"), colorsOf(process.stdout));
  return order.inversions.length > 0 ? exitCodes.no : exitCodes.ok;
}

async function read(file: string): Promise<Line[]> {
  const text = await readFile(file, "utf8").catch((cause: unknown) => {
    throw new Failure(`${file} could not be read: ${describe(cause)}`, { cause });
  });
  return text.split("\n").flatMap((line, i) => (line.trim() === "" ? [] : [parse(line, `${file}:${i + 1}`)]));
}

function parse(line: string, place: string): Line {
  let found: unknown;
  try {
    found = JSON.parse(line);
  } catch {
    // Told below.
  }
  const { holdfast, from, to } = (found ?? {}) as Record<string, unknown>;
  if (holdfast !== "order" || typeof from !== "string" || typeof to !== "string")
    throw new Failure(
      `${place} is no line of an order of locks. Such a file is written by processes that run with HOLDFAST_ORDER=FILE.`,
    );
  const { holdfast: _, ...rest } = found as Line & { holdfast: unknown };
  return rest;
}

function say({ locks, steps, inversions }: Order, from: string, colors: Colors): void {
  if (steps.length === 0) return print(`No two locks were taken one after the other, in ${from}.`);
  print(colors.bold(`The order of locks, from ${from}:`));
  print(`  ${locks.map(shown).join(", ")}`);
  print();
  printTable(["held", "then", "at", "and at", "processes"], steps.map(cells));
  print();
  if (inversions.length === 0) return print("All take them in one order.");
  print(colors.red(`${plural(inversions.length, "inversion")}: two of these at once are a deadlock.`));
  for (const round of inversions) {
    print();
    for (const { from: held, to, way, first, second } of round)
      print(
        `  ${shown(held)} (${place(first)}), then ${shown(to)} (${place(second)})${way ? `, ids ${way}` : ""}`,
      );
  }
  print();
  print("Take them in one order, or in one call: tx.lock([…]), tx.lockAll([…]).");
}

function cells({ from, to, way, first, second, processes }: Step): (string | number)[] {
  return [shown(from), way ? `${shown(to)} (ids ${way})` : shown(to), place(first), place(second), processes];
}

function place(path: string | undefined): string {
  if (path === undefined) return "?";
  const near = relative(process.cwd(), path);
  return shown(near.startsWith("..") ? path : near);
}

/** https://mermaid.js.org */
function diagram({ locks, steps, inversions }: Order): string {
  const wrong = new Set(inversions.flat());
  const id = (name: string) => `n${locks.indexOf(name)}`;
  const text = (name: string) => shown(name).replaceAll('"', "#quot;");
  return [
    "flowchart LR",
    ...locks.map((name) => `  ${id(name)}["${text(name)}"]`),
    ...steps.map((step) => `  ${id(step.from)} ${wrong.has(step) ? "==>" : "-->"} ${id(step.to)}`),
    ...steps.flatMap((step, i) => (wrong.has(step) ? [`  linkStyle ${i} stroke:red`] : [])),
  ].join("\n");
}
