/** Smaller programs that go wrong as well. */
import type { ActorProgram, Operation, Program } from "./program.ts";

/** Those with one operation less, or with a block's body instead of the block. */
function* smaller(body: readonly Operation[]): Generator<readonly Operation[]> {
  for (const [i, operation] of body.entries()) {
    const [before, after] = [body.slice(0, i), body.slice(i + 1)];
    if (body.length > 1) yield [...before, ...after];
    if (operation.do === "send") continue;
    if (operation.body.length > 0) yield [...before, ...operation.body, ...after];
    for (const within of smaller(operation.body)) yield [...before, { ...operation, body: within }, ...after];
  }
}

function* candidates(program: Program): Generator<Program> {
  const actors = Object.entries(program.actors);
  for (const [name, { body }] of actors) {
    if (actors.length > 2) {
      const { [name]: _, ...others } = program.actors;
      yield { ...program, actors: others };
    }
    for (const less of smaller(body)) {
      const actor = { ...(program.actors[name] as ActorProgram), body: less };
      yield { ...program, actors: { ...program.actors, [name]: actor } };
    }
  }
}

/** The smallest that was found in this time. */
export async function shrunk(
  program: Program,
  isWrong: (program: Program) => Promise<boolean>,
  ms: number,
): Promise<Program> {
  const until = performance.now() + ms;
  let best = program;
  for (let better = true; better;) {
    better = false;
    for (const candidate of candidates(best)) {
      if (performance.now() > until) return best;
      if (!(await isWrong(candidate).catch(() => false))) continue;
      best = candidate;
      better = true;
      break;
    }
  }
  return best;
}
