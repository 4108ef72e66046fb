/** Who holds what as lines of a table: those in the way with everybody behind them as a tree, then what nobody waits for. */
import { type Colors, age, fit, table } from "../terminal.ts";
import { type Entry, type Knot, type Look, plainName } from "./look.ts";
import { shown } from "../text.ts";

export interface Line {
  /** Of the session that it is about. */
  readonly session: string;
  readonly cells: readonly string[];
}

export interface View {
  /** Roots of chains, and below them who waits. */
  readonly waiting: readonly Line[];
  readonly held: readonly Line[];
}

const head = ["session", "application", "state", "age", "lock"] as const;

export function viewOf({ at, entries, chains }: Look, colors: Colors, blocked: boolean): View {
  const waiting: Line[] = [];
  for (const chain of chains) {
    waiting.push(line(chain, "", at, colors));
    branch(chain.waiters, "", at, colors, waiting);
  }
  if (blocked) return { waiting, held: [] };
  const inTheWay = new Set<Entry>();
  const collect = ({ holds, waiters }: Knot): void => {
    for (const entry of holds) inTheWay.add(entry);
    for (const each of waiters) collect(each);
  };
  for (const chain of chains) collect(chain);
  const held = entries
    .filter((entry) => entry.granted && !inTheWay.has(entry))
    .map((entry): Line => {
      const { session } = entry;
      return {
        session: session.id,
        cells: [
          shown(session.id),
          shown(session.application),
          shown(session.state),
          since(session.since, at),
          nameOf(entry, colors) + aside(entry, at, colors),
        ],
      };
    });
  return { waiting, held };
}

function branch(knots: readonly Knot[], indent: string, at: Date, colors: Colors, lines: Line[]): void {
  for (const [i, knot] of knots.entries()) {
    const last = i === knots.length - 1;
    lines.push(line(knot, `${indent}${last ? "└─ " : "├─ "}`, at, colors));
    branch(knot.waiters, `${indent}${last ? "   " : "│  "}`, at, colors, lines);
  }
}

function line({ session, holds, waits }: Knot, indent: string, at: Date, colors: Colors): Line {
  const own = waits.length > 0;
  const waited = Math.max(...waits.map(({ waitingMs }) => waitingMs ?? -1));
  const list = (entries: readonly Entry[]) =>
    entries
      .map((entry) => nameOf(entry, colors) + (entry.granted ? aside(entry, at, colors) : ""))
      .join(", ");
  const does = own ? `waits for ${list(waits)}` : `holds ${list(holds)}`;
  return {
    session: session.id,
    cells: [
      colors.dim(indent) + shown(session.id),
      shown(session.application),
      shown(session.state),
      own ? (waited < 0 ? "" : age(waited)) : since(session.since, at),
      own ? colors.yellow(does) : does,
    ],
  };
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
    .toLowerCase();
}

export function counts({ entries, chains }: Look): string {
  const waiting = new Set(entries.filter(({ granted }) => !granted).map(({ session }) => session.id)).size;
  const held = entries.filter(({ granted }) => granted).length;
  const inTheWay = chains.filter(({ waiters }) => waiters.length > 0).length;
  if (waiting === 0) return `${held} held, nobody waits`;
  return `${held} held, ${waiting} ${waiting === 1 ? "waits" : "wait"} behind ${inTheWay || "nobody that is known"}`;
}

/** Lines of one table, the head and a rule first, none wider than this. */
export function drawn(lines: readonly Line[], colors: Colors, width: number): string[] {
  const [titles = "", rule = "", ...rest] = table(
    head,
    lines.map(({ cells }) => cells),
    colors,
  ).split("\n");
  return [fit(titles, width), rule.slice(0, width), ...rest.map((line) => fit(line, width))];
}
