/** The command in a real terminal: a pseudo-terminal of the system, and a screen that understands what is written to it. */
import { spawn } from "@lydell/node-pty";
import xterm from "@xterm/headless";
import { bin, environment, root } from "./command.ts";

export interface TerminalOptions {
  readonly columns?: number;
  readonly rows?: number;
  readonly env?: NodeJS.ProcessEnv;
  readonly cwd?: string;
}

export interface Terminal {
  /** What somebody sees now, line by line, without blanks at the end. */
  screen(): Promise<string>;
  /** All lines, those that were scrolled away too. */
  all(): Promise<string>;
  /** Whether the full screen is in use, as by an editor. */
  full(): Promise<boolean>;
  /** Resolves to the screen as soon as this is on it. */
  until(what: string | RegExp): Promise<string>;
  type(keys: string): void;
  resize(columns: number, rows: number): void;
  kill(signal?: NodeJS.Signals): void;
  /** Its exit code. */
  readonly ended: Promise<number>;
}

/** Colours are on: `NO_COLOR` is for logs. */
export function terminal(args: readonly string[], options: TerminalOptions = {}): Terminal {
  const { columns = 100, rows = 40, cwd = root } = options;
  const { NO_COLOR: _, CI: __, ...env } = environment();
  const pty = spawn(process.execPath, [...bin, ...args], {
    cols: columns,
    rows,
    cwd,
    env: { ...env, TERM: "xterm-256color", ...options.env },
  });
  const view = new xterm.Terminal({ cols: columns, rows, scrollback: 10_000, allowProposedApi: true });
  let over = false;
  const changed = new Set<() => void>();
  const tell = (): void => {
    for (const look of changed) look();
  };
  pty.onData((data) => view.write(data, tell));
  // What the screen answers, such as where its cursor is.
  view.onData((data) => pty.write(data));
  const ended = new Promise<number>((resolve) =>
    pty.onExit(({ exitCode }) => {
      over = true;
      // What was written last may still be on its way.
      setTimeout(() => {
        tell();
        resolve(exitCode);
      }, 50);
    }),
  );
  const settled = () => new Promise<void>((resolve) => view.write("", resolve));
  const lines = (from: number, to: number): string => {
    const { active } = view.buffer;
    const texts: string[] = [];
    for (let y = from; y < to; y++) texts.push(active.getLine(y)?.translateToString(true) ?? "");
    return texts.join("\n").trimEnd();
  };
  const seen = () => lines(view.buffer.active.baseY, view.buffer.active.baseY + view.rows);
  return {
    async screen() {
      await settled();
      return seen();
    },
    async all() {
      await settled();
      return lines(0, view.buffer.active.length);
    },
    async full() {
      await settled();
      return view.buffer.active.type === "alternate";
    },
    async until(what) {
      const { promise, resolve, reject } = Promise.withResolvers<string>();
      const look = (): void => {
        const text = seen();
        if (typeof what === "string" ? text.includes(what) : what.test(text)) resolve(text);
        else if (over) reject(new Error(`It ended, and never showed ${String(what)}:\n${text}`));
      };
      changed.add(look);
      await settled();
      look();
      return promise.finally(() => changed.delete(look));
    },
    type: (keys) => pty.write(keys),
    resize(width, height) {
      pty.resize(width, height);
      view.resize(width, height);
    },
    kill: (signal) => pty.kill(signal),
    ended,
  };
}
