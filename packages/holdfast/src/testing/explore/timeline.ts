/** A schedule as people read it: one column for each actor. */
import { basename } from "node:path";
import { UsageError } from "../../seam/errors.ts";
import type { Diagnosis } from "./anomaly.ts";
import { faultLetters, faultOf, faultText } from "./faults.ts";
import type { ExplorePlan, ExploreRun } from "./schedule.ts";

/** One line of a schedule. */
export interface Turn {
  readonly n: number;
  readonly actor: string;
  readonly statement: string;
  /** What was read, as text. */
  readonly rows: readonly (readonly string[])[];
  /** It had to wait for these actors. */
  readonly waitsFor: readonly string[];
  readonly error?: string;
  /** `file:line:column` in your code, if the stack shows it. */
  readonly place?: string;
  /** The one before could have gone on. */
  readonly switched: boolean;
  /** What was read was out of date when it was acted on. */
  readonly stale: boolean;
  /** Who began at this moment, before this one could go on; the others were there from the start. */
  readonly begins?: string;
  /** What happened after it. */
  readonly fault?: string;
}

export function turns(
  { choices, late, fault }: ExploreRun,
  names: readonly string[],
  { stale }: Pick<Diagnosis, "stale">,
): Turn[] {
  const all = choices.map(({ chosen, step, preemptions }, i) => ({
    n: i + 1,
    actor: names[chosen] ?? "",
    statement: step.implicit ? `${step.text} (by itself)` : flat(step.text),
    rows: step.rows,
    waitsFor: [...step.waitedFor].map((other) => names[other] ?? ""),
    ...(step.error === undefined ? {} : { error: step.error }),
    ...(step.place === undefined ? {} : { place: step.place }),
    switched: preemptions > (choices[i - 1]?.preemptions ?? 0),
    stale: stale.has(i),
    ...(late?.after === i ? { begins: names[late.actor] ?? "" } : {}),
    ...(fault?.after === i ? { fault: faultText(fault, names) } : {}),
  }));
  // A transaction of one statement that nobody came into is one line.
  return all.filter((_, i) => !choices[i]?.step.implicit || choices[i - 1]?.chosen !== choices[i]?.chosen);
}

const flat = (text: string) => text.replaceAll(/\s+/g, " ").trim();

function short(text: string, most: number): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** What locks stands at the end. */
function clipped(text: string): string {
  return text.length > most ? `${text.slice(0, most - 20)} … ${text.slice(-17)}` : text;
}

function ends(text: string, room: number): string {
  if (text.length <= room) return text;
  const end = Math.min(17, Math.floor(room / 3));
  return room < 24 ? short(text, room) : `${text.slice(0, room - end - 3)} … ${text.slice(-end)}`;
}

function brought(rows: readonly (readonly string[])[]): string {
  if (rows.length === 0) return "";
  const shown = rows.slice(0, 2).map((row) => row.join(", "));
  return ` → ${short(flat(shown.join(" | ") + (rows.length > 2 ? " | …" : "")), 24)}`;
}

const least = 30;
const most = 72;

/** Of more than two actors: no line is longer than that, and the last of them has so much of it. */
const wide = { all: 100, last: 45 };

export function timeline(all: readonly Turn[], names: readonly string[]): string {
  return names.length > 2 ? narrow(all, names) : sideBySide(all, names);
}

/** What follows a statement, the most important first. */
function remarks(turn: Turn, errorLength: number): string[] {
  return [
    brought(turn.rows),
    turn.stale ? "  ◄ stale" : "",
    turn.waitsFor.length > 0 ? ` ⏳ waits for ${turn.waitsFor.join(", ")}` : "",
    turn.error ? ` ✗ ${short(flat(turn.error), errorLength)}` : "",
    turn.place ? `  ${basename(turn.place).replace(/:\d+$/, "")}` : "",
  ];
}

function sideBySide(all: readonly Turn[], names: readonly string[]): string {
  const texts = all.map((turn) => clipped(turn.statement) + remarks(turn, 80).join(""));
  const widthOf = (name: string) =>
    Math.max(
      least,
      name.length,
      ...texts.filter((_, i) => all[i]?.actor === name).map(({ length }) => length),
    ) + 3;
  // So that the columns stay on a screen, a long line runs into the next column, which is empty there.
  const widths = names.map((name) => Math.min(widthOf(name), 58));
  return drawn(all, names, widths, (_, i) => texts[i] ?? "");
}

