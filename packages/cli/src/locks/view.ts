/** Who holds what as lines of a table: those in the way with everybody behind them as a tree, then what nobody waits for. */
import { stripVTControlCharacters } from "node:util";
import { type Colors, age, fit, table } from "../terminal.ts";
import { shown } from "../text.ts";
import type { Knot } from "./chains.ts";
import { type Entry, type Look, type Who, plainName } from "./look.ts";

export interface Line {
  /** Who it is about. */
  readonly session: Who;
  /** From the root of its tree on, whether it is the last one there; empty: it is a root, or in no tree. */
  readonly place: readonly boolean[];
  /** Others are below it. */
  readonly parent: boolean;
  readonly age: string;
  readonly lock: string;
}

export interface View {
  /** Roots of chains, and below them who waits. */
  readonly waiting: readonly Line[];
  readonly held: readonly Line[];
}

export function viewOf({ at, entries, chains }: Look, colors: Colors, blocked: boolean): View {
  const waiting: Line[] = [];
  for (const chain of chains) grow(chain, [], at, colors, waiting);
  if (blocked) return { waiting, held: [] };
  const inTheWay = new Set<Entry>();
  const collect = ({ holds, waiters }: Knot): void => {
    for (const entry of holds) inTheWay.add(entry);
    for (const each of waiters) collect(each);
  };
  for (const chain of chains) collect(chain);
  const held = entries
    .filter((entry) => entry.granted && !inTheWay.has(entry))
    .map((entry): Line => ({
      session: entry.session,
      place: [],
      parent: false,
      age: since(entry.session.since, at),
      lock: nameOf(entry, colors) + aside(entry, at, colors),
    }));
  return { waiting, held };
}

function grow(knot: Knot, place: readonly boolean[], at: Date, colors: Colors, lines: Line[]): void {
  const { session, holds, waits, waiters } = knot;
  const own = waits.length > 0;
  const waited = Math.max(...waits.map(({ waitingMs }) => waitingMs ?? -1));
  const list = (entries: readonly Entry[]) =>
    entries
      .map((entry) => nameOf(entry, colors) + (entry.granted ? aside(entry, at, colors) : ""))
      .join(", ");
  const does = own ? `waits for ${list(waits)}` : `holds ${list(holds)}`;
  lines.push({
    session,
    place,
    parent: waiters.length > 0,
    age: own ? (waited < 0 ? "" : age(waited)) : since(session.since, at),
    lock: own ? colors.yellow(does) : does,
  });
  for (const [i, each] of waiters.entries())
    grow(each, [...place, i === waiters.length - 1], at, colors, lines);
}

function since(date: Date | undefined, at: Date): string {
  return date ? age(at.getTime() - date.getTime()) : "";
}

function nameOf({ name, kind }: Entry, colors: Colors): string {
  const text = shown(plainName(name));
  return kind === "advisory" || kind === "lock row" ? colors.bold(text) : text;
}

/** What is worth knowing besides the name: a lease that runs out, a mode that is not the usual one. */
function aside({ kind, mode, until, fence }: Entry, at: Date, colors: Colors): string {
  const words: string[] = [];
  if (kind === "lease" || kind === "schedule" || kind === "queue") {
    words.push(kind === "lease" ? "lease" : `lease of the ${kind}`);
    if (fence !== undefined) words.push(`fence ${fence}`);
    if (until) words.push(`${age(until.getTime() - at.getTime())} left`);
  }
  const how = modeOf(mode);
  if (how !== "exclusive") words.push(shown(how));
  return words.length > 0 ? colors.dim(` (${words.join(", ")})`) : "";
}

/** ExclusiveLock, X,REC_NOT_GAP and GET_LOCK are all the same to whoever waits. */
function modeOf(mode: string): string {
  if (/^(?:exclusive|ExclusiveLock|GET_LOCK|X\b.*)$/.test(mode)) return "exclusive";
  if (/^(?:shared|ShareLock|S\b.*)$/.test(mode)) return "shared";
  return mode
    .replace(/Lock$/, "")
    .replaceAll(/(?<=[a-z])(?=[A-Z])/g, " ")
    .replaceAll("_", " ")
    .toLowerCase();
}

export function counts({ entries, chains }: Look): string {
  const waiting = new Set(entries.filter(({ granted }) => !granted).map(({ session }) => session.id)).size;
  const held = entries.filter(({ granted }) => granted).length;
  const inTheWay = chains.filter(({ waiters }) => waiters.length > 0).length;
  if (waiting === 0) return `${held} held, nobody waits`;
  return `${held} held, ${waiting} ${waiting === 1 ? "waits" : "wait"} behind ${inTheWay || "nobody that is known"}`;
}

/** A statement of somebody's in one line. */
export function oneLine(statement: string, most: number): string {
  return fit(shown(statement.replaceAll(/\s+/g, " ").trim()), most);
}

