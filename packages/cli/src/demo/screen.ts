/** All that the demo prints. With `--json`, stdout gets the result only. Bars move on stderr, where somebody watches. */
import { SingleBar } from "cli-progress";
import type { DemoOptions } from "./options.ts";
import { colorsOf, note, print, printJson, table } from "../terminal.ts";
import { type Race, type Way, workMs } from "./race.ts";
import {
  type DemoResult,
  type Next,
  type Verdict,
  type WayResult,
  conclusion,
  marks,
  reasonOf,
  saidOf,
  speedOf,
  timesOf,
} from "./result.ts";

const indent = "   ";
/** Code and results, below the name of the way: so that they fit a terminal of 80 columns. */
const inner = `${indent}  `;
const mostColumns = 100;

export class Screen {
  readonly #json: boolean;
  readonly #colors = colorsOf(process.stdout);
  #bar: SingleBar | undefined;

  constructor({ json }: Pick<DemoOptions, "json">) {
    this.#json = json === true;
  }

  #say(text = ""): void {
    if (!this.#json) print(text);
  }

  /** Broken where the terminal ends, and at 100 columns in any case: longer lines are hard to read. */
  #tell(text: string, start = ""): void {
    // Undefined if it is no terminal, whatever its type says.
    const columns: number | undefined = process.stdout.columns;
    const width = Math.min(mostColumns, columns ?? mostColumns) - 1;
    const lines: string[] = [];
    for (const word of text.split(" ")) {
      const last = lines.at(-1);
      if (last !== undefined && start.length + last.length + 1 + word.length <= width)
        lines[lines.length - 1] = `${last} ${word}`;
      else lines.push(word);
    }
    for (const line of lines) this.#say(start + line);
  }

  /** Ends what moves. */
  clear(): void {
    this.#bar?.stop();
    this.#bar = undefined;
  }

  #start(format: string, total: number): void {
    this.clear();
    this.#bar = new SingleBar({
      format,
      stream: process.stderr,
      barsize: 24,
      barCompleteChar: "█",
      barIncompleteChar: "░",
      clearOnComplete: true,
      hideCursor: true,
    });
    this.#bar.start(total, 0);
  }

  working(text: string): void {
    if (process.stderr.isTTY) this.#start(text, 1);
    else note(text);
  }

  introduce(
    { postgres, server, processes, callers }: Omit<DemoResult, "exact" | "seconds" | "races">,
    races: number,
  ): void {
    this.clear();
    const where =
      server === undefined
        ? `on a PostgreSQL ${postgres} of its own`
        : `on ${server} (PostgreSQL ${postgres}), in a database that is dropped again`;
    const what = races === 1 ? "A race" : `${races} races`;
    this.#say(this.#colors.bold(`${what}: code as it is often written, and the same with Holdfast`));
    this.#tell(
      `${processes} processes with ${callers} callers each, like ${processes} instances of a service, ${where}. Between a check and its write there is ${workMs} ms of other work. What counts is what the tables hold afterwards.`,
    );
  }

  begin(nth: number, { title }: Race, what: string): void {
    this.#say();
    this.#say(this.#colors.bold(`${nth}. ${title}`));
    this.#tell(what, indent);
  }

  start({ name, code }: Way, total: number, does: string): void {
    this.#say();
    this.#say(`${indent}${name}`);
    for (const line of code) this.#say(`${inner}${this.#colors.dim(line)}`);
    this.#start(`${inner}{bar}  {value}/{total} ${does}`, total);
  }

  progress(finished: number): void {
    this.#bar?.update(finished);
  }

  finish(result: WayResult): void {
    this.clear();
    this.#say(`${inner}${this.#paint(result.verdict, `${marks[result.verdict]} ${saidOf(result)}`)}`);
    const reason = reasonOf(result);
    if (reason !== "") this.#tell(reason, inner);
  }

  #paint(verdict: Verdict, text: string): string {
    const { green, red, yellow } = this.#colors;
    return { exact: green, wrong: red, failed: yellow, lucky: yellow }[verdict](text);
  }

  result(result: DemoResult, { more, own }: Next): void {
    if (this.#json) {
      printJson(result);
      return;
    }
    this.#say();
    this.#say(
      table(
        ["written", "what the tables say", "op/s", "p50/p99 ms"],
        rowsOf(result, this.#paint.bind(this)),
        this.#colors,
      ),
    );
    this.#say();
    this.#tell(conclusion(result));
    this.#say();
    this.#say("More:");
    const width = Math.max(...more.map(([what]) => what.length));
    for (const [what, why] of more) this.#say(`  ${what.padEnd(width)}  ${why}`);
    this.#say();
    this.#say(`${own.why}:`);
    this.#say(`  ${this.#colors.bold(own.command)}`);
  }
}

type Paint = (verdict: Verdict, text: string) => string;

function rowsOf({ races }: DemoResult, paint: Paint): string[][] {
  const ways = races.flatMap((race) => race.ways);
  const right = (title: string, of: (way: WayResult) => string): ((way: WayResult) => string) => {
    const width = Math.max(title.length, ...ways.map((way) => of(way).length));
    return (way) => of(way).padStart(width);
  };
  const [speed, times] = [right("op/s", speedOf), right("p50/p99 ms", timesOf)];
  return races.flatMap((race) =>
    race.ways.map((way) => [
      way.way === "naive" ? `${race.race}: naive` : `  ${way.way}`,
      `${paint(way.verdict, marks[way.verdict])} ${saidOf(way)}`,
      speed(way),
      times(way),
    ]),
  );
}
