/** Another process that inserts numbers into a table, as an application would, until it is ended. */
import { type ChildProcess, spawn } from "node:child_process";
import { root } from "./command.ts";
import { eventually } from "./wait.ts";

export class LiveWriter implements AsyncDisposable {
  readonly #child: ChildProcess;
  #written = 0;

  /** `anew`: over a new connection for each. */
  constructor(url: string, table: string, anew = false) {
    this.#child = spawn(
      process.execPath,
      [`${root}test/workers/writer.ts`, url, table, anew ? "anew" : "kept"],
      { stdio: ["pipe", "pipe", "inherit"] },
    );
    let rest = "";
    this.#child.stdout?.on("data", (chunk: Buffer) => {
      const lines = (rest + chunk.toString()).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) this.#written = Number(line);
    });
  }

  /** When so many more rows are committed. */
  async more(n: number): Promise<void> {
    const from = this.#written;
    await eventually(() => {
      if (this.#written < from + n) throw new Error(`${this.#written} rows, and ${from + n} are awaited`);
    });
  }

  /** Returns how many rows it has committed. */
  async end(): Promise<number> {
    if (this.#child.exitCode === null) {
      const over = new Promise((resolve) => this.#child.once("close", resolve));
      this.#child.stdin?.end();
      await over;
    }
    return this.#written;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.end();
  }
}
