import { existsSync } from "node:fs";
import { stripVTControlCharacters } from "node:util";
import Table from "cli-table3";
import picocolors from "picocolors";
import type { DemoOptions } from "../commands/demo.ts";
import { type Contestant, contestants } from "./protocol.ts";

export interface Row {
  readonly contestant: Contestant;
  /** Rows in the table. */
  readonly granted: number;
  readonly leaked: number;
  readonly refused: number;
  readonly failed: number;
  readonly mainCode?: string;
  readonly opsPerSecond: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly exact: boolean;
}

const names: Record<Contestant, string> = {
  naive: "naive",
  serializable: "SERIALIZABLE",
  holdfast: "Holdfast",
};
const explanations: Record<Contestant, string> = {
  naive: "BEGIN, check, write, COMMIT, in READ COMMITTED",
  serializable: "the same in SERIALIZABLE, without retries",
  holdfast: 'the same in hf.transaction({ lock: key("upload", user) }, …)',
};
const barWidth = 24;
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
]) {
  frameless[part] = "";
}

/** All that the demo prints. With `--json` it is the result only. */
export class Screen {
  readonly #options: DemoOptions;
  readonly #out = process.stdout;
  /** A line that is written over: for people who watch, not for logs. */
  readonly #live: boolean;
  readonly #colors: ReturnType<typeof picocolors.createColors>;

  constructor(options: DemoOptions) {
    this.#options = options;
    // Undefined if it is none, whatever its type says; and for picocolors that would mean "find out".
    const terminal: boolean = this.#out.isTTY ?? false;
    this.#live = terminal && options.json !== true;
    // Continuous integration counts as a terminal for picocolors; here it does not.
    this.#colors = picocolors.createColors(terminal && picocolors.isColorSupported);
  }

  say(text = ""): void {
    if (this.#options.json) return;
    this.clear();
    this.#out.write(`${text}\n`);
  }

  clear(): void {
    if (this.#live) this.#out.write("\r\x1b[2K");
  }

  working(text: string): void {
    if (this.#live) this.#line(this.#colors.dim(text));
    else this.say(text);
  }

  introduce(version: string): void {
    const { processes, callers, calls, limit } = this.#options;
    const { bold, dim } = this.#colors;
    this.say(`${bold(`A quota of ${limit} uploads per user`)}, on PostgreSQL ${version}.`);
    this.say(
      `${calls} calls for one user, by ${processes * callers} callers in ${processes} processes, each:`,
    );
    this.say(dim("  SELECT count(*) …; if it is below the quota, INSERT …"));
    this.say();
    const width = Math.max(...contestants.map((contestant) => names[contestant].length));
    for (const contestant of contestants) {
      this.say(`  ${names[contestant].padEnd(width)}  ${dim(explanations[contestant])}`);
    }
    this.say();
  }

  progress(contestant: Contestant, finished: number): void {
    if (!this.#live) return;
    const { calls } = this.#options;
    const done = Math.round((barWidth * finished) / calls);
    const { cyan, dim } = this.#colors;
    const bar = cyan("█".repeat(done)) + dim("░".repeat(barWidth - done));
    this.#line(`  ${names[contestant].padEnd(12)}  ${bar}  ${finished}/${calls} calls`);
  }

  #line(text: string): void {
    // A line that wraps could not be written over. Without colours it is safe to cut.
    const tooLong = stripVTControlCharacters(text).length >= this.#out.columns;
    this.#out.write(
      `\r\x1b[2K${tooLong ? stripVTControlCharacters(text).slice(0, this.#out.columns - 1) : text}`,
    );
  }

  finished(row: Row): void {
    if (this.#live) return;
    const { granted, leaked, refused, opsPerSecond } = row;
    this.say(
      `${names[row.contestant]}: ${granted} granted, ${leaked} leaked, ${refused} refused, ${failures(row)} failed, ` +
        `${Math.round(opsPerSecond)} op/s`,
    );
  }

  result(rows: readonly Row[]): void {
    if (this.#options.json) {
      const { processes, callers, calls, limit } = this.#options;
      this.#out.write(`${JSON.stringify({ processes, callers, calls, limit, rows })}\n`);
      return;
    }
    if (!this.#live) this.say();
    this.say(this.#table(rows));
    this.say();
    for (const row of rows) this.say(this.#verdict(row));
    this.say();
    for (const line of whatNext()) this.say(line);
  }

  #table(rows: readonly Row[]): string {
    const { green, red, yellow, bold } = this.#colors;
    const table = new Table({
      head: ["", "granted", "leaked", "refused", "failed", "op/s", "p50 ms", "p99 ms"].map((title) =>
        bold(title),
      ),
      colAligns: ["left", ...Array.from({ length: 7 }, () => "right" as const)],
      // Without a frame it fits into 80 columns. Its own colours know nothing of NO_COLOR.
      chars: frameless,
      style: { head: [], border: [], compact: true, "padding-left": 0, "padding-right": 0 },
    });
    for (const row of rows) {
      table.push([
        row.exact ? green(names[row.contestant]) : names[row.contestant],
        row.exact ? green(row.granted) : String(row.granted),
        row.leaked > 0 ? red(row.leaked) : green(row.leaked),
        String(row.refused),
        row.failed > 0 ? yellow(failures(row)) : green(row.failed),
        String(Math.round(row.opsPerSecond)),
        row.p50Ms.toFixed(1),
        row.p99Ms.toFixed(1),
      ]);
    }
    return table.toString();
  }

  #verdict(row: Row): string {
    const { calls, limit } = this.#options;
    const { green, red, yellow } = this.#colors;
    const name = names[row.contestant];
    const due = Math.min(limit, calls);
    if (row.exact) return `${green("✓")} ${name}: exactly ${due} granted, nobody failed.`;
    if (row.leaked > 0)
      return `${red("✗")} ${name}: ${row.leaked} over the quota. Their checks were true when they ran.`;
    const missing = row.granted < due ? `, ${due - row.granted} uploads of ${due} missing` : "";
    return `${yellow("!")} ${name}: nothing leaked, but ${row.failed} calls failed${missing}.`;
  }
}

function failures({ failed, mainCode }: Row): string {
  return mainCode === undefined ? String(failed) : `${failed} (${mainCode})`;
}

function whatNext(): string[] {
  const inCheckout = existsSync(new URL("../../../../examples/quota/index.ts", import.meta.url));
  if (!inCheckout) return ["Next: npm install holdfast, and its README."];
  return [
    "Next:",
    "  README.md                 how to put it into your code",
    "  docs/choose.md            a lock, a constraint, SERIALIZABLE: which one when",
    "  examples/quota            this quota, as code to copy",
    "  npm run bench -- locks    what it costs, next to the textbook",
  ];
}
