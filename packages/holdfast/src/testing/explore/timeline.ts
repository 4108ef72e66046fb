/** A schedule as people read it: one column for each actor. */
import { basename } from "node:path";
import type { Diagnosis } from "./anomaly.ts";
import type { Run } from "./schedule.ts";

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
}

export function turns(
  { choices }: Run,
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

function brought(rows: readonly (readonly string[])[]): string {
  if (rows.length === 0) return "";
  const shown = rows.slice(0, 2).map((row) => row.join(", "));
  return ` → ${short(flat(shown.join(" | ") + (rows.length > 2 ? " | …" : "")), 24)}`;
}

const least = 30;
const most = 72;

export function timeline(all: readonly Turn[], names: readonly string[]): string {
  const texts = all.map((turn) => {
    const waits = turn.waitsFor.length > 0 ? ` ⏳ waits for ${turn.waitsFor.join(", ")}` : "";
    const error = turn.error ? ` ✗ ${short(flat(turn.error), 80)}` : "";
    const place = turn.place ? `  ${basename(turn.place).replace(/:\d+$/, "")}` : "";
    const stale = turn.stale ? "  ◄ stale" : "";
    return `${clipped(turn.statement)}${brought(turn.rows)}${stale}${waits}${error}${place}`;
  });
  const width = (name: string) =>
    Math.max(
      least,
      name.length,
      ...texts.filter((_, i) => all[i]?.actor === name).map(({ length }) => length),
    ) + 3;
  const starts = new Map<string, number>();
  let start = 0;
  for (const name of names) {
    starts.set(name, start);
    // So that the columns stay on a screen, a long line runs into the next column, which is empty there.
    start += Math.min(width(name), 58);
  }
  const lines = [`     ${names.map((name) => name.padEnd(Math.min(width(name), 58))).join("")}`.trimEnd()];
  for (const [i, turn] of all.entries()) {
    if (turn.switched) lines.push(" ──  switch");
    lines.push(
      `${String(turn.n).padStart(3)}  ${" ".repeat(starts.get(turn.actor) ?? 0)}${texts[i]}`.trimEnd(),
    );
  }
  return lines.join("\n");
}

/** "A4B4AB": whose turn, and how many in a row; "!B": whom the server ended in a deadlock. */
export function replayOf({ choices, deadlocks }: Run): string {
  const victim = deadlocks.at(-1)?.victim;
  const turnsOf = choices
    .map(({ chosen }) => letter(chosen))
    .join("")
    .replaceAll(/(.)\1+/g, (same, each: string) => `${each}${same.length}`);
  return victim === undefined ? turnsOf : `${turnsOf}!${letter(victim)}`;
}

const letter = (actor: number) => String.fromCharCode(65 + actor);

export function planOf(replay: string): { order: number[]; victim: number | undefined } {
  const [order = "", victim] = replay.split("!");
  return {
    order: [...order.matchAll(/([A-Z])(\d*)/g)].flatMap(([, each = "A", count]) =>
      Array.from({ length: count ? Number(count) : 1 }, () => each.charCodeAt(0) - 65),
    ),
    victim: victim ? victim.charCodeAt(0) - 65 : undefined,
  };
}
