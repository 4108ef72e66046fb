import { type AsyncHook, createHook } from "node:async_hooks";
import { callSites } from "../../context/call-site.ts";
import type { Actor } from "./actor.ts";
import { current } from "./listen.ts";

/** Frames between an await and the code that it stands in. */
const nearby = 8;
/** Promises that a client makes for one statement; Prisma makes 200. */
const longest = 1000;

/** If it is still to do something. */
export function present(actor: Actor | undefined): Actor | undefined {
  return actor?.over === false ? actor : undefined;
}

/**
 * Writes down where an actor's own code last awaited something: clients that send a statement only when they are awaited have
 * none of it on their stack.
 */
export function awaits(): AsyncHook {
  const init = (_: number, type: string) => {
    const actor = type === "PROMISE" ? present(current.getStore()) : undefined;
    if (actor && actor.trail.push(callSites.here(init, nearby)) > longest) actor.trail.splice(0, longest / 2);
  };
  return createHook({ init });
}