export interface Drawn {
  readonly head: readonly string[];
  /** `of`: the place of the line that it draws. */
  readonly lines: readonly { readonly session: string; readonly text: string; readonly of: number }[];
}

/** As much of a statement as is shown at the most; and what of these is shown at the least. */
const longest = 100;
const shortest: Readonly<Record<string, number>> = { lock: 36, statement: 20 };

/**
 * With all that is known in one line each, if there is room; else in two or three, with who it is, and what it runs:
 * for all of them, or for this one.
 */
export function drawn(lines: readonly Line[], colors: Colors, width: number, only?: string): Drawn {
  const columns = {
    session: (line: Line) => colors.dim(branch(line, false)) + shown(line.session.id),
    user: ({ session }: Line) => shown(session.user),
    client: ({ session }: Line) => shown(session.client),
    application: ({ session }: Line) => shown(session.application),
    state: ({ session }: Line) => shown(session.state),
    age: (line: Line) => line.age,
    lock: ({ lock }: Line) => lock,
    statement: ({ session }: Line) => oneLine(session.statement, longest),
  };
  const filled = Object.entries(columns)
    .map(([title, of]) => ({ title, cells: lines.map(of) }))
    .filter(
      ({ title, cells }) => title === "session" || title === "lock" || cells.some((each) => each !== ""),
    );
  const widths = filled.map(({ title, cells }) => Math.max(title.length, ...cells.map(plainWidth)));
  const at = (title: string): number => filled.findIndex((column) => column.title === title);
  const least = filled.map(({ title }, i) => Math.min(widths[i] ?? 0, shortest[title] ?? Infinity));
  if (total(least) > width) return narrow(lines, colors, width, only);
  // What is waited for is worth more than what is run.
  for (const i of [at("statement"), at("lock")])
    if (i >= 0) widths[i] = Math.max(least[i] ?? 0, (widths[i] ?? 0) - Math.max(0, total(widths) - width));
  const rows = lines.map((_, row) => filled.map(({ cells }, i) => fit(cells[row] ?? "", widths[i] ?? 0)));
  const [titles = "", rule = "", ...rest] = table(
    filled.map(({ title }) => title),
    rows,
    colors,
  ).split("\n");
  return {
    head: [titles, rule],
    lines: lines.map(({ session }, of) => ({ session: session.id, text: rest[of] ?? "", of })),
  };
}

function narrow(lines: readonly Line[], colors: Colors, width: number, only: string | undefined): Drawn {
  const tree = lines.map((line) => branch(line, true) + shown(line.session.id));
  const widest = Math.min(
    Math.max("session".length, ...tree.map((text) => text.length)),
    Math.floor(width / 2),
  );
  const ages = Math.max("age".length, ...lines.map((line) => line.age.length));
  const row = (a: string, b: string, c: string) =>
    `${fit(a, widest).padEnd(widest)}  ${b.padEnd(ages)}  ${fit(c, Math.max(1, width - widest - ages - 4))}`.trimEnd();
  return {
    head: [fit(colors.bold(row("session", "age", "lock")), width), "─".repeat(width)],
    lines: lines.flatMap((line, of) => {
      const { session } = line;
      const texts = [row(tree[of] ?? "", line.age, line.lock)];
      if (only === undefined || only === session.id) {
        const [room, who, ran] = [
          width - below(line).length - 2,
          described(session),
          oneLine(session.statement, 500),
        ];
        const together = [who, ran].filter((part) => part !== "").join(": ");
        const about = together.length <= room ? [together] : [who, ran];
        for (const part of about)
          if (part !== "") texts.push(colors.dim(fit(`${below(line)}  ${part}`, width)));
      }
      return texts.map((text) => ({ session: session.id, text, of }));
    }),
  };
}

/** "idle in transaction, api, app@10.0.0.5". */
export function described({
  state,
  application,
  user,
  client,
}: Pick<Who, "state" | "application" | "user" | "client">): string {
  const from = [user, client].filter((part) => part !== "").join("@");
  return [state, application, from]
    .filter((part) => part !== "")
    .map(shown)
    .join(", ");
}

function branch({ place }: Line, small: boolean): string {
  const [through, gap, fork, end] = small ? ["│ ", "  ", "├ ", "└ "] : ["│  ", "   ", "├─ ", "└─ "];
  return place.map((last, i) => (i < place.length - 1 ? (last ? gap : through) : last ? end : fork)).join("");
}

/** The lines of the tree that go on below. */
function below({ place, parent }: Line): string {
  return place.map((last) => (last ? "  " : "│ ")).join("") + (parent ? "│" : " ");
}

/** With two blanks between columns. */
function total(widths: readonly number[]): number {
  return widths.reduce((sum, width) => sum + width + 2, -2);
}

function plainWidth(text: string): number {
  return stripVTControlCharacters(text).length;
}
