/** What can befall an actor in the middle of what it does, as a part of a schedule. */
import type { ActorStep } from "./actor.ts";
import { footprint } from "./statement.ts";

/**
 * `crash`: its process ends, and whoever called it calls again. `lost commit`: COMMIT is done, and its answer is lost. `twice`: when
 * it has ended it is called again, as with a message that is delivered twice. `expired lease`: leases run out. `pause`: it
 * stands still until the others have ended, and leases run out meanwhile.
 */
export type FaultKind = "crash" | "lost commit" | "twice" | "expired lease" | "pause";

export const faultKinds: readonly FaultKind[] = ["crash", "lost commit", "twice", "expired lease", "pause"];

/** What is to befall an actor after so many of its own statements, from 0. Of `twice`: at its end. */
export interface PlannedFault {
  readonly kind: FaultKind;
  readonly actor: number;
  readonly nth: number;
}

/** After which choice it was. */
export interface Fault extends PlannedFault {
  readonly after: number;
}

/** How a replay writes it. */
export const faultLetters: Readonly<Record<FaultKind, string>> = {
  crash: "c",
  "lost commit": "l",
  twice: "t",
  "expired lease": "e",
  pause: "p",
};

export const faultOf = (letter: string): FaultKind | undefined =>
  faultKinds.find((kind) => faultLetters[kind] === letter);

export function faultText({ kind, actor }: Fault, names: readonly string[]): string {
  const name = names[actor] ?? "";
  const texts: Readonly<Record<FaultKind, string>> = {
    crash: `${name}'s process ends here, and ${name} is called again`,
    "lost commit": `the answer to this COMMIT is lost`,
    twice: `${name} is called again, as if nobody had heard that it is done`,
    "expired lease": "leases run out here",
    pause: `${name} stands still until the others have ended; leases run out`,
  };
  return texts[kind];
}

/** What would have helped. */
export function faultFix({ kind }: Fault): string {
  const again =
    "Do all of it in one transaction that also keeps that it was done: once(hf, id, async (tx) => …), with an id that is the same when it is called again.";
  const fenced =
    "Whoever has had a lease may have lost it: fenced(tx, lease) in the transaction that writes refuses what comes too late.";
  const texts: Readonly<Record<FaultKind, string>> = {
    crash: `It was ended in the middle, and called again: what it had done before was done twice, or stayed half done. ${again}`,
    "lost commit": `It does not know whether COMMIT was done, and did it again. ${again} hf.transaction asks the server what became of it.`,
    twice: `It was called twice, and did it twice. ${again}`,
    "expired lease": fenced,
    pause: fenced,
  };
  return texts[kind];
}

/** Each of them, at each moment of each actor that a run without one has shown. */
export function faultsIn(
  kinds: readonly FaultKind[],
  { choices }: { readonly choices: readonly { readonly chosen: number; readonly step: ActorStep }[] },
  actors: number,
): PlannedFault[] {
  const faults: PlannedFault[] = [];
  for (let actor = 0; actor < actors; actor++) {
    const own = choices.filter(({ chosen }) => chosen === actor);
    for (const [nth, { step }] of own.entries())
      for (const kind of kinds) {
        if (kind === "twice" && nth > 0) continue;
        if (kind === "lost commit" && !lasts(step)) continue;
        // At its end there is nothing left that could be stopped.
        if (kind === "pause" && nth === own.length - 1) continue;
        faults.push({ kind, actor, nth });
      }
  }
  return faults;
}

/** It makes lasting what was written: COMMIT, in whatever words, or a statement outside of any transaction that writes. */
function lasts({ text, inside, ends, opens, error }: ActorStep): boolean {
  const { kind } = footprint(text);
  if (error !== undefined || kind === "rollback") return false;
  // Of one by itself that is kept open, its COMMIT is a step of its own.
  return kind === "commit" || ends || (!inside && !opens && (kind === "insert" || kind === "write"));
}
