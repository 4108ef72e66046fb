/** A schedule as people read it: one column for each actor. */
import { basename } from "node:path";
import type { Run } from "./schedule.ts";

const width = 46;

function short(text: string, most: number): string {
  const flat = text.replaceAll(/\s+/g, " ").trim();
  return flat.length > most ? `${flat.slice(0, most - 1)}…` : flat;
}

function brought(rows: readonly (readonly string[])[]): string {
  if (rows.length === 0) return "";
  const shown = rows.slice(0, 2).map((row) => row.join(", "));
  return ` → ${short(shown.join(" | ") + (rows.length > 2 ? " | …" : ""), 24)}`;
}

export function timeline({ choices }: Run, names: readonly string[]): string {
  const lines = [`     ${names.map((name) => name.padEnd(width)).join("")}`];
  let last: number | undefined;
  for (const [i, { chosen, step, enabled }] of choices.entries()) {
    if (last !== undefined && last !== chosen && enabled.includes(last)) lines.push(" ──  switch");
    last = chosen;
    const waits = step.waitedFor.size > 0 ? ` ⏳ waits for ${[...step.waitedFor].join(", ")}` : "";
    const error = step.error ? ` ✗ ${step.error}` : "";
    const place = step.place ? `  ${basename(step.place).replace(/:\d+$/, "")}` : "";
    const text = `${short(step.text, 60)}${brought(step.rows)}${waits}${error}${place}`;
    lines.push(`${String(i + 1).padStart(3)}  ${" ".repeat(chosen * width)}${text}`.trimEnd());
  }
  return lines.join("\n");
}

/** "A4B4AB": whose turn, and how many in a row. */
export function replayOf({ choices }: Run): string {
  return choices
    .map(({ chosen }) => String.fromCharCode(65 + chosen))
    .join("")
    .replaceAll(/(.)\1+/g, (same, letter: string) => `${letter}${same.length}`);
}

export function planOf(replay: string): number[] {
  return [...replay.matchAll(/([A-Z])(\d*)/g)].flatMap(([, letter = "A", count]) =>
    Array.from({ length: count ? Number(count) : 1 }, () => letter.charCodeAt(0) - 65),
  );
}
