/** One run of the actors, in an order that is chosen step by step. */
import { setTimeout as sleep } from "node:timers/promises";
import { Actor, type Gate, type Step } from "./gate.ts";

export interface Choice {
  readonly enabled: readonly number[];
  readonly chosen: number;
  /** What was sent. */
  readonly step: Step;
  /** Switches away from an actor that could have gone on, up to and with this one. */
  readonly preemptions: number;
}

export interface Run {
  readonly choices: readonly Choice[];
  readonly results: readonly PromiseSettledResult<unknown>[];
  /** The order did not come out as planned: something else than the schedule decides. */
  readonly strayed: string | undefined;
}

/** Ports that wait for a lock, and for whom. */
type Waiting = (ports: readonly number[]) => Promise<ReadonlyMap<number, readonly number[]>>;

/** A statement that is not answered by then is looked for among those that wait. */
const graceMs = 2;
/** An actor that neither sends anything nor ends waits for something that we do not see. */
const idleMs = 5000;

export async function perform(
  gate: Gate,
  waiting: Waiting,
  actors: readonly { name: string; run: () => Promise<unknown> }[],
  plan: readonly number[],
): Promise<Run> {
  const cast = actors.map(({ name }, index) => new Actor(index, name));
  let wake = Promise.withResolvers<void>();
  gate.changed = () => {
    wake.resolve();
    wake = Promise.withResolvers<void>();
  };
  for (const [i, actor] of cast.entries()) {
    const end = (result: PromiseSettledResult<unknown>) => {
      actor.result = result;
      actor.state = "done";
      gate.changed();
    };
    gate
      .run(actor, async () => (actors[i] as { run: () => Promise<unknown> }).run())
      .then(
        (value) => end({ status: "fulfilled", value }),
        (reason: unknown) => end({ status: "rejected", reason }),
      );
  }

  /** Until everybody is held back, done, or waits for one of the others. */
  const settle = async (): Promise<void> => {
    let since = performance.now();
    for (;;) {
      const open = cast.filter(({ state, blocked }) => state === "running" || (state === "sent" && !blocked));
      if (open.length === 0) {
        // What was blocked may have been let go by the last step.
        const asleep = cast.filter(({ blocked }) => blocked);
        if (asleep.length === 0) return;
        if (await look(asleep)) return;
        since = performance.now();
        continue;
      }
      const before = wake.promise;
      const changed = await Promise.race([before.then(() => true), sleep(graceMs).then(() => false)]);
      if (changed) {
        since = performance.now();
        continue;
      }
      const sent = open.filter(({ state }) => state === "sent");
      if (sent.length > 0) await look(sent);
      else if (performance.now() - since > idleMs) {
        const names = open.map(({ name }) => name).join(", ");
        throw new Error(
          `${names} neither sends a statement nor ends for ${idleMs} ms: it waits for something that is not a statement (a timer, another service, a pool that has no connection left)`,
        );
      }
    }
  };

  /** Marks those that wait for one of the others. Resolves to whether all of these do. */
  const look = async (some: readonly Actor[]): Promise<boolean> => {
    const ports = some.flatMap((actor) => gate.port(actor) ?? []);
    const found = await waiting(ports);
    let all = true;
    for (const actor of some) {
      if (actor.state !== "sent") {
        all = false;
        continue;
      }
      const blockers = found.get(gate.port(actor) ?? -1) ?? [];
      const others = cast.filter((other) => other !== actor && blockers.includes(gate.port(other) ?? -1));
      actor.blocked = others.length > 0;
      for (const { name } of others) actor.step?.waitedFor.add(name);
      all &&= actor.blocked;
    }
    return all;
  };

  const choices: Choice[] = [];
  let last: number | undefined;
  let preemptions = 0;
  let strayed: string | undefined;
  for (;;) {
    await settle();
    const enabled = cast.filter(({ state }) => state === "gated").map(({ index }) => index);
    if (enabled.length === 0) {
      if (cast.every(({ state }) => state === "done")) break;
      // All that are left wait for each other: the server ends one of them.
      const before = wake.promise;
      await Promise.race([before, sleep(idleMs)]);
      continue;
    }
    const planned = plan[choices.length];
    if (planned !== undefined && !enabled.includes(planned))
      strayed ??= `step ${choices.length + 1} was to be ${cast[planned]?.name}'s, which had nothing to send`;
    const goOn = last !== undefined && enabled.includes(last) ? last : (enabled[0] as number);
    const chosen = planned !== undefined && enabled.includes(planned) ? planned : goOn;
    if (last !== undefined && chosen !== last && enabled.includes(last)) preemptions++;
    last = chosen;
    const step = gate.release(cast[chosen] as Actor);
    choices.push({ enabled, chosen, step, preemptions });
  }
  return { choices, results: cast.map(({ result }) => result as PromiseSettledResult<unknown>), strayed };
}
