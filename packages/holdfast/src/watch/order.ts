/**
 * The order in which locks are taken, by namespaces of keys and by tables, for the whole process. Two transactions that take
 * the same two in different orders are a deadlock as soon as they meet; that they do it is seen long before.
 */
import type { OrderStep } from "../events/events.ts";
import type { Key, LockRequest } from "../seam/key.ts";
import type { CallSite } from "../context/call-site.ts";

/** Of keys, their namespace; of rows, their table. */
export interface LockKind {
  readonly name: string;
  readonly next: Map<LockKind, Step[]>;
  /** Keys of one namespace, or rows of one table, one after the other: those whose ids went up, and those whose ids went down. */
  up?: OrderStep;
  down?: OrderStep;
}

/** Two who share a lock do not wait for each other: what leads back to where it began must be in the way everywhere. */
interface Step {
  readonly from: LockKind;
  readonly to: LockKind;
  readonly sharedFirst: boolean;
  readonly sharedSecond: boolean;
  told: OrderStep;
}

export interface LockHolding {
  readonly kind: LockKind;
  readonly site: CallSite | undefined;
  shared: boolean;
  /** What its ids are; undefined: not all of them are known, or not by the same. */
  by: string | undefined;
  readonly ids: Set<string>;
  /** The greatest of them. */
  last: string;
}

/** What somebody asks for. */
export interface Wanted {
  readonly kind: LockKind;
  readonly shared: boolean;
  /** Of a key, or of a row. */
  readonly id: string | undefined;
  /** What the id is: only those of the same column are compared. Undefined: it is not known which are wanted. */
  readonly by: string | undefined;
}

/** A namespace that came from data must not eat the memory. */
const most = 1000;
const namespaces = new Map<string, LockKind>();
const tables = new Map<string, LockKind>();
/** Files that get a line for each step when it is first seen. */
const files = new Set<string>();

function kindIn(kinds: Map<string, LockKind>, what: string, name: string): LockKind | undefined {
  const known = kinds.get(name);
  if (known || kinds.size >= most) return known;
  const made: LockKind = { name: `${what} ${name}`, next: new Map() };
  kinds.set(name, made);
  return made;
}

const hasOneText: ReadonlySet<string> = new Set(["hashtext", "hashtextextended", "getLock"]);

export function wantedKeys(keys: readonly LockRequest[]): readonly Wanted[] {
  const wanted: Wanted[] = [];
  for (const { key, mode } of keys) {
    const [first] = key.parts;
    // In a name that is one text, what stands before its first colon.
    const namespace = hasOneText.has(key.form.kind) ? first?.split(":")[0] : first;
    const kind = namespace === undefined ? undefined : kindIn(namespaces, "key", namespace);
    if (kind) wanted.push({ kind, id: key.id, by: "key", shared: mode === "shared" });
  }
  return wanted;
}

/** The same lock, taken by a statement: in the order of what is written there. */
export function wantedCall(key: Key, shared: boolean): readonly Wanted[] {
  const last = key.parts.at(-1) ?? "";
  const id = sortable(hasOneText.has(key.form.kind) ? last.slice(last.indexOf(":") + 1) : last);
  return wantedKeys([{ key, mode: shared ? "shared" : "exclusive" }]).map((each) => ({
    ...each,
    id,
    by: "written",
  }));
}

/** `table`: without its schema. */
export function wantedRows(table: string, shared: boolean): readonly Wanted[] {
  const kind = kindIn(tables, "table", table);
  return kind ? [{ kind, id: undefined, by: undefined, shared }] : [];
}

/** What others would bring into the same order: numbers, words and UUIDs. Undefined: collations differ. */
export function sortable(text: string): string | undefined {
  if (!/^(?:[a-z\d]+|[\da-f]+(?:-[\da-f]+){4})$/.test(text)) return undefined;
  return text.replaceAll(/^\d+$/g, (digits) => digits.padStart(20, "0"));
}

/** From now on it is held too, by the same transaction. */
export function hold(held: LockHolding[], wanted: Wanted, site: CallSite | undefined): void {
  const { kind, id, by, shared } = wanted;
  const known = held.find((each) => each.kind === kind);
  if (!known) {
    const ids = id === undefined ? [] : [id];
    held.push({ kind, site, shared, by, ids: new Set(ids), last: id ?? "" });
    return;
  }
  if (by !== known.by) known.by = undefined;
  else if (id !== undefined) {
    known.ids.add(id);
    if (id > known.last) known.last = id;
  }
  known.shared &&= shared;
}

