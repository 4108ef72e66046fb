/** What has a name in this process: also for those who begin to listen when it is there already. */
import { type Made, emit } from "./events.ts";

export type { Made } from "./events.ts";

/** A leader of this process, or one that would be. */
export interface Candidate extends Made {
  readonly kind: "leader";
  /** While it leads. */
  fence?: number | undefined;
}

/** Names that come from data must not eat the memory. */
const most = 1000;

const named = new Map<string, Made>();
const standing = new Set<Candidate>();

export function made(kind: Exclude<Made["kind"], "leader">, name: string): void {
  const one: Made = { kind, name };
  if (named.size < most) named.set(`${kind} ${name}`, one);
  emit("holdfast:made", () => one);
}

export function stand(name: string): Candidate {
  const one: Candidate = { kind: "leader", name };
  standing.add(one);
  emit("holdfast:made", () => ({ kind: one.kind, name }));
  return one;
}

/** It is no candidate any more. */
export function withdraw(one: Candidate): void {
  if (standing.delete(one)) emit("holdfast:leader:withdrawn", () => ({ leader: one.name }));
}

export function allMade(): readonly (Made | Candidate)[] {
  return [...named.values(), ...standing];
}
