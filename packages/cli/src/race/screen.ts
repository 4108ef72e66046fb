/** What `holdfast race` prints: results to stdout, all else to stderr. */
import { stripVTControlCharacters } from "node:util";
import type { Progress } from "holdfast/testing";
import { describe } from "../describe.ts";
import { exitCodes, jsonErrorOf } from "../failure.ts";
import { printJson, printJsonError } from "../json.ts";
import { type Colors, colorsOf } from "../terminal.ts";
import { annotation } from "./annotations.ts";
import type { Finding } from "./findings.ts";
import { type Outcome, asJson, replayCommand, summary } from "./outcome.ts";
import type { Told } from "./place.ts";

const often = 100;

export class Screen {
  readonly #file: string;
  readonly #json: boolean;
  readonly #write: typeof process.stdout.write;
  readonly #out = colorsOf(process.stdout);
  readonly #err = colorsOf(process.stderr);
  /** Undefined if nobody watches, whatever its type says. */
  readonly #live: boolean = process.stderr.isTTY ?? false;
  #shown = -Infinity;

  constructor(file: string, json: boolean) {
    this.#file = file;
    this.#json = json;
    this.#write = process.stdout.write.bind(process.stdout);
  }

  /** What scenarios print from now on must not end up in the document. */
  guard(): void {
    if (this.#json) process.stdout.write = process.stderr.write.bind(process.stderr);
  }

  #print(text: string): void {
    this.#write(`${text}\n`);
  }

  /** Until all of it is out. */
  flush(): Promise<void> {
    return new Promise((resolve) => void this.#write("", () => resolve()));
  }

  note(text: string): void {
    this.clear();
    process.stderr.write(`${this.#err.dim(text)}\n`);
  }

  /** Whoever has stopped it knows. */
  complain(error: unknown): void {
    this.clear();
    const told = jsonErrorOf(error);
    if (told.exitCode === exitCodes.stopped) this.note("Stopped.");
    else process.stderr.write(`holdfast: ${told.message}\n`);
    printJsonError(told, this.#write);
  }

  progress(name: string, progress: Progress): void {
    const now = performance.now();
    if (!this.#live || now - this.#shown < often) return;
    this.#shown = now;
    // A line that wraps could not be written over.
    const line = progressLine(name, progress).slice(0, Math.max(0, (process.stderr.columns || 80) - 1));
    process.stderr.write(`\r\x1b[2K${this.#err.dim(line)}`);
  }

  clear(): void {
    if (this.#live && this.#shown > 0) process.stderr.write("\r\x1b[2K");
    this.#shown = -Infinity;
  }

  outcome(outcome: Outcome): void {
    this.clear();
    if (this.#json) return;
    const { red, dim } = this.#out;
    if (outcome.status === "error")
      return this.#print(`${red("!")} ${outcome.name}: could not run: ${describe(outcome.error)}\n`);
    this.#print(paint(outcome.report.text, this.#out));
    const command = replayCommand(this.#file, outcome);
    if (command) this.#print(`${dim(command)}\n`);
  }

  /** Beside the document, if stdout is one: GitHub reads both. */
  annotate(findings: readonly Finding[]): void {
    const write = this.#json ? process.stderr.write.bind(process.stderr) : this.#write;
    for (const finding of findings) write(`${annotation(finding)}\n`);
  }

  end(outcomes: readonly Outcome[], left: number, database: Told): void {
    if (this.#json)
      return printJson(
        {
          file: this.#file,
          database,
          scenarios: outcomes.map((outcome) => asJson(this.#file, outcome)),
          notRun: left,
        },
        this.#write,
      );
    const { green, red } = this.#out;
    const well = outcomes.every(({ status }) => status === "ok");
    this.#print((well ? green : red)(summary(outcomes, left)));
  }
}

export function progressLine(name: string, { isolation, runs, preemptions, queued, ms }: Progress): string {
  const parts = [
    name,
    ...(isolation ? [isolation.toUpperCase()] : []),
    count(runs, "run"),
    preemptions === undefined ? "at random" : count(preemptions, "switch"),
    ...(preemptions === undefined ? [] : [`${queued} queued`]),
    `${(ms / 1000).toFixed(1)} s`,
  ];
  return stripVTControlCharacters(parts.join(" · "));
}

const count = (n: number, what: string) =>
  `${n} ${n === 1 ? what : `${what}${what.endsWith("h") ? "es" : "s"}`}`;

/** The report's text in colours. Values come from a database: what they would do to a terminal is taken out. */
export function paint(text: string, colors: Colors): string {
  const { green, red, yellow, dim, bold, cyan } = colors;
  return text
    .split("\n")
    .map((raw) => {
      const line = stripVTControlCharacters(raw);
      if (line.startsWith("✓")) return `${green("✓")}${line.slice(1)}`;
      if (line.startsWith("✗")) return red(bold(line));
      if (line.startsWith(" ──")) return cyan(line);
      if (line.startsWith("Replay: ")) return `Replay: ${bold(line.slice(8))}`;
      if (!/^ *\d+ {2}/.test(line)) return line;
      return line
        .replace(/ {2}[^ ]+:\d+$/, (place) => dim(place))
        .replace(/ ⏳ waits for .*?(?= ✗ | {2}|$)/, (wait) => yellow(wait))
        .replace(/ {2}◄ stale/, (stale) => yellow(stale))
        .replace(/ ✗ .*?(?= {2}|$)/, (error) => red(error));
    })
    .join("\n");
}
