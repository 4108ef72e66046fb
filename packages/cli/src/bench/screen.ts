/** All that `holdfast bench` prints. With `--json`, stdout gets the result only. */
import { SingleBar } from "cli-progress";
import { colorsOf, note, print, printJson } from "../terminal.ts";
import type { BenchResult, SuiteResult } from "./result.ts";
import { type Suite, naive } from "./suite.ts";
import { tableOfFigures } from "./table.ts";

const mostColumns = 100;

/** Broken where the terminal ends; what follows the first line begins with so many blanks. */
function wrapped(text: string, indent = 0): string {
  const columns: number | undefined = process.stdout.columns;
  const width = Math.min(mostColumns, columns ?? mostColumns) - 1 - indent;
  const lines: string[] = [];
  for (const word of text.split(" ")) {
    const last = lines.at(-1);
    if (last !== undefined && last.length + 1 + word.length <= width)
      lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines.join(`\n${" ".repeat(indent)}`);
}

export class Screen {
  readonly #json: boolean;
  readonly #colors = colorsOf(process.stdout);
  #bar: SingleBar | undefined;

  constructor(json: boolean | undefined) {
    this.#json = json === true;
  }

  #say(text = ""): void {
    if (!this.#json) print(text);
  }

  head(
    result: Pick<BenchResult, "server" | "roundTripMs" | "connections" | "seconds" | "place" | "leftOut">,
  ): void {
    const { server, roundTripMs, connections, seconds, place, leftOut } = result;
    const where =
      server.address === undefined ? `${server.version}, of its own` : `${server.version}, ${server.address}`;
    this.#say(this.#colors.bold(where));
    this.#say(
      wrapped(
        `A round trip takes ${roundTripMs.toFixed(2)} ms, as SELECT 1 takes it. ${connections} connections, ${seconds} s for each line, in the ${place.what} ${place.name}, which is removed afterwards.`,
      ),
    );
    for (const { suite, why } of leftOut) this.#say(wrapped(`Left out: ${suite}: ${why}`));
  }

  start(suite: string, total: number): void {
    this.clear();
    if (!process.stderr.isTTY) return;
    this.#bar = new SingleBar({
      format: `${suite}  {bar}  {cell}`,
      stream: process.stderr,
      barsize: 24,
      barCompleteChar: "█",
      barIncompleteChar: "░",
      clearOnComplete: true,
      hideCursor: true,
    });
    this.#bar.start(total, 0, { cell: "" });
  }

  cell(suite: string, cell: string): void {
    if (this.#bar) this.#bar.update({ cell });
    else note(`${suite}: ${cell} …`);
  }

  step(): void {
    this.#bar?.increment();
  }

  /** Ends what moves. */
  clear(): void {
    this.#bar?.stop();
    this.#bar = undefined;
  }

  suite({ suite, about, rows, trials, meaning }: SuiteResult, { contestants }: Suite): void {
    this.clear();
    if (this.#json) return;
    const { bold, dim, red, green } = this.#colors;
    this.#say();
    this.#say(`${bold(suite)}: ${wrapped(about, suite.length + 2)}`);
    const names = Math.max(...Object.keys(contestants).map(({ length }) => length));
    for (const [name, what] of Object.entries(contestants))
      this.#say(dim(`  ${name.padEnd(names)}  ${wrapped(what, names + 4)}`));
    this.#say();
    const ratios = rows.map(({ ratio }) => (ratio < 100 ? ratio.toFixed(2) : String(Math.round(ratio))));
    const width = Math.max("ratio".length, ...ratios.map(({ length }) => length));
    const exactness = (contestant: string, again: number): string => {
      const repeated = again > 0 ? `, ${again} made again` : "";
      const trial = trials.find((each) => each.contestant === contestant);
      if (!trial) return repeated;
      if (!trial.exact) return `${red(`✗ ${trial.text}`)}${repeated}`;
      return `${contestant === naive ? "~ exact, by luck" : green("✓ exact")}${repeated}`;
    };
    this.#say(
      tableOfFigures(
        ["", "", "op/s", "p50 ms", "p99 ms", "ratio".padStart(width), ""],
        rows.map(({ cell, contestant, opsPerSecond, p50Ms, p99Ms, again }, i) => [
          cell === rows[i - 1]?.cell ? "" : cell,
          contestant,
          opsPerSecond >= 10 ? Math.round(opsPerSecond) : opsPerSecond,
          p50Ms ?? Number.NaN,
          p99Ms ?? Number.NaN,
          ratios[i]?.padStart(width) ?? "",
          exactness(contestant, again),
        ]),
        this.#colors,
      ),
    );
    this.#say();
    this.#say(wrapped(meaning));
  }

  end(result: BenchResult): void {
    if (this.#json) {
      printJson(result);
      return;
    }
    this.#say();
    this.#say(
      wrapped(
        "ratio: operations per second over those by hand. Exactness is tried apart from speed: all callers want the last ones at the same time, again and again. Most depends on the round trip: run it from where the application runs.",
      ),
    );
  }
}