function narrow(all: readonly Turn[], names: readonly string[]): string {
  const column = Math.max(2, Math.floor((wide.all - gutter - wide.last) / (names.length - 1)));
  return drawn(
    all,
    names,
    names.map(() => column),
    (turn, _, start) => {
      const room = wide.all - gutter - start;
      const notes = remarks(turn, 40);
      const left = () => room - notes.join("").length;
      // Where there is no room for it, whoever wants to know looks at the report.
      if (left() < Math.min(turn.statement.length, 28)) notes.pop();
      return short(ends(turn.statement, Math.max(16, left())) + notes.join(""), room);
    },
  );
}

/** For the numbers of the steps. */
const gutter = 5;

function drawn(
  all: readonly Turn[],
  names: readonly string[],
  widths: readonly number[],
  text: (turn: Turn, i: number, start: number) => string,
): string {
  const startOf = (actor: string) => widths.slice(0, names.indexOf(actor)).reduce((a, b) => a + b, 0);
  const heads = names.map((name, i) => short(name, (widths[i] ?? 0) - 1).padEnd(widths[i] ?? 0));
  const lines = [`${" ".repeat(gutter)}${heads.join("")}`.trimEnd()];
  for (const [i, turn] of all.entries()) {
    if (turn.switched) lines.push(" ──  switch");
    const start = startOf(turn.actor);
    lines.push(`${String(turn.n).padStart(3)}  ${" ".repeat(start)}${text(turn, i, start)}`.trimEnd());
    if (turn.fault !== undefined) lines.push(` ──  ${turn.fault}`);
    if (turn.begins !== undefined)
      lines.push(` ──  ${turn.begins} begins, and gets the connection that was just given back`);
  }
  return lines.join("\n");
}

/**
 * "A4B4AB": whose turn, and how many in a row; "+B": who begins there; a small
 * letter: what befell it there (faults.ts); "!B": whom the server ended in a deadlock.
 */
export function replayOf({ choices, deadlocks, late, fault }: ExploreRun): string {
  const victim = deadlocks.at(-1)?.victim;
  const marks = (i: number) =>
    (fault?.after === i ? faultLetters[fault.kind] : "") +
    (late?.after === i ? `+${letter(late.actor)} ` : "");
  const turnsOf = choices
    .map(({ chosen }, i) => letter(chosen) + marks(i))
    .join("")
    .replaceAll(/([A-Z])\1+/g, (same, each: string) => `${each}${same.length}`)
    .replace(" ", "");
  return victim === undefined ? turnsOf : `${turnsOf}!${letter(victim)}`;
}

const letter = (actor: number) => String.fromCharCode(65 + actor);

/** Of what a report named, and of nothing else. */
export function planOf(
  replay: string,
  actors: readonly string[],
): Pick<ExplorePlan, "order" | "victim" | "late" | "fault"> {
  const last = letter(actors.length - 1);
  const turn = `[A-${last}]\\d{0,4}[${Object.values(faultLetters).join("")}]?`;
  if (!new RegExp(`^(?:${turn})+(?:\\+[A-${last}](?:${turn})+)?(?:![A-${last}])?$`).test(replay))
    throw new UsageError(
      `explore: replay is an order that a report named, such as A2B4A2 for ${actors.length === 2 ? "both" : `the ${actors.length}`} actors (A to ${last}), and not ${JSON.stringify(replay)}`,
    );
  const [order = "", victim] = replay.split("!");
  const numberOf = (name: string) => name.charCodeAt(0) - 65;
  const plan: { order: number[]; late?: ExplorePlan["late"]; fault?: ExplorePlan["fault"] } = { order: [] };
  for (const [, plus, each = "A", count, mark] of order.matchAll(/(\+?)([A-Z])(\d*)([a-z]?)/g)) {
    const actor = numberOf(each);
    if (plus) {
      plan.late = { actor, after: plan.order.length - 1 };
      continue;
    }
    plan.order.push(...Array.from({ length: count ? Number(count) : 1 }, () => actor));
    const kind = faultOf(mark ?? "");
    if (kind) plan.fault = { kind, actor, nth: plan.order.filter((each) => each === actor).length - 1 };
  }
  return { ...plan, victim: victim ? numberOf(victim) : undefined };
}
