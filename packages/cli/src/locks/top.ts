/** Who holds what, live on the full screen. */
import { emitKeypressEvents } from "node:readline";
import { stripVTControlCharacters } from "node:util";
import { describe } from "../describe.ts";
import { Failure, exitCodes } from "../failure.ts";
import { type Server, connect } from "../server.ts";
import { type Colors, age, colorsOf, fit } from "../terminal.ts";
import { type Target, end, introduce, outcome, refusal, targetOf } from "./kill.ts";
import { type Look, look } from "./look.ts";
import { shown } from "../text.ts";
import { counts, drawn, viewOf } from "./view.ts";

export interface TopOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly blocked?: true;
}

/** At most one look a second, and a server that is slow gets as long a rest as a look takes. */
const everyMs = 1000;

const screen = {
  // The other screen, without a cursor, and lines that are cut and not wrapped.
  open: "\x1b[?1049h\x1b[?25l\x1b[?7l",
  close: "\x1b[?7h\x1b[?25h\x1b[?1049l",
  home: "\x1b[H",
  restOfLine: "\x1b[K",
  restOfScreen: "\x1b[J",
};

export async function runTop(options: TopOptions): Promise<void> {
  const { stdin, stdout } = process;
  if (!stdin.isTTY || !stdout.isTTY)
    throw new Failure("holdfast top needs a terminal. holdfast locks prints the same once, also as JSON.");
  await using server = await connect({
    url: options.url,
    schema: options.schema,
    application: `holdfast top ${process.pid}`,
    most: 1,
  });
  const top = new Top(server, options.blocked ?? false, colorsOf(stdout));
  const onResize = () => top.draw();
  const onSignal = () => top.quit(exitCodes.stopped);
  const onKey = (text: string | undefined, { name, ctrl, sequence }: Key) =>
    top.press(ctrl ? `ctrl-${name}` : (text ?? name ?? sequence ?? ""), name ?? "");
  // Also if something throws where nobody catches it: a terminal that is left like this is of no use.
  const restore = () => {
    stdout.write(screen.close);
    if (stdin.isTTY) stdin.setRawMode(false);
  };
  process.on("exit", restore);
  const signals = ["SIGTERM", "SIGINT", "SIGHUP"] as const;
  for (const signal of signals) process.on(signal, onSignal);
  stdout.write(screen.open);
  stdout.on("resize", onResize);
  emitKeypressEvents(stdin);
  stdin.setRawMode(true);
  stdin.on("keypress", onKey);
  stdin.resume();
  try {
    process.exitCode = await top.run();
  } finally {
    stdin.off("keypress", onKey);
    stdin.pause();
    stdout.off("resize", onResize);
    for (const signal of signals) process.off(signal, onSignal);
    process.off("exit", restore);
    restore();
  }
}

interface Key {
  readonly name?: string;
  readonly ctrl?: boolean;
  readonly sequence?: string;
}

class Top {
  readonly #server: Server;
  readonly #colors: Colors;
  readonly #over = Promise.withResolvers<number>();
  #blocked: boolean;
  #seen: Look | undefined;
  /** How long the last look took. */
  #tookMs = 0;
  /** When the look that is under way began. */
  #lookingSince: number | undefined;
  /** Why there is nothing new, and since when. */
  #trouble: { readonly text: string; readonly since: number } | undefined;
  #message = "";
  /** One above the other, those of which each line is about. */
  #sessions: readonly string[] = [];
  #selected: string | undefined;
  #top = 0;
  #asking: Target | undefined;
  #busy = false;
  #ended = false;
  #wake: (() => void) | undefined;

  constructor(server: Server, blocked: boolean, colors: Colors) {
    this.#server = server;
    this.#blocked = blocked;
    this.#colors = colors;
  }