/** It was given back. */
export function letGo(held: LockHolding[], { kind, id }: Wanted): void {
  const at = held.findIndex((each) => each.kind === kind);
  const known = held[at];
  if (!known) return;
  if (id !== undefined) known.ids.delete(id);
  if (known.ids.size === 0) held.splice(at, 1);
  else if (id === known.last) known.last = [...known.ids].reduce((a, b) => (a > b ? a : b));
}

/** Whoever holds these asks for another. What is new about it, and leads back to where it began, is returned. */
export function follow(
  held: readonly LockHolding[],
  wanted: Wanted,
  site: CallSite | undefined,
): readonly OrderStep[] | undefined {
  if (held.some((before) => mayHave(before, wanted))) return undefined;
  let inverted: readonly OrderStep[] | undefined;
  for (const before of held)
    inverted =
      (before.kind === wanted.kind ? again(before, wanted, site) : then(before, wanted, site)) ?? inverted;
  return inverted;
}

/** It is held already, or it is not known which rows of the table are. */
function mayHave({ kind, by, ids }: LockHolding, wanted: Wanted): boolean {
  if (kind !== wanted.kind || wanted.id === undefined) return false;
  return by !== wanted.by || ids.size === 0 || ids.has(wanted.id);
}

function then(before: LockHolding, wanted: Wanted, site: CallSite | undefined): OrderStep[] | undefined {
  const { kind: from, shared: sharedFirst } = before;
  const { kind: to, shared: sharedSecond } = wanted;
  const known = from.next.get(to);
  if (known)
    for (const step of known)
      if (step.sharedFirst === sharedFirst && step.sharedSecond === sharedSecond) {
        // Nobody had asked for places when it was first seen.
        if (step.told.second === undefined && site) step.told = told(before, to, site);
        return undefined;
      }
  const step: Step = { from, to, sharedFirst, sharedSecond, told: told(before, to, site) };
  if (known) known.push(step);
  else from.next.set(to, [step]);
  write(step.told);
  return round(step);
}

function told(before: LockHolding, to: LockKind, site: CallSite | undefined): OrderStep {
  return { from: before.kind.name, to: to.name, first: before.site?.place, second: site?.place };
}

/** Another key of a namespace, or row of a table, that is held: in one order by accident, or always. */
function again(
  before: LockHolding,
  { id, shared }: Wanted,
  site: CallSite | undefined,
): readonly OrderStep[] | undefined {
  const { kind, last } = before;
  if (id === undefined || (shared && before.shared)) return undefined;
  const way = id > last ? "up" : "down";
  if (kind[way]) return undefined;
  const step = told(before, kind, site);
  kind[way] = step;
  write(step, way);
  const other = kind[way === "up" ? "down" : "up"];
  return other && [step, other];
}

/** The shortest way from where a step leads, back to where it began, if each of them would wait for the next. */
function round(start: Step): OrderStep[] | undefined {
  const came = new Map<Step, Step | undefined>([[start, undefined]]);
  for (const step of came.keys()) {
    if (step !== start && step.to === start.from && !(step.sharedSecond && start.sharedFirst)) {
      const steps: OrderStep[] = [];
      for (let at: Step | undefined = step; at; at = came.get(at)) steps.unshift(at.told);
      return steps;
    }
    for (const next of step.to.next.values())
      for (const each of next)
        if (!came.has(each) && !(step.sharedSecond && each.sharedFirst)) came.set(each, step);
  }
  return undefined;
}

/** From now on; what is known already is written at once. */
export function keepOrderIn(file: string): void {
  if (files.has(file)) return;
  files.add(file);
  const lines: string[] = [];
  for (const kind of [...namespaces.values(), ...tables.values()]) {
    for (const steps of kind.next.values()) for (const step of steps) lines.push(lineOf(step.told));
    for (const way of ["up", "down"] as const) if (kind[way]) lines.push(lineOf(kind[way], way));
  }
  append(file, lines);
}

/** A line for each, written when it is first seen: a process may be killed at any time. */
function write(step: OrderStep, way?: "up" | "down"): void {
  for (const file of files) append(file, [lineOf(step, way)]);
}

function lineOf(step: OrderStep, way?: "up" | "down"): string {
  return `${JSON.stringify({ holdfast: "order", ...step, ...(way && { way }), pid: process.pid })}\n`;
}

let warned = false;

function append(file: string, lines: readonly string[]): void {
  if (lines.length === 0) return;
  try {
    process.getBuiltinModule("node:fs").appendFileSync(file, lines.join(""));
  } catch (error) {
    files.delete(file);
    if (!warned)
      process.emitWarning(`The order of locks could not be written: ${String(error)}`, "HoldfastWarning");
    warned = true;
  }
}
