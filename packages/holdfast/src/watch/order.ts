/**
 * The order in which locks are taken, by namespaces of keys and by tables, for the whole process. Two transactions that take
 * the same two in different orders are a deadlock as soon as they meet; that they do it is seen long before.
 */
import type { OrderStep } from "../core/events.ts";
import type { Site } from "../core/site.ts";

export interface Kind {
  readonly name: string;
  readonly next: Map<Kind, OrderStep>;
  /** Keys of one namespace, one after the other: those whose ids went up, and those whose ids went down. */
  up?: OrderStep;
  down?: OrderStep;
}

export interface Holding {
  readonly kind: Kind;
  readonly site: Site | undefined;
  /** The last of its keys, in the order in which one call takes them. */
  last: string | undefined;
}

/** A namespace that came from data must not eat the memory. */
const most = 1000;
const kinds = new Map<string, Kind>();
/** Files that get a line for each step when it is first seen. */
const files = new Set<string>();

export function kindOf(name: string): Kind | undefined {
  const known = kinds.get(name);
  if (known || kinds.size >= most) return known;
  const made: Kind = { name, next: new Map() };
  kinds.set(name, made);
  return made;
}

/** Whoever holds these asks for another. What is new about it, and leads back to where it began, is returned. */
export function follow(
  held: readonly Holding[],
  kind: Kind,
  first: string | undefined,
  site: Site | undefined,
): readonly OrderStep[] | undefined {
  let inverted: readonly OrderStep[] | undefined;
  for (const before of held) {
    if (before.kind === kind) inverted = again(before, first, site) ?? inverted;
    else if (!before.kind.next.has(kind)) {
      const step: OrderStep = {
        from: before.kind.name,
        to: kind.name,
        first: before.site?.place,
        second: site?.place,
      };
      before.kind.next.set(kind, step);
      write(step);
      const back = path(kind, before.kind);
      if (back) inverted = [step, ...back];
    }
  }
  return inverted;
}

/** Another key of a namespace that is held: in one order by accident, or always. */
function again(before: Holding, id: string | undefined, site: Site | undefined): OrderStep[] | undefined {
  const { kind, last } = before;
  if (id === undefined || last === undefined || id === last) return undefined;
  const way = id > last ? "up" : "down";
  if (kind[way]) return undefined;
  const step: OrderStep = { from: kind.name, to: kind.name, first: before.site?.place, second: site?.place };
  kind[way] = step;
  write(step, way);
  const other = kind[way === "up" ? "down" : "up"];
  return other && [step, other];
}

function path(from: Kind, to: Kind): OrderStep[] | undefined {
  const came = new Map<Kind, { readonly by: OrderStep; readonly from: Kind } | undefined>([
    [from, undefined],
  ]);
  const queue = [from];
  for (const each of queue) {
    if (each === to) {
      const steps: OrderStep[] = [];
      for (let at = came.get(to); at; at = came.get(at.from)) steps.unshift(at.by);
      return steps;
    }
    for (const [next, by] of each.next) {
      if (came.has(next)) continue;
      came.set(next, { by, from: each });
      queue.push(next);
    }
  }
  return undefined;
}

/** From now on; what is known already is written at once. */
export function keepOrderIn(file: string): void {
  if (files.has(file)) return;
  files.add(file);
  const lines: string[] = [];
  for (const kind of kinds.values()) {
    for (const step of kind.next.values()) lines.push(lineOf(step));
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