  async run(): Promise<number> {
    // A look that does not come back is shown to take longer and longer.
    const clock = setInterval(() => this.draw(), everyMs);
    const looping = this.#loop();
    looping.catch((error: unknown) => this.#over.reject(error));
    try {
      return await this.#over.promise;
    } finally {
      this.#ended = true;
      clearInterval(clock);
      this.#wake?.();
    }
  }

  quit(code: number): void {
    this.#over.resolve(code);
  }

  async #loop(): Promise<void> {
    while (!this.#ended) {
      const started = performance.now();
      // While a session is being ended, that looks too, and one at a time is enough.
      if (!this.#busy) await this.#look();
      this.draw();
      const tookMs = performance.now() - started;
      const rest = Math.max(everyMs - tookMs, tookMs, 100);
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, rest);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  async #look(): Promise<void> {
    const started = (this.#lookingSince = performance.now());
    try {
      this.#seen = await look(this.#server);
      this.#tookMs = performance.now() - started;
      this.#trouble = undefined;
    } catch (error) {
      this.#trouble = { text: shown(describe(error)), since: this.#trouble?.since ?? started };
    } finally {
      this.#lookingSince = undefined;
    }
  }

  press(key: string, name: string): void {
    if (key === "ctrl-c") return this.quit(exitCodes.stopped);
    if (this.#asking) {
      const target = this.#asking;
      this.#asking = undefined;
      this.#message = key === "y" ? "" : "Nothing was done.";
      if (key === "y") void this.#end(target);
      return this.draw();
    }
    if (key === "q") return this.quit(exitCodes.ok);
    if (name === "down" || key === "j") this.#move(1);
    else if (name === "up" || key === "k") this.#move(-1);
    else if (name === "pagedown") this.#move(10);
    else if (name === "pageup") this.#move(-10);
    else if (key === "b") {
      this.#blocked = !this.#blocked;
      this.#message = "";
    } else if (key === "x" || key === "K" || name === "delete") void this.#ask();
    this.draw();
  }

  #move(by: number): void {
    const sessions = this.#sessions;
    const at = sessions.indexOf(this.#selected ?? "");
    this.#selected = sessions[Math.max(0, Math.min(sessions.length - 1, at + by))] ?? this.#selected;
  }

  async #ask(): Promise<void> {
    const { kind } = this.#server;
    const id = this.#selected;
    if (this.#busy) return;
    if (kind !== "sqlite" && (id === undefined || !this.#seen)) this.#message = "There is no session to end.";
    else {
      this.#busy = true;
      try {
        const target =
          kind === "sqlite" || id === undefined || !this.#seen
            ? await refusal(this.#server)
            : await targetOf(this.#server, this.#seen, id);
        if (typeof target === "string") this.#message = target;
        else this.#asking = target;
      } catch (error) {
        this.#message = shown(describe(error));
      } finally {
        this.#busy = false;
      }
    }
    this.draw();
  }

  async #end(target: Target): Promise<void> {
    this.#busy = true;
    const say = (text: string) => {
      this.#message = text;
      this.draw();
    };
    try {
      say(`Session ${target.session.id} …`);
      const how = { way: "cancel, then terminate", patience: 2000, watch: 3000 } as const;
      const warnings: string[] = [];
      const result = await end(this.#server, target, how, { say, warn: (text) => warnings.push(text) });
      say([outcome(result), ...warnings].join(" "));
    } catch (error) {
      say(shown(describe(error)));
    } finally {
      this.#busy = false;
      this.#wake?.();
    }
  }

  draw(): void {
    if (this.#ended) return;
    // Some terminals say that they have none.
    const columns = process.stdout.columns || 80;
    const rows = process.stdout.rows || 24;
    const { bold, dim, inverse, red } = this.#colors;
    const foot = this.#foot(columns);
    const body = this.#body(columns);
    const room = Math.max(1, rows - 2 - foot.length);
    const at = body.findIndex(({ session }) => session === this.#selected);
    const last = body.findLastIndex(({ session }) => session === this.#selected);
    if (at >= 0) this.#top = Math.max(last - room + 1, Math.min(this.#top, at));
    this.#top = Math.max(0, Math.min(this.#top, body.length - room));
    const visible = body.slice(this.#top, this.#top + room);
    const head = this.#seen ? counts(this.#seen) : "looking …";
    const lines = [
      `${bold("holdfast top")}  ${head}${this.#blocked ? ", blocked only" : ""}  ${this.#trouble ? red("no connection") : dim(this.#pace())}`,
      dim(this.#server.shown),
      ...visible.map(({ session, text }) =>
        session !== undefined && session === this.#selected
          ? inverse(fit(stripVTControlCharacters(text), columns).padEnd(columns))
          : text,
      ),
    ];
    while (lines.length < rows - foot.length) lines.push("");
    lines.push(...foot);
    const text = lines
      .slice(0, rows)
      .map((line) => fit(line, columns) + screen.restOfLine)
      .join("\r\n");
    process.stdout.write(screen.home + text + screen.restOfScreen);
  }

  /** How long the server takes to answer says how busy it is. */
  #pace(): string {
    const since = this.#lookingSince;
    const now = since === undefined ? 0 : performance.now() - since;
    if (now > everyMs) return `the server has not answered for ${age(now)}`;
    return `look ${age(this.#tookMs)}, every ${age(Math.max(everyMs, 2 * this.#tookMs))}`;
  }

  /** Lines as they are drawn, and whom each is about. In a narrow one, of the selected session more than its lock. */
  #body(columns: number): readonly { readonly session?: string; readonly text: string }[] {
    if (!this.#seen) return [];
    const view = viewOf(this.#seen, this.#colors, this.#blocked);
    const both = [...view.waiting, ...view.held];
    this.#sessions = [...new Set(both.map(({ session }) => session.id))];
    if (both.length === 0)
      return ["", this.#blocked ? "Nobody waits for a lock." : "Nobody holds a lock or a lease."].map(
        (text) => ({ text }),
      );
    if (!this.#sessions.includes(this.#selected ?? "") && !this.#asking) this.#selected = this.#sessions[0];
    const { head, lines } = drawn(both, this.#colors, columns, this.#selected ?? "");
    const first = lines.findIndex(({ of }) => of >= view.waiting.length);
    const split = first > 0 ? [...lines.slice(0, first), { text: "" }, ...lines.slice(first)] : lines;
    return [{ text: "" }, ...head.map((text) => ({ text })), ...split];
  }

  #foot(columns: number): string[] {
    const { dim, red, yellow, bold } = this.#colors;
    if (this.#asking) {
      const about = introduce(this.#asking);
      const shownLines = about.length > 5 ? [...about.slice(0, 4), `  and ${about.length - 4} more`] : about;
      return [
        "",
        ...shownLines,
        bold(yellow(`End session ${this.#asking.session.id}? y: yes, any other key: no`)),
      ];
    }
    const lines: string[] = [];
    lines.push(...(this.#seen?.notes ?? []).flatMap((text) => wrapped(text, columns)).map(yellow));
    if (this.#trouble)
      lines.push(
        red(`${this.#trouble.text} (for ${age(performance.now() - this.#trouble.since)}; it is tried again)`),
      );
    if (this.#message !== "") lines.push(...wrapped(this.#message, columns));
    lines.push(dim("↑↓ j k select   x end session   b blocked only   q quit"));
    return lines;
  }
}

function wrapped(text: string, columns: number): string[] {
  const lines: string[] = [];
  for (let rest = text; rest !== "" && lines.length < 3; rest = rest.slice(columns))
    lines.push(rest.slice(0, columns));
  return lines;
}
