/** Prometheus' own tool: whether it reads what is exposed, and what its rules say of figures over time. */
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { DebianPackage } from "./debian.ts";

const PROGRAM = "/usr/bin/promtool";

export const prometheusPackage: DebianPackage = { name: "prometheus", installed: () => existsSync(PROGRAM) };

/** Why it is not here; undefined: it is. */
export function noPromtool(): string | undefined {
  return prometheusPackage.installed() ? undefined : `promtool is not available: there is no ${PROGRAM}`;
}

/** Resolves to what it says; rejects with that if it is not content. */
export function promtool(args: readonly string[], input = ""): Promise<string> {
  return new Promise((resolve, reject) => {
    const child = spawn(PROGRAM, args, { stdio: ["pipe", "pipe", "pipe"] });
    let said = "";
    child.stdout.on("data", (chunk) => (said += String(chunk)));
    child.stderr.on("data", (chunk) => (said += String(chunk)));
    child.once("error", reject);
    child.once("close", (code) =>
      code === 0 ? resolve(said) : reject(new Error(`promtool ${args.join(" ")}: ${said}`)),
    );
    child.stdin.on("error", () => {});
    child.stdin.end(input);
  });
}

/** What was scraped, by name and labels; undefined: the process was not there. */
export type Scrape = ReadonlyMap<string, number> | undefined;

export interface Question {
  readonly at: string;
  readonly expr: string;
  /** By labels, as promtool writes them. */
  readonly answer: Readonly<Record<string, number>>;
}

/** Seconds from one scrape to the next. */
const interval = 30;

/** Scrapes of one process, in the order of time. */
export class Timeline {
  readonly #scrapes: Scrape[] = [];
  readonly #marks = new Map<string, number>();

  /** The process is scraped, and nothing changes for as many minutes. */
  add(mark: string, scrape: Scrape, minutes: number): this {
    this.#marks.set(mark, this.#scrapes.length);
    for (let i = 0; i < (minutes * 60) / interval; i++) this.#scrapes.push(scrape);
    return this;
  }

  /** So many minutes after that scrape. */
  at(mark: string, minutes: number): string {
    const found = this.#marks.get(mark);
    if (found === undefined) throw new Error(`there is no ${mark}`);
    return `${found * interval + minutes * 60}s`;
  }

  /** As Prometheus keeps them: what is missing in a scrape is marked as stale. */
  #series(): { series: string; values: string }[] {
    const names = new Set(this.#scrapes.flatMap((scrape) => [...(scrape?.keys() ?? [])]));
    return [...names].map((name) => {
      let there = false;
      const values = this.#scrapes.map((scrape) => {
        const value = scrape?.get(name);
        const ended = there && value === undefined;
        there = value !== undefined;
        return value === undefined ? (ended ? "stale" : "_") : String(value);
      });
      return { series: labelled(name, { job: "api", instance: "a:1" }), values: values.join(" ") };
    });
  }

  /** Throws what promtool says of the answers that differ. */
  async ask(rules: string, questions: readonly Question[]): Promise<void> {
    const folder = mkdtempSync(join(tmpdir(), "holdfast-rules-"));
    try {
      const file = join(folder, "test.json");
      writeFileSync(join(folder, "rules.yml"), rules);
      // What is JSON is YAML, too.
      writeFileSync(
        file,
        JSON.stringify({
          rule_files: ["rules.yml"],
          evaluation_interval: `${interval}s`,
          tests: [
            {
              interval: `${interval}s`,
              input_series: this.#series(),
              promql_expr_test: questions.map(({ at, expr, answer }) => ({
                expr,
                eval_time: at,
                exp_samples: Object.entries(answer).map(([labels, value]) => ({ labels, value })),
              })),
            },
          ],
        }),
      );
      await promtool(["test", "rules", file]);
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  }
}

function labelled(name: string, labels: Readonly<Record<string, string>>): string {
  const more = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  return name.endsWith("}") ? `${name.slice(0, -1)},${more.join(",")}}` : `${name}{${more.join(",")}}`;
}
